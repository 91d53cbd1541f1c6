#include "plugin-tuner/agreement_ledger.h"

#include <fmt/format.h>

#include <iterator>

namespace hoccl {
namespace {

/// More silent ranks than this are counted, not listed.
constexpr std::size_t kListedRanks = 16;

std::string who(std::uint32_t rank, const std::string& host) {
  return fmt::format("rank {} on host {}", rank, host);
}

std::string durationText(std::chrono::milliseconds duration) {
  const auto ms = duration.count();
  return ms % 1000 == 0 ? fmt::format("{} s", ms / 1000) : fmt::format("{} ms", ms);
}

}  // namespace

Status AgreementLedger::take(ConnectionId from, std::uint16_t version, wire::Hello hello,
                             Clock::time_point now, std::vector<Delivery>* out) {
  Group& group = groupFor(hello, version);
  const auto seat = seats_.find(from);
  if (seat != seats_.end() && (seat->second.group != &group || seat->second.rank != hello.rank)) {
    return Status::error(Code::Remote, fmt::format("rank {} speaks as rank {} or for another "
                                                   "communicator over one connection",
                                                   seat->second.rank, hello.rank));
  }
  if (group.refusal) {
    out->push_back({from, group.refusal});
    return {};
  }
  std::string reason = objection(group, hello, version, from);
  if (!reason.empty()) {
    refuse(group, reason, out);
    out->push_back({from, group.refusal});
    return {};
  }
  Member& member = group.members[hello.rank];
  if (hello.phase != group.phase || member.answered) {
    return Status::error(Code::Remote,
                         fmt::format("{} sends phase {} while phase {} is under way",
                                     who(hello.rank, hello.host), hello.phase, group.phase));
  }
  if (seat == seats_.end()) {
    seats_[from] = {&group, hello.rank};
    ++group.connections;
    member.connection = from;
    member.came = true;
    member.host = std::move(hello.host);
  }
  member.answered = true;
  member.payload = std::move(hello.payload);
  if (!group.open) {
    group.open = true;
    group.deadline = now + agreeTimeout_;
    deadlines_.insert({group.deadline, &group});
  }
  ++group.answers;
  if (!hello.veto.empty()) {
    refuse(group, fmt::format("{}: {}", who(hello.rank, member.host), hello.veto), out);
    return {};
  }
  if (group.left) {
    refuse(
        group,
        fmt::format("{} has left: see its log", who(*group.left, group.members[*group.left].host)),
        out);
    return {};
  }
  if (group.answers == group.members.size()) agree(group, out);
  return {};
}

void AgreementLedger::forget(ConnectionId connection, std::vector<Delivery>* out) {
  const auto seat = seats_.find(connection);
  if (seat == seats_.end()) return;
  Group& group = *seat->second.group;
  const std::uint32_t rank = seat->second.rank;
  seats_.erase(seat);
  --group.connections;
  if (group.refusal) return;
  group.members[rank].connection = 0;
  group.left = rank;
  if (group.open) {
    refuse(group,
           fmt::format("{} closed its connection before the verdict: see its log",
                       who(rank, group.members[rank].host)),
           out);
  } else if (group.connections == 0) {
    // Agreed and over. Whoever still comes with this key is not one of its ranks.
    refuse(group, "all ranks of this communicator have come and gone", out);
  }
}

void AgreementLedger::expire(Clock::time_point now, std::vector<Delivery>* out) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Group& group = *deadlines_.begin()->second;
    refuse(group, silentRanks(group), out);
  }
}

AgreementLedger::Clock::time_point AgreementLedger::nextDeadline() const {
  return deadlines_.empty() ? Clock::time_point::max() : deadlines_.begin()->first;
}

AgreementLedger::Group& AgreementLedger::groupFor(const wire::Hello& hello, std::uint16_t version) {
  const auto found = byKey_.find(hello.key);
  if (found != byKey_.end()) return *found->second;
  dropOldest();
  Group& group = groups_.emplace_back();
  byKey_[hello.key] = std::prev(groups_.end());
  group.key = hello.key;
  group.members.resize(hello.nranks);
  group.reference = hello.rank;
  group.members[hello.rank].host = hello.host;
  group.version = version;
  group.policyDigest = hello.policyDigest;
  group.policyText = hello.policyText;
  return group;
}

