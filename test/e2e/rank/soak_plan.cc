#include "test/e2e/rank/soak_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "test/e2e/rank/rank.h"

namespace e2e::soak {
namespace {

constexpr std::uint64_t kGroups = 1;  ///< subject of the plan's own random numbers

/// Zero bytes, some that stay with NCCL, the border of those that do not, and much more.
std::size_t randomBytes(Random& random, std::size_t most) {
  const std::size_t kind = random.below(100);
  if (kind < 4) return 0;
  if (kind < 14) return 1 + random.below(4096);
  if (kind < 17) return Plan::kSmallestSteered - 1 - random.below(2) * 1000;
  if (kind < 22) return Plan::kSmallestSteered + random.below(3);
  // Evenly over the powers of two, more of the lower ones.
  std::size_t doublings = 0;
  while ((Plan::kSmallestSteered << (doublings + 1)) <= most) ++doublings;
  const std::size_t power = std::min(random.below(doublings + 1), random.below(doublings + 1));
  const std::size_t base = Plan::kSmallestSteered << power;
  return std::min(most, base + random.below(base));
}

}  // namespace

Random::Random(std::uint64_t seed, std::uint64_t subject, std::uint64_t number) : state_(seed) {
  for (const std::uint64_t each : {subject, number}) state_ = next() + each;
}

std::uint64_t Random::next() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

const char* nameOf(What what) {
  constexpr const char* kNames[] = {"send/receive", "send to itself", "AllGather",
                                    "AlltoAll",     "Gather",         "Scatter",
                                    "Broadcast",    "Bcast",          "AllReduce"};
  return kNames[static_cast<std::size_t>(what)];
}

std::string Operation::text() const {
  std::string text = fmt::format("operation {}: {} of {} bytes on communicator {}", number,
                                 nameOf(what), bytes, communicator);
  if (what == What::Pair) text += fmt::format(" from {} to {}", root, peer);
  if (what == What::Self || what == What::Gather || what == What::Scatter ||
      what == What::Broadcast || what == What::Bcast) {
    text += fmt::format(" rooted at {}", root);
  }
  if (inPlace) text += ", in place";
  return text;
}

Share shareOf(const Operation& op, int rank, int ranks) {
  const auto own = static_cast<std::size_t>(rank);
  const auto seed = [&](int source, int destination) {
    return seedOf(source, static_cast<std::uint64_t>(destination), op.number + 1);
  };
  Share share;
  const auto in = [&](int destination) { share.input.push_back(seed(rank, destination)); };
  const auto out = [&](int source, int destination) {
    share.expected.push_back({seed(source, destination)});
  };
  const bool isRoot = rank == op.root;
  switch (op.what) {
    case What::Pair:
      if (isRoot) in(op.peer);
      if (rank == op.peer) out(op.root, op.peer);
      break;
    case What::Self:
      if (isRoot) {
        in(rank);
        out(rank, rank);
      }
      break;
    case What::AllGather:
    case What::Gather:
      in(0);
      if (op.what == What::AllGather || isRoot) {
        for (int source = 0; source < ranks; ++source) out(source, 0);
        share.shared = op.inPlace;
        share.inputAt = own;
      }
      break;
    case What::AlltoAll:
      for (int peer = 0; peer < ranks; ++peer) {
        in(peer);
        out(peer, rank);
      }
      break;
    case What::Scatter:
      if (isRoot) {
        for (int peer = 0; peer < ranks; ++peer) in(peer);
        share.shared = op.inPlace;
        if (share.shared) share.outputAt = own;
      }
      if (share.shared) {
        for (int peer = 0; peer < ranks; ++peer) out(rank, peer);
      } else {
        out(op.root, rank);
      }
      break;
    case What::Broadcast:
    case What::Bcast:
      if (isRoot) in(0);
      out(op.root, 0);
      share.shared = isRoot && (op.inPlace || op.what == What::Bcast);
      break;
    case What::AllReduce:
      in(0);
      share.expected.emplace_back();
      for (int source = 0; source < ranks; ++source) {
        share.expected.back().push_back(seed(source, 0));
      }
      share.shared = op.inPlace;
      break;
  }
  share.reads = !share.input.empty();
  share.writes = !share.expected.empty();
  return share;
}

Plan::Plan(std::uint64_t seed, int nodes)
    : seed_(seed), ranksOfANode_(kRanks / nodes), members_{{0, 1, 2, 3}, {0, 2}, {1, 3}, {}} {
  const int leftOut = static_cast<int>(seed % kRanks);
  for (int rank = kRanks; rank-- > 0;) {
    if (rank != leftOut) members_[3].push_back(rank);
  }
}

bool Plan::apart(std::size_t communicator, int a, int b) const {
  const std::vector<int>& members = members_[communicator];
  return members[static_cast<std::size_t>(a)] / ranksOfANode_ !=
         members[static_cast<std::size_t>(b)] / ranksOfANode_;
}

bool Plan::steered(const Operation& op) const {
  return op.bytes >= kSmallestSteered && op.what != What::AllReduce;
}

Operation Plan::operation(Random& random) {
  Operation op;
  op.number = operations_++;
  const std::size_t pick = random.below(100);
  op.communicator = pick < 40 ? 0 : pick < 55 ? 1 : pick < 70 ? 2 : 3;
  const std::size_t ranks = members_[op.communicator].size();
  const std::size_t kind = random.below(100);
  if (kind < 45) {
    op.what = What::Pair;
  } else if (kind < 50) {
    op.what = What::Self;
  } else {
    constexpr What kCollectives[] = {What::AllGather, What::AlltoAll, What::Gather,   What::Scatter,
                                     What::Broadcast, What::Bcast,    What::AllReduce};
    op.what = kCollectives[random.below(std::size(kCollectives))];
  }
  op.root = static_cast<int>(random.below(ranks));
  if (op.what == What::Pair) {
    op.peer =
        static_cast<int>((static_cast<std::size_t>(op.root) + 1 + random.below(ranks - 1)) % ranks);
    // Half of them between nodes, half within one, where there are both.
    const bool within = random.oneIn(2);
    for (std::size_t i = 0; i < ranks && apart(op.communicator, op.root, op.peer) == within; ++i) {
      op.peer = (op.peer + 1) % static_cast<int>(ranks);
      if (op.peer == op.root) op.peer = (op.peer + 1) % static_cast<int>(ranks);
    }
  }
  op.bytes = randomBytes(random, isPointToPoint(op.what) ? kLargestBuffer : kLargestBuffer / ranks);
  if (op.what == What::AllReduce) op.bytes %= kSmallestSteered;
  op.inPlace = random.oneIn(2) &&
               (op.what == What::AllGather || op.what == What::Gather || op.what == What::Scatter ||
                op.what == What::Broadcast || op.what == What::AllReduce);
  return op;
}

Group Plan::next() {
  Random random(seed_, kGroups, groups_);
  Group group;
  group.number = groups_++;
  group.grouped = !random.oneIn(4);
  const std::size_t count = group.grouped ? 1 + random.below(kMostOperations) : 1;
  for (std::size_t i = 0; i < count; ++i) group.operations.push_back(operation(random));
  // A receive from oneself can never come before its send has ended.
  if (group.operations.front().what == What::Self) group.grouped = true;
  return group;
}

}  // namespace e2e::soak
