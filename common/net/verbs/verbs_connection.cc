#include "common/net/verbs/verbs_connection.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <utility>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/net/verbs/work_request.h"

namespace hoccl {
namespace {

constexpr int kCompletionsAtOnce = 16;
/// What one call takes of a completion queue at most, so that a talkative peer does not keep it.
constexpr int kCompletionRounds = 16;
/// A slot is cut into pieces of at least this size: below, a second queue pair gains nothing.
constexpr std::uint64_t kSmallestPiece = 64 << 10;
constexpr std::uint64_t kPieceUnit = 4096;
constexpr std::uint32_t kReceivesAtOnce = 16;
/// How long the end waits for what is under way.
constexpr std::uint64_t kLastWordsNs = Bundle::kLastBytesNs;
constexpr unsigned kLastWordsNapUs = 50;

}  // namespace

VerbsConnection::~VerbsConnection() {
  // The NIC has to have sent what the peer is still to get: with the queue pair it forgets it.
  const std::uint64_t untilNs = monotonicNs() + kLastWordsNs;
  while (bundle_ && pathsUp() > 0 && !peerGone() && bundle_->endingSinceNs() == 0 && !drained() &&
         monotonicNs() < untilNs) {
    progress();
    ::usleep(kLastWordsNapUs);
  }
}

// --- Calls ---------------------------------------------------------------------------------------

bool VerbsConnection::trySend(const Message& message) {
  if (gone_.load(std::memory_order_relaxed)) return false;
  if (sending_.full()) {
    progress();
    if (sending_.full()) return false;
  }
  said_[sending_.queued % kMessageWindow] = message;
  ++sending_.queued;
  pumpMessages();
  return true;
}

bool VerbsConnection::tryReceive(Message* message) {
  if (!receiving_.any()) {
    progress();
    if (!receiving_.any()) return false;
  }
  *message = heard_[receiving_.next % kMessageWindow];
  receiving_.take();
  if (receiving_.tellDue()) consumedDue_ = true;
  return true;
}

bool VerbsConnection::tryWrite(std::uint32_t slot, std::uint64_t bytes, std::uint64_t turn) {
  if (gone_.load(std::memory_order_relaxed)) return false;
  const std::uint64_t most =
      std::max<std::uint64_t>(1, std::min<std::uint64_t>(Immediate::kMostPieces, pathsUp()));
  const std::uint64_t pieces = std::clamp<std::uint64_t>(bytes / kSmallestPiece, 1, most);
  const std::uint64_t each = (bytes + pieces - 1) / pieces;
  out_[slot].begin(turn, bytes, (each + kPieceUnit - 1) / kPieceUnit * kPieceUnit);
  queue_.push_back(slot);
  pump();
  return true;
}

void VerbsConnection::nudge() {
  const verbs_wire::Nudge nudge{sending_.queued};
  say(verbs_wire::kNudge, &nudge, sizeof nudge);
}

bool VerbsConnection::peerGone() const {
  return gone_.load(std::memory_order_acquire) || bundle_->gone();
}

std::string VerbsConnection::goneReason() const {
  if (gone_.load(std::memory_order_acquire)) return goneText_;
  return fmt::format("its mover has ended or cannot be reached: {}", bundle_->status().message());
}

void VerbsConnection::watch() {
  epoll_event events[4];
  const int count = ::epoll_wait(epoll_.get(), events, 4, 0);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.fd == mender_.fd()) {
      mender_.work(settings_, shape_);
    } else if (bundle_ && events[i].data.fd == bundle_->controlFd()) {
      controlReady_.store(true, std::memory_order_release);
    } else if (bundle_ && events[i].data.fd == bundle_->watchFd()) {
      std::uint64_t rings = 0;
      [[maybe_unused]] ssize_t got = ::read(bundle_->watchFd(), &rings, sizeof rings);
      controlReady_.store(true, std::memory_order_release);
    }
  }
}

bool VerbsConnection::busy() const {
  if (peerGone()) return false;
  const bool draining = failedOver_ && std::any_of(paths_.begin(), paths_.end(), [](const Path& p) {
                          return p.state == Path::State::Draining || p.reportDue;
                        });
  return sendsOut_ > 0 || draining || receiving_.next < nudgedUpTo_ || !queue_.empty() ||
         sending_.toPost() || creditsDue_ != 0 || controlReady_.load(std::memory_order_relaxed);
}

bool VerbsConnection::drained() const {
  if (peerGone()) return true;
  return sendsOut_ == 0 && queue_.empty() && !sending_.toPost() && creditsDue_ == 0 &&
         bundle_->drained();
}

std::size_t VerbsConnection::pathsUp() const {
  return static_cast<std::size_t>(std::count_if(
      paths_.begin(), paths_.end(), [](const Path& p) { return p.state == Path::State::Up; }));
}

// --- What comes ----------------------------------------------------------------------------------

