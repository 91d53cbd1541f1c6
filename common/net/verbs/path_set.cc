#include "common/net/verbs/path_set.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/base/log.h"
#include "common/base/time.h"

namespace hoccl {
namespace {

constexpr int kCompletionsAtOnce = 16;
/// What one call takes of a completion queue at most, so that a talkative peer does not keep it.
constexpr int kCompletionRounds = 16;
constexpr std::uint32_t kReceivesAtOnce = 16;

}  // namespace

std::size_t PathSet::up() const {
  return static_cast<std::size_t>(std::count_if(
      paths_.begin(), paths_.end(), [](const Path& p) { return p.state == Path::State::Up; }));
}

std::size_t PathSet::upAt(const Rail& rail) const {
  return static_cast<std::size_t>(std::count_if(
      paths_.begin(), paths_.end(),
      [&rail](const Path& p) { return p.state == Path::State::Up && p.rail == &rail; }));
}

void PathSet::poll() {
  std::array<ibv_wc, kCompletionsAtOnce> completions;
  for (auto& rail : rails_) {
    for (int round = 0; round < kCompletionRounds && !rail->broken; ++round) {
      const int count = rail->completions.poll(completions.data(), kCompletionsAtOnce);
      if (count < 0) breakRail(*rail, count);
      for (int i = 0; i < count; ++i) onCompletion(completions[static_cast<std::size_t>(i)]);
      if (count < kCompletionsAtOnce) {
        rail->emptied = true;
        break;
      }
    }
  }
  // All receives of a small queue may be used up before there are so many.
  const std::uint32_t enough =
      std::clamp<std::uint32_t>(shape_.receiveDepth / 2, 1, kReceivesAtOnce);
  for (Path& path : paths_) {
    if (path.usedReceives < enough || !path.alive()) continue;
    const int error = postReceives(path.pair, path.index, path.generation, path.usedReceives);
    if (error == 0) {
      path.receives += path.usedReceives;
      path.usedReceives = 0;
    } else {
      takeDown(path, Status::fromErrno("no receives can be posted", error).message());
    }
  }
}

/// Nothing is heard of its queue pairs any more, nor would be of new ones.
void PathSet::breakRail(Rail& rail, int error) {
  rail.broken = true;
  rail.problem = fmt::format(
      "the completion queue of {} is broken (ibv_poll_cq: {}): this connection uses it no more",
      rail.nic->text(), error);
  for (Path& path : paths_) {
    if (path.rail == &rail && path.alive()) takeDown(path, rail.problem);
  }
}

void PathSet::onCompletion(const ibv_wc& completion) {
  const WorkId id = WorkId::unpack(completion.wr_id);
  if (id.path >= paths_.size()) return;
  Path& path = paths_[id.path];
  // Of a queue pair that has been given up, or of one before it.
  if (WorkId::cut(path.generation) != id.generation || path.spent ||
      path.state == Path::State::Unusable) {
    return;
  }
  if (id.kind == WorkId::Kind::Receive) {
    --path.receives;
    ++path.usedReceives;
  } else if (id.kind != WorkId::Kind::Body) {
    const std::uint32_t requests = id.kind == WorkId::Kind::Word ? 2 : 1;
    path.sends -= requests;
    sendsOut_ -= requests;
    path.bytes -= id.units * WorkId::kBytesUnit;
  }
  if (completion.status != IBV_WC_SUCCESS) {
    if (path.alive() || path.state == Path::State::Mending) {
      takeDown(path, fmt::format("{} (status {}, vendor error {:#x})",
                                 rails_[0]->nic->library().statusText(completion.status),
                                 static_cast<int>(completion.status), completion.vendor_err));
    }
    return;
  }
  switch (id.kind) {
    case WorkId::Kind::Receive: {
      if (!(completion.wc_flags & IBV_WC_WITH_IMM)) break;
      const std::uint32_t word = ntohl(completion.imm_data);
      const bool probed = Immediate::kind(word) == Immediate::Kind::Other &&
                          Immediate::code(word) == Immediate::Other::Probe;
      if (!probed && !user_.heard(word)) {
        nonsense(fmt::format("{:#010x} over {}", word, path.text()));
      }
      break;
    }
    case WorkId::Kind::Piece:
    case WorkId::Kind::Word:
      user_.landed(id);
      break;
    case WorkId::Kind::Probe:
      if (path.state != Path::State::Probing) break;
      path.state = Path::State::Up;
      path.upSinceNs = monotonicNs();
      stood_ = true;
      lastChanceByNs_ = 0;
      if (path.generation > 1) logInfo("verbs: {} is in use again", path.text());
      break;
    case WorkId::Kind::Body:
    case WorkId::Kind::Message:
    case WorkId::Kind::Small:
      break;
  }
}

Path* PathSet::pathFor() {
  Path* best = nullptr;
  for (std::size_t i = 0; i < paths_.size(); ++i) {
    Path& path = paths_[(nextPath_ + i) % paths_.size()];
    // A piece may take two requests, and messages are to find room, too.
    if (path.state != Path::State::Up || path.sends >= shape_.sendDepth / 2) continue;
    if (!best || path.bytes < best->bytes) best = &path;
  }
  if (best) nextPath_ = best->index + 1u;
  return best;
}

bool PathSet::postOwn(Path& path, WorkId id, std::uint32_t immediate, const void* data,
                      std::uint64_t bytes, std::uint64_t offset) {
  return post(path, id, immediate,
              {.data = data,
               .bytes = bytes,
               .localKey = path.rail->region.localKey(),
               .target = peerBase_ + offset,
               .remoteKey = path.rail->peerKey});
}

bool PathSet::post(Path& path, WorkId id, std::uint32_t immediate, const PathWrite& write) {
  if (path.sends + 2 > shape_.sendDepth) return false;
  id.path = path.index;
  id.generation = path.generation;
  ibv_sge piece{reinterpret_cast<std::uint64_t>(write.data),
                static_cast<std::uint32_t>(write.bytes), write.localKey};
  ibv_sge record{reinterpret_cast<std::uint64_t>(write.record), write.recordBytes,
                 path.rail->region.localKey()};
  ibv_send_wr word{}, body{};
  word.wr_id = id.pack();
  word.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  word.send_flags = IBV_SEND_SIGNALED;
  word.imm_data = htonl(immediate);
  word.wr.rdma.remote_addr = write.target;
  word.wr.rdma.rkey = write.remoteKey;
  ibv_send_wr* first = &word;
  if (write.bytes > 0) {
    word.sg_list = &piece;
    word.num_sge = 1;
    if (id.kind != WorkId::Kind::Piece && write.bytes <= path.pair.inlineBytes()) {
      word.send_flags |= IBV_SEND_INLINE;
    }
    // With adaptive routing packets overtake each other, those of the last write as well: the word
    // goes by itself, and the switches spread only the bytes.
    const bool spread = id.kind == WorkId::Kind::Piece && path.rail->adaptive &&
                        write.bytes > settings_.adaptiveThreshold;
    if (spread || write.record != nullptr) {
      body = word;
      body.opcode = IBV_WR_RDMA_WRITE;
      body.send_flags = 0;
      id.kind = WorkId::Kind::Word;
      word.wr_id = id.pack();
      id.kind = WorkId::Kind::Body;
      body.wr_id = id.pack();
      body.next = &word;
      word.sg_list = nullptr;
      word.num_sge = 0;
      if (write.record != nullptr) {
        word.sg_list = &record;
        word.num_sge = 1;
        word.wr.rdma.remote_addr = write.recordTarget;
        word.wr.rdma.rkey = path.rail->peerKey;
        if (write.recordBytes <= path.pair.inlineBytes()) word.send_flags |= IBV_SEND_INLINE;
      }
      first = &body;
    }
  }
  bool someTaken = false;
  if (const int error = path.pair.postSend(first, &someTaken); error != 0) {
    takeDown(path, Status::fromErrno("a write cannot be posted", error).message());
    // The bytes without their word may be on their way: gone again over another path at once, those
    // could land in a receive that is over. The peer's report sends them again, as with any
    // failure.
    return someTaken;
  }
  const std::uint32_t requests = first == &body ? 2 : 1;
  path.sends += requests;
  sendsOut_ += requests;
  path.bytes += id.units * WorkId::kBytesUnit;
  return true;
}

void PathSet::probe(Path& path) {
  const std::uint32_t word = Immediate::other(Immediate::Other::Probe, path.index);
  (void)postOwn(path, WorkId{.kind = WorkId::Kind::Probe}, word, nullptr, 0, 0);
}

}  // namespace hoccl
