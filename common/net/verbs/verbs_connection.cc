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

/// A slot is cut into pieces of at least this size: below, a second queue pair gains nothing.
constexpr std::uint64_t kSmallestPiece = 64 << 10;
constexpr std::uint64_t kPieceUnit = 4096;
/// How long the end waits for what is under way.
constexpr std::uint64_t kLastWordsNs = Bundle::kLastBytesNs;
constexpr unsigned kLastWordsNapUs = 50;

}  // namespace

VerbsConnection::~VerbsConnection() {
  // The NIC has to have sent what the peer is still to get: with the queue pair it forgets it.
  const std::uint64_t untilNs = monotonicNs() + kLastWordsNs;
  while (bundle_ && pathsUp() > 0 && !peerGone() && bundle_->endingSinceNs() == 0 && !drained() &&
         monotonicNs() < untilNs) {
    // No other thread looks at the sockets any more.
    controlReady_.store(true, std::memory_order_relaxed);
    progress();
    ::usleep(kLastWordsNapUs);
  }
}

// --- Calls ---------------------------------------------------------------------------------------

bool VerbsConnection::trySend(const Message& message) {
  if (set_.gone()) return false;
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
  if (set_.gone()) return false;
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
  (void)tell(verbs_wire::kNudge, &nudge, sizeof nudge);
}

bool VerbsConnection::peerGone() const { return set_.gone() || bundle_->gone(); }

std::string VerbsConnection::goneReason() const {
  if (set_.gone()) return set_.goneText();
  return fmt::format("its mover has ended or cannot be reached: {}", bundle_->status().message());
}

void VerbsConnection::watch() {
  epoll_event events[4];
  const int count = ::epoll_wait(epoll_.get(), events, 4, 0);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.fd == set_.workFd()) {
      set_.work();
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
  return set_.sendsOut() > 0 || set_.settling() || set_.lastChance() ||
         receiving_.next < nudgedUpTo_ || !queue_.empty() || sending_.toPost() ||
         creditsDue_ != 0 || controlReady_.load(std::memory_order_relaxed);
}

bool VerbsConnection::drained() const {
  if (peerGone()) return true;
  return set_.sendsOut() == 0 && !set_.owing() && queue_.empty() && !sending_.toPost() &&
         creditsDue_ == 0 && bundle_->drained();
}

// --- What comes ----------------------------------------------------------------------------------

void VerbsConnection::progress() {
  if (controlReady_.load(std::memory_order_acquire)) takeControl();
  set_.poll();
  if (set_.gone()) return;
  noteCredits();
  pump();
  set_.tend();
}

bool VerbsConnection::heard(std::uint32_t immediate) {
  const std::uint32_t slot = Immediate::slot(immediate);
  switch (Immediate::kind(immediate)) {
    case Immediate::Kind::Piece:
      if (slot >= in_.size()) break;
      switch (in_[slot].arrived(immediate)) {
        case InPieces::Arrival::Whole:
          staging_.in[slot].ready->set(in_[slot].got.ready);
          return true;
        case InPieces::Arrival::Piece:
        case InPieces::Arrival::Again:
          return true;
        case InPieces::Arrival::Nonsense:
          break;
      }
      break;
    case Immediate::Kind::Message:
      if (receiving_.arrived(Immediate::sequence(immediate))) return true;
      break;
    case Immediate::Kind::Credit: {
      if (slot >= out_.size()) break;
      OutPieces& out = out_[slot];
      const std::int64_t ahead =
          Immediate::distance(Immediate::turn(immediate), out.credit, Immediate::kTurnBits);
      if (ahead <= 0) return true;
      if (out.credit + static_cast<std::uint64_t>(ahead) > out.turn) break;
      out.credit += static_cast<std::uint64_t>(ahead);
      settleSlot(slot);
      return true;
    }
    case Immediate::Kind::Other:
      if (Immediate::code(immediate) == Immediate::Other::Consumed &&
          sending_.peerConsumed(Immediate::value(immediate))) {
        return true;
      }
      break;
  }
  return false;
}

void VerbsConnection::landed(const WorkId& id) {
  out_[id.slot].completed(id.piece, id.path);
  settleSlot(id.slot);
}