void VerbsConnection::progress() {
  if (controlReady_.load(std::memory_order_acquire)) takeControl();
  poll();
  if (gone_.load(std::memory_order_relaxed)) return;
  noteCredits();
  pump();
  if (failedOver_) tendPaths();
}

void VerbsConnection::poll() {
  std::array<ibv_wc, kCompletionsAtOnce> completions;
  for (auto& rail : rails_) {
    for (int round = 0; round < kCompletionRounds; ++round) {
      const int count = rail->completions.poll(completions.data(), kCompletionsAtOnce);
      for (int i = 0; i < count; ++i) onCompletion(completions[static_cast<std::size_t>(i)]);
      if (count < kCompletionsAtOnce) break;
    }
  }
  for (Path& path : paths_) {
    if (path.usedReceives < kReceivesAtOnce || !path.alive()) continue;
    const int error = postReceives(path.pair, path.index, path.generation, path.usedReceives);
    if (error == 0) {
      path.receives += path.usedReceives;
      path.usedReceives = 0;
    } else {
      takeDown(path, Status::fromErrno("no receives can be posted", error).message());
    }
  }
}

void VerbsConnection::onCompletion(const ibv_wc& completion) {
  const WorkId id = WorkId::unpack(completion.wr_id);
  if (id.path >= paths_.size()) return;
  Path& path = paths_[id.path];
  // Of a queue pair that has been given up, or of one before it.
  if (WorkId::cut(path.generation) != id.generation || path.state == Path::State::Resting ||
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
    case WorkId::Kind::Receive:
      if (completion.wc_flags & IBV_WC_WITH_IMM) onImmediate(path, ntohl(completion.imm_data));
      break;
    case WorkId::Kind::Piece:
    case WorkId::Kind::Word:
      out_[id.slot].completed(id.piece, path.index);
      settleSlot(id.slot);
      break;
    case WorkId::Kind::Probe:
      if (path.state != Path::State::Probing) break;
      path.state = Path::State::Up;
      path.upSinceNs = monotonicNs();
      if (path.generation > 1) logInfo("verbs: {} is in use again", path.text());
      break;
    case WorkId::Kind::Body:
    case WorkId::Kind::Message:
    case WorkId::Kind::Small:
      break;
  }
}

void VerbsConnection::onImmediate(Path& path, std::uint32_t immediate) {
  const std::uint32_t slot = Immediate::slot(immediate);
  switch (Immediate::kind(immediate)) {
    case Immediate::Kind::Piece:
      if (slot >= in_.size()) break;
      switch (in_[slot].arrived(immediate)) {
        case InPieces::Arrival::Whole:
          staging_.in[slot].ready->set(in_[slot].got.ready);
          return;
        case InPieces::Arrival::Piece:
        case InPieces::Arrival::Again:
          return;
        case InPieces::Arrival::Nonsense:
          break;
      }
      break;
    case Immediate::Kind::Message:
      if (receiving_.arrived(Immediate::sequence(immediate))) return;
      break;
    case Immediate::Kind::Credit: {
      if (slot >= out_.size()) break;
      OutPieces& out = out_[slot];
      const std::int64_t ahead =
          Immediate::distance(Immediate::turn(immediate), out.credit, Immediate::kTurnBits);
      if (ahead <= 0) return;
      if (out.credit + static_cast<std::uint64_t>(ahead) > out.turn) break;
      out.credit += static_cast<std::uint64_t>(ahead);
      settleSlot(slot);
      return;
    }
    case Immediate::Kind::Other:
      if (Immediate::code(immediate) == Immediate::Other::Probe) return;
      if (Immediate::code(immediate) == Immediate::Other::Consumed &&
          sending_.peerConsumed(Immediate::value(immediate))) {
        return;
      }
      break;
  }
  nonsense(fmt::format("{:#010x} over {}", immediate, path.text()));
}

/// A slot is free when the peer has given it back and no queue pair may read it again.
void VerbsConnection::settleSlot(std::uint32_t slot) {
  const OutPieces& out = out_[slot];
  if (out.credit < out.turn || !out.complete()) return;
  Flag& flag = *staging_.out[slot].credit;
  if (!flag.reached(out.turn)) flag.set(out.turn);
}

void VerbsConnection::nonsense(const std::string& what) {
  gone(fmt::format("its mover sent something that makes no sense: {}", what));
}

// --- What goes -----------------------------------------------------------------------------------

/// In-slots that a copy lane, or the mover, has given back.
void VerbsConnection::noteCredits() {
  for (std::uint32_t i = 0; i < returned_.size(); ++i) {
    const std::uint64_t turn = staging_.in[i].credit->value.load(std::memory_order_acquire);
    if (turn <= returned_[i]) continue;
    returned_[i] = turn;
    creditsDue_ |= std::uint64_t{1} << i;
  }
}

void VerbsConnection::pump() {
  pumpMessages();
  std::size_t kept = 0;
  for (const std::uint32_t slot : queue_) {
    if (!pumpPiece(slot)) queue_[kept++] = slot;
  }
  queue_.resize(kept);
}