std::string AgreementLedger::objection(const Group& group, const wire::Hello& hello,
                                       std::uint16_t version, ConnectionId from) const {
  const std::string first = who(group.reference, group.members[group.reference].host);
  const std::string here = who(hello.rank, hello.host);
  if (version != group.version) {
    return fmt::format("{} speaks agreement protocol {}, {} speaks {}: use one version of HOCCL",
                       here, version, first, group.version);
  }
  if (version != wire::kVersion) {
    return fmt::format(
        "{} speaks agreement protocol {}, the process that made the unique id {}: "
        "use one version of HOCCL",
        here, version, wire::kVersion);
  }
  if (hello.nranks != group.members.size()) {
    return fmt::format(
        "{} has a communicator of {} ranks, {} one of {}: do all ranks create it with "
        "the same arguments?",
        here, hello.nranks, first, group.members.size());
  }
  const Member& member = group.members[hello.rank];
  if (member.came && member.connection != from) {
    return fmt::format("two processes, on hosts {} and {}, say they are rank {}", member.host,
                       hello.host, hello.rank);
  }
  if (hello.policyDigest != group.policyDigest) {
    return fmt::format(
        "{} and {} have different settings, {}: [{}], {}: [{}]: set them alike on all "
        "ranks",
        first, here, first, group.policyText, here, hello.policyText);
  }
  return {};
}

void AgreementLedger::refuse(Group& group, const std::string& reason, std::vector<Delivery>* out) {
  group.refusal =
      std::make_shared<const std::string>(wire::encode(wire::Verdict{false, reason, {}}));
  for (const Member& member : group.members) {
    if (member.answered && member.connection) out->push_back({member.connection, group.refusal});
  }
  close(group);
  // Only the refusal is needed from here on: thousands of them are kept.
  group.members = {};
  group.policyText = {};
}

void AgreementLedger::agree(Group& group, std::vector<Delivery>* out) {
  wire::Verdict verdict;
  verdict.steer = true;
  for (Member& member : group.members) verdict.payloads.push_back(std::move(member.payload));
  const auto message = std::make_shared<const std::string>(wire::encode(verdict));
  // Highest rank first: rank 0 is usually in this process, and may end it as soon as it knows.
  for (auto member = group.members.rbegin(); member != group.members.rend(); ++member) {
    out->push_back({member->connection, message});
  }
  close(group);
  ++group.phase;
}

void AgreementLedger::close(Group& group) {
  if (group.open) deadlines_.erase({group.deadline, &group});
  group.open = false;
  group.answers = 0;
  for (Member& member : group.members) {
    member.answered = false;
    member.payload.clear();
  }
}

std::string AgreementLedger::silentRanks(const Group& group) const {
  std::string list;
  std::size_t missing = 0, strangers = 0;
  for (std::uint32_t rank = 0; rank < group.members.size(); ++rank) {
    const Member& member = group.members[rank];
    if (member.answered) continue;
    if (!member.came) ++strangers;
    if (++missing > kListedRanks) continue;
    if (!list.empty()) list += ", ";
    list += std::to_string(rank);
    if (member.came) list += fmt::format(" (host {})", member.host);
  }
  if (missing > kListedRanks) list += fmt::format(" and {} more", missing - kListedRanks);
  const std::string within = durationText(agreeTimeout_);
  const char* plural = missing == 1 ? "" : "s";
  if (strangers) {
    return fmt::format("rank{} {} of {} did not join within {}: is HOCCL preloaded there?", plural,
                       list, group.members.size(), within);
  }
  return fmt::format(
      "rank{} {} of {} joined, but did not answer in phase {} within {}: see the log "
      "there",
      plural, list, group.members.size(), group.phase, within);
}

void AgreementLedger::dropOldest() {
  // Only what nobody is connected to: a communicator under way keeps its place.
  for (auto group = groups_.begin(); groups_.size() >= maxVerdicts_ && group != groups_.end();) {
    if (group->open || group->connections) {
      ++group;
      continue;
    }
    byKey_.erase(group->key);
    group = groups_.erase(group);
  }
}

}  // namespace hoccl