/// A slot is free when the peer has given it back and no queue pair may read it again.
void VerbsConnection::settleSlot(std::uint32_t slot) {
  const OutPieces& out = out_[slot];
  if (out.credit < out.turn || !out.complete()) return;
  Flag& flag = *staging_.out[slot].credit;
  if (!flag.reached(out.turn)) flag.set(out.turn);
}

void VerbsConnection::fillReport(verbs_wire::Report* report) {
  report->nextMessage = receiving_.missing();
  for (std::size_t i = 0; i < in_.size(); ++i) report->slot[i] = in_[i].got;
}

void VerbsConnection::failedOver(const Path& path, const verbs_wire::Report& report) {
  for (std::uint32_t slot = 0; slot < out_.size(); ++slot) {
    if (out_[slot].failedOver(path.index, report.slot[slot]) &&
        std::find(queue_.begin(), queue_.end(), slot) == queue_.end()) {
      queue_.push_back(slot);
    }
    settleSlot(slot);
  }
  if (messagePath_ != path.index) return;
  messagePath_ = -1;
  sending_.failedOver(report.nextMessage);
  for (std::uint32_t i = 0; i < returned_.size(); ++i) {
    if (returned_[i] > 0) creditsDue_ |= std::uint64_t{1} << i;
  }
  consumedDue_ = true;
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
    if (!set_.postOwn(*path, id, Immediate::message(sending_.posted), message, sizeof *message,
                      offsetOf(&heard_[sending_.posted % kMessageWindow]))) {
      return false;
    }
    ++sending_.posted;
  }
  const WorkId small{.kind = WorkId::Kind::Small};
  while (creditsDue_ != 0) {
    const auto slot = static_cast<std::uint32_t>(std::countr_zero(creditsDue_));
    if (!set_.postOwn(*path, small, Immediate::credit(slot, returned_[slot]), nullptr, 0, 0))
      return false;
    creditsDue_ &= creditsDue_ - 1;
  }
  if (consumedDue_) {
    const std::uint32_t word = Immediate::other(Immediate::Other::Consumed, receiving_.next);
    if (!set_.postOwn(*path, small, word, nullptr, 0, 0)) return false;
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
    Path* path = set_.pathFor();
    if (!path) return false;
    const WorkId id{
        .kind = WorkId::Kind::Piece, .slot = slot, .piece = piece, .units = WorkId::unitsOf(bytes)};
    if (!set_.postOwn(*path, id, Immediate::piece(slot, piece, out.pieces, out.turn),
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
    for (const Path& path : set_.paths()) {
      if (path.state != Path::State::Up) continue;
      messagePath_ = path.index;
      break;
    }
    if (messagePath_ < 0) return nullptr;
  }
  Path& path = set_.paths()[static_cast<std::size_t>(messagePath_)];
  return path.state == Path::State::Up ? &path : nullptr;
}

// --- The control socket --------------------------------------------------------------------------

bool VerbsConnection::tell(std::uint16_t kind, const void* payload, std::size_t bytes) {
  return bundle_ && bundle_->sendControl(kind, {}, payload, bytes);
}

bool VerbsConnection::ending() const { return bundle_->endingSinceNs() != 0; }

void VerbsConnection::takeControl() {
  controlReady_.store(false, std::memory_order_relaxed);
  while (bundle_->receiveControl(controlSink_)) {
  }
}

std::byte* VerbsConnection::ControlSink::place(const FrameHeader& header, Status* bad) {
  if (header.kind == verbs_wire::kNudge && header.bytes == sizeof nudge) {
    return reinterpret_cast<std::byte*>(&nudge);
  }
  return owner->set_.place(header, bad);
}

void VerbsConnection::ControlSink::arrived(const FrameHeader& header) {
  if (header.kind != verbs_wire::kNudge || header.bytes == 0) return owner->set_.arrived(header);
  // Only up to what can have been sent: a peer that counts wrongly would keep this mover awake.
  owner->nudgedUpTo_ = std::min(nudge.upTo, owner->receiving_.next + std::uint64_t{kMessageWindow});
}

}  // namespace hoccl