/// Messages, credits and how far this side is, as far as there is room.
bool VerbsConnection::pumpMessages() {
  if (!sending_.toPost() && creditsDue_ == 0 && !consumedDue_) return true;
  Path* path = messagePath();
  if (!path) return false;
  while (sending_.toPost()) {
    const Message* message = &said_[sending_.posted % kMessageWindow];
    const WorkId id{.kind = WorkId::Kind::Message};
    if (!post(*path, id, Immediate::message(sending_.posted), message, sizeof *message,
              offsetOf(&heard_[sending_.posted % kMessageWindow]))) {
      return false;
    }
    ++sending_.posted;
  }
  const WorkId small{.kind = WorkId::Kind::Small};
  while (creditsDue_ != 0) {
    const auto slot = static_cast<std::uint32_t>(std::countr_zero(creditsDue_));
    if (!post(*path, small, Immediate::credit(slot, returned_[slot]), nullptr, 0, 0)) return false;
    creditsDue_ &= creditsDue_ - 1;
  }
  if (consumedDue_) {
    const std::uint32_t word = Immediate::other(Immediate::Other::Consumed, receiving_.next);
    if (!post(*path, small, word, nullptr, 0, 0)) return false;
    receiving_.told = receiving_.next;
    consumedDue_ = false;
  }
  return true;
}

/// Posts the slot's pieces; false while some are left.
bool VerbsConnection::pumpPiece(std::uint32_t slot) {
  OutPieces& out = out_[slot];
  while (out.pending != 0) {
    const auto piece = static_cast<std::uint32_t>(std::countr_zero(out.pending));
    const std::uint64_t bytes = out.lengthOf(piece);
    Path* path = pathFor();
    if (!path) return false;
    const WorkId id{
        .kind = WorkId::Kind::Piece, .slot = slot, .piece = piece, .units = WorkId::unitsOf(bytes)};
    if (!post(*path, id, Immediate::piece(slot, piece, out.pieces, out.turn),
              staging_.out[slot].data + out.offsetOf(piece), bytes,
              offsetOf(staging_.in[slot].data + out.offsetOf(piece)))) {
      return false;
    }
    out.posted(piece, path->index);
  }
  return true;
}

/// The path of what goes in order; null while there is none, or while it is not known yet what the
/// peer got of that before it failed.
Path* VerbsConnection::messagePath() {
  if (messagePath_ < 0) {
    for (const Path& path : paths_) {
      if (path.state != Path::State::Up) continue;
      messagePath_ = path.index;
      break;
    }
    if (messagePath_ < 0) return nullptr;
  }
  Path& path = paths_[static_cast<std::size_t>(messagePath_)];
  return path.state == Path::State::Up ? &path : nullptr;
}

/// The path with the least to send, of those with room.
Path* VerbsConnection::pathFor() {
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

bool VerbsConnection::post(Path& path, WorkId id, std::uint32_t immediate, const void* data,
                           std::uint64_t bytes, std::uint64_t target) {
  if (path.sends + 2 > shape_.sendDepth) return false;
  id.path = path.index;
  id.generation = path.generation;
  ibv_sge piece{reinterpret_cast<std::uint64_t>(data), static_cast<std::uint32_t>(bytes),
                path.rail->region.localKey()};
  ibv_send_wr word{}, body{};
  word.wr_id = id.pack();
  word.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  word.send_flags = IBV_SEND_SIGNALED;
  word.imm_data = htonl(immediate);
  word.wr.rdma.remote_addr = peerBase_ + target;
  word.wr.rdma.rkey = path.rail->peerKey;
  ibv_send_wr* first = &word;
  if (bytes > 0) {
    word.sg_list = &piece;
    word.num_sge = 1;
    if (id.kind != WorkId::Kind::Piece && bytes <= path.pair.inlineBytes()) {
      word.send_flags |= IBV_SEND_INLINE;
    }
    if (id.kind == WorkId::Kind::Piece && path.rail->adaptive &&
        bytes > settings_.adaptiveThreshold) {
      // With adaptive routing packets overtake each other, those of the last write as well: the
      // word goes by itself, and the switches spread only the bytes.
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
      first = &body;
    }
  }
  if (const int error = path.pair.postSend(first); error != 0) {
    takeDown(path, Status::fromErrno("a write cannot be posted", error).message());
    return false;
  }
  const std::uint32_t requests = first == &body ? 2 : 1;
  path.sends += requests;
  sendsOut_ += requests;
  path.bytes += id.units * WorkId::kBytesUnit;
  return true;
}

void VerbsConnection::probe(Path& path) {
  const std::uint32_t word = Immediate::other(Immediate::Other::Probe, path.index);
  (void)post(path, WorkId{.kind = WorkId::Kind::Probe}, word, nullptr, 0, 0);
}

}  // namespace hoccl
