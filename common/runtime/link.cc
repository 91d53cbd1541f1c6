#include "common/runtime/link.h"

#include <algorithm>

#include "common/base/time.h"
#include "common/runtime/chunk_plan.h"
#include "common/runtime/state_machine.h"

namespace hoccl {
namespace {

/// The side of a copy that is the operation's own buffer.
void userSide(const Op& op, std::uint64_t offset, LaneJob* job) {
  const CUdeviceptr address = op.address + offset;
  if (op.descriptor.buffer.kind == BufferKind::Staging) {
    job->staging = reinterpret_cast<std::byte*>(address);
  } else {
    job->device = address;
  }
}

}  // namespace

/// The conditions and actions of the chunk state machines.
struct ChunkRules {
  // Out-slots.
  static bool copiedShared(const Chunk& c) {
    return c.link->shared_ && c.place.ready->reached(c.turn);
  }
  static bool copiedUnshared(const Chunk& c) {
    return !c.link->shared_ && c.place.ready->reached(c.turn);
  }
  static void countCopied(Chunk& c) {
    --c.link->outLanesOf(c).inFlight;
    --c.link->outCopying_;
    if (c.timed()) c.link->owner_->directCopyTook(c.length, monotonicNs() - c.submittedNs);
    if (Op* op = std::exchange(c.op, nullptr)) c.link->owner_->copyEnded(*op, c.length);
  }
  static void awaitWrite(Chunk& c) {
    countCopied(c);
    ++c.link->outSending_;
  }
  static void countWritten(Chunk& c) { --c.link->outSending_; }
  static bool writeTaken(const Chunk& c) {
    return c.link->peerAbandoned_ || c.link->connection_->tryWrite(c.slot, c.length, c.turn);
  }
  static bool emptied(const Chunk& c) {
    return (c.link->peerAbandoned_ || c.place.credit->reached(c.turn)) &&
           c.link->mirrors_[c.slot].state == ChunkState::Idle;
  }
  static bool givenBack(const Chunk& c) {
    return c.link->peerAbandoned_ || c.place.credit->reached(c.turn);
  }
  static void takeReturned(Chunk& c) {
    // Before the buffer is the application's again: the peer takes no bytes for the send's that
    // could be newer.
    if (c.op) c.place.ready->set(c.turn);
    endLoan(c, true);
  }
  static void endLoan(Chunk& c, bool read) {
    --c.link->lent_;
    if (read && c.timed()) c.link->owner_->directCopyTook(c.length, monotonicNs() - c.submittedNs);
    Op* op = std::exchange(c.op, nullptr);
    freeOut(c);
    if (op) c.link->owner_->returned(*op, read);
  }
  static void freeOut(Chunk& c) {
    c.link->freeOut_.push_back(c.slot);
    --c.link->outBusy_;
    if (std::exchange(c.eager, false)) --c.link->eager_;
  }

  // In-slots, and mirror slots.
  static bool landed(const Chunk& c) {
    return c.op && c.way == Way::Pushed && c.place.ready->reached(c.turn);
  }
  static void takeLanded(Chunk& c) {
    c.place.credit->set(c.turn);
    --c.link->inBusy_;
    --c.link->incoming_;
    Op* op = std::exchange(c.op, nullptr);
    c.link->owner_->copyEnded(*op, c.length);
  }
  static bool refused(const Chunk& c) {
    return c.way == Way::Pulled &&
           (!c.op || !c.op->target || c.op->target->state == PeerImport::State::Failed);
  }
  static void refuse(Chunk& c) {
    Message answer = c.announcement;
    answer.type = MessageType::Refused;
    answer.offset = c.op ? 1 : 0;
    c.link->send(answer);
    --c.link->inBusy_;
    Op* op = std::exchange(c.op, nullptr);
    if (!op) return;
    op->announced -= c.length;
    c.link->owner_->refused(*op);
  }
  static bool mayCopyIn(const Chunk& c) {
    if (!c.op || !c.link->inLanesOf(c).room()) return false;
    if (c.way == Way::Pulled) {
      return c.op->target && c.op->target->state == PeerImport::State::Ready;
    }
    return c.way == Way::ThroughSlot && c.place.ready->reached(c.turn);
  }
  static void copyIn(Chunk& c) {
    Link& link = *c.link;
    LaneJob job;
    userSide(*c.op, c.offset, &job);
    job.bytes = c.length;
    if (c.way == Way::Pulled) {
      job.peer = c.op->target->address + c.announcement.offset;
      job.fromPeer = true;
      link.owner_->movesDirectly(*c.op);
    } else {
      if (c.detour) {
        job.peer = link.detourOf(c);
        job.fromPeer = true;
      } else {
        job.host = c.place.data;
      }
      // `finish` first: once the slot's flag shows, nothing of this operation is still to be
      // written. Not of one that is pulled: see `held`.
      if (c.length == c.op->descriptor.bytes) job.writes[0] = link.owner_->finishWrite(*c.op);
    }
    job.writes[1] = {link.registration_.deviceAddress(*c.place.credit), c.turn};
    c.op->issued += c.length;
    ++c.op->copiesInFlight;
    ++link.inCopying_;
    c.state = ChunkState::Copying;  // before fatal(), which takes receives off announced chunks
    if (Status status = link.inLanesOf(c).submit(job); !status) {
      link.owner_->fatal(status);
      c.place.credit->set(c.turn);  // no copy runs that would
    }
  }
  static bool unwanted(const Chunk& c) {
    return !c.op && !c.early && c.way != Way::Pulled &&
           (c.place.ready->reached(c.turn) || c.link->peerAbandoned_);
  }
  static void giveBack(Chunk& c) {
    c.place.credit->set(c.turn);
    --c.link->inBusy_;
  }
  static bool copiedIn(const Chunk& c) {
    return c.way != Way::Pulled && c.place.credit->reached(c.turn);
  }
  static void countCopiedIn(Chunk& c) {
    leaveLane(c);
    endCopyIn(c, c.length);
  }
  static bool pulled(const Chunk& c) {
    return c.way == Way::Pulled && c.place.credit->reached(c.turn);
  }
  /// Whatever the sender's mover does now: it may be stopped, and others need the lane (rule 7).
  static void leaveLane(Chunk& c) {
    --c.link->inLanesOf(c).inFlight;
    --c.link->inCopying_;
  }
  /// What is pulled has to be the send's, and no newer bytes: if the sender's mover dies, its
  /// application goes on, and may write into the buffer while it is being copied from. A greater
  /// value says nothing: a sender that has given the loan up uses the slot again, and sets `ready`
  /// for that. It has told why before, so that `announce` knows.
  static bool held(const Chunk& c) {
    return c.place.ready->value.load(std::memory_order_acquire) == c.turn;
  }
  static bool settled(const Chunk& c) {
    return held(c) || !c.op || c.op->failed || c.link->peerAbandoned_;
  }
  static void endPull(Chunk& c) { endCopyIn(c, held(c) ? c.length : 0); }
  static void endCopyIn(Chunk& c, std::uint64_t bytes) {
    --c.link->inBusy_;
    Op* op = std::exchange(c.op, nullptr);
    if (op) c.link->owner_->copyEnded(*op, bytes);
  }
};

namespace {

using Rule = Transition<ChunkState, Chunk>;

constexpr Rule kOutRules[] = {
    {ChunkState::Copying, ChunkState::HandedOver, ChunkRules::copiedShared,
     ChunkRules::countCopied},
    {ChunkState::Copying, ChunkState::Sending, ChunkRules::copiedUnshared, ChunkRules::awaitWrite},
    {ChunkState::Sending, ChunkState::HandedOver, ChunkRules::writeTaken, ChunkRules::countWritten},
    {ChunkState::HandedOver, ChunkState::Idle, ChunkRules::emptied, ChunkRules::freeOut},
    {ChunkState::Lent, ChunkState::Idle, ChunkRules::givenBack, ChunkRules::takeReturned},
};

constexpr Rule kInRules[] = {
    {ChunkState::Announced, ChunkState::Idle, ChunkRules::landed, ChunkRules::takeLanded},
    {ChunkState::Announced, ChunkState::Idle, ChunkRules::refused, ChunkRules::refuse},
    {ChunkState::Announced, ChunkState::Copying, ChunkRules::mayCopyIn, ChunkRules::copyIn},
    {ChunkState::Announced, ChunkState::Idle, ChunkRules::unwanted, ChunkRules::giveBack},
    {ChunkState::Copying, ChunkState::Idle, ChunkRules::copiedIn, ChunkRules::countCopiedIn},
    {ChunkState::Copying, ChunkState::Copied, ChunkRules::pulled, ChunkRules::leaveLane},
    {ChunkState::Copied, ChunkState::Idle, ChunkRules::settled, ChunkRules::endPull},
};

}  // namespace

void Link::establish(std::unique_ptr<Connection> connection, HostRegistration registration) {
  connection_ = std::move(connection);
  registration_ = std::move(registration);
  shared_ = connection_->sharedSlots();
  const Staging& staging = connection_->staging();
  auto prepare = [this](std::vector<Chunk>& chunks, const std::vector<Slot>& slots) {
    chunks.resize(slots.size());
    for (std::uint32_t i = 0; i < slots.size(); ++i) {
      chunks[i].slot = i;
      chunks[i].place = slots[i];
      chunks[i].link = this;
    }
  };
  prepare(out_, staging.out);
  prepare(in_, staging.in);
  prepare(mirrors_, staging.out);
  for (Chunk& chunk : mirrors_) chunk.place.credit = chunk.place.mirrored;
  announced_.reserve(in_.size() + mirrors_.size());
  freeOut_.reserve(out_.size());
  for (std::uint32_t i = static_cast<std::uint32_t>(out_.size()); i-- > 0;) freeOut_.push_back(i);
  // With a single slot an eager chunk could keep it from everybody else.
  eagerLimit_ = static_cast<std::uint32_t>(out_.size() / 2);
}

void Link::startSend(Op* op) {
  op->chunkBytes = chunkBytesFor(op->descriptor.bytes, connection_->staging().slotBytes);
  sends_.push_back(op);
  if (op->route == Op::Route::Lent) ++toLend_;
}

void Link::startReceive(Op* op) {
  for (Chunk& chunk : in_) {
    if (!chunk.early) continue;
    Op* wanted = nullptr;
    // A mismatch fails the communicator, and with it drops every early chunk.
    if (owner_->claim(chunk.announcement, &wanted) != Claim::Ready || wanted != op) continue;
    chunk.early = false;
    --early_;
    chunk.op = op;
    op->announced += chunk.length;
  }
}

std::uint64_t Link::earlyBytes(std::uint64_t communicator, std::int32_t source,
                               std::uint64_t pairSequence) const {
  std::uint64_t bytes = 0;
  for (const Chunk& chunk : in_) {
    const Message& m = chunk.announcement;
    if (chunk.early && m.communicator == communicator && m.source == source &&
        m.pairSequence == pairSequence) {
      bytes += chunk.length;
    }
  }
  return bytes;
}

void Link::dropEarly(std::uint64_t communicator, std::int32_t source) {
  for (Chunk& chunk : in_) {
    if (!chunk.early || chunk.announcement.communicator != communicator) continue;
    if (source != kAnyRank && chunk.announcement.source != source) continue;
    chunk.early = false;
    --early_;
  }
}

void Link::send(const Message& message) {
  if (peerAbandoned_) return;
  if (!backlog_.empty() || !connection_->trySend(message)) backlog_.push_back(message);
  if (message.type == MessageType::Failed) connection_->nudge();
}

bool Link::flushMessages() {
  std::size_t sent = 0;
  while (sent < backlog_.size() && connection_->trySend(backlog_[sent])) ++sent;
  backlog_.erase(backlog_.begin(), backlog_.begin() + static_cast<std::ptrdiff_t>(sent));
  // A nudge for one of these was for a ring without it: the peer may have looked and slept again.
  if (sent > 0 && backlog_.empty()) connection_->nudge();
  return sent > 0;
}

void Link::forget(Op* op) {
  if (std::erase(sends_, op) > 0 && op->route == Op::Route::Lent) --toLend_;
  for (std::vector<Chunk>* chunks : {&in_, &mirrors_}) {
    for (Chunk& chunk : *chunks) {
      // A direct copy is under way, and has to have ended before the operation does.
      if (chunk.op == op && chunk.state == ChunkState::Announced && chunk.way != Way::Pushed)
        chunk.op = nullptr;
    }
  }
}

bool Link::announce(const Message& message) {
  if (message.slot >= in_.size()) return false;
  Chunk& chunk = in_[message.slot];
  // The sender reuses a slot on seeing the credit, which this side may not have looked at yet.
  if (chunk.inMoves()) advance(kInRules, chunk);
  if (chunk.state == ChunkState::Copied && chunk.place.ready->reached(chunk.turn)) {
    // Not given up: its failure would have come before this message.
    chunk.state = ChunkState::Idle;
    ChunkRules::endCopyIn(chunk, chunk.length);
  }
  if (chunk.state != ChunkState::Idle || message.turn <= chunk.turn) return false;
  const Way way = message.type == MessageType::Direct ? Way::Pushed
                  : message.type == MessageType::Pull ? Way::Pulled
                                                      : Way::ThroughSlot;
  if (way != Way::ThroughSlot && !shared_) return false;
  // Of a Pull these say where the bytes lie.
  const std::uint64_t offset = way == Way::Pulled ? 0 : message.offset;
  const std::uint64_t length = way == Way::Pulled ? message.bytes : message.length;
  if (offset > message.bytes || length > message.bytes - offset) return false;
  if (way == Way::ThroughSlot ? length > connection_->staging().slotBytes
                              : length != message.bytes) {
    return false;
  }
  chunk.turn = message.turn;
  chunk.offset = offset;
  chunk.length = length;
  chunk.announcement = message;
  chunk.way = way;
  chunk.detour = detour_ && out_[message.slot].detour;  // on this link they are one slot
  chunk.op = nullptr;
  switch (owner_->claim(message, &chunk.op)) {
    case Claim::Ready:
      if (length > message.bytes - chunk.op->announced) return false;  // twice
      if (way == Way::Pushed) {
        if (!chunk.op->offered) return false;
        ++chunk.op->copiesInFlight;
        ++incoming_;
        owner_->movesDirectly(*chunk.op);
      } else if (way == Way::Pulled) {
        if (!std::exchange(chunk.op->pulls, false)) return false;
        owner_->borrow(*chunk.op, message);
      }
      chunk.op->offered = false;
      chunk.op->announced += length;
      break;
    case Claim::Early:
      if (way != Way::ThroughSlot) return false;
      chunk.op = nullptr;
      chunk.early = true;
      ++early_;
      break;
    case Claim::Mismatch:
    case Claim::Unwanted:
      chunk.op = nullptr;
      break;
  }
  chunk.state = ChunkState::Announced;
  ++inBusy_;
  announced_.push_back(&chunk);
  return true;
}

/// What goes into that out-slot comes in to `mirror`, too.
void Link::mirrorChunk(const Chunk& out, Op* mirror) {
  Chunk& chunk = mirrors_[out.slot];
  chunk.turn = out.turn;
  chunk.offset = out.offset;
  chunk.length = out.length;
  chunk.op = mirror;
  chunk.state = ChunkState::Announced;
  ++inBusy_;
  announced_.push_back(&chunk);
}

SharedLanes& Link::outLanesOf(const Chunk& chunk) {
  if (chunk.way == Way::Pushed) return owner_->peerLanes();
  return chunk.detour ? detour_->out : owner_->outLanes();
}

SharedLanes& Link::inLanesOf(const Chunk& chunk) {
  if (chunk.way == Way::Pulled) return owner_->peerLanes();
  return chunk.detour ? detour_->in : owner_->inLanes();
}

/// Turns to the next send that may have a chunk now; false: none.
bool Link::nextToMove() {
  const bool out = owner_->outLanes().room(), peer = owner_->peerLanes().room();
  const bool detour = detour_ && detour_->out.room();
  if (!out && !peer && !detour && toLend_ == 0) return false;
  for (std::size_t tried = 0; tried < sends_.size(); ++tried, ++nextSend_) {
    if (nextSend_ >= sends_.size()) nextSend_ = 0;
    const Op& op = *sends_[nextSend_];
    if (op.route != Op::Route::Staged) {
      if ((peer || op.route == Op::Route::Lent) && owner_->mayGo(op)) return true;
    } else if ((op.detour ? detour : out) && (op.matched || eager_ < eagerLimit_)) {
      return true;
    }
  }
  return false;
}

LaneJob Link::jobOf(const Chunk& chunk, Op& op) {
  LaneJob job;
  userSide(op, chunk.offset, &job);
  if (chunk.way == Way::Pushed) {
    job.peer = op.targetAddress;
  } else if (chunk.detour) {
    job.peer = detourOf(chunk);
  } else {
    job.host = chunk.place.data;
  }
  job.bytes = chunk.length;
  if (chunk.length == op.descriptor.bytes) job.writes[0] = owner_->finishWrite(op);  // see copyIn
  job.writes[1] = {registration_.deviceAddress(*chunk.place.ready), chunk.turn};
  return job;
}

/// All of that send: claims a slot and says where the bytes lie. False: no room for the message.
bool Link::lend(Op& op) {
  Chunk& chunk = out_[freeOut_.back()];
  Message message{};
  message.type = MessageType::Pull;
  owner_->address(op, &message);
  message.slot = chunk.slot;
  message.offset = op.descriptor.buffer.offset;
  message.length = op.descriptor.buffer.allocationId;
  message.turn = chunk.turn + 1;
  if (!connection_->trySend(message)) return false;
  ++chunk.turn;
  chunk.way = Way::Pulled;
  chunk.detour = false;
  chunk.offset = 0;
  chunk.length = op.descriptor.bytes;
  chunk.op = &op;
  chunk.state = ChunkState::Lent;
  if (chunk.timed()) chunk.submittedNs = monotonicNs();
  freeOut_.pop_back();
  ++outBusy_;
  ++lent_;
  --toLend_;
  op.issued = op.descriptor.bytes;
  ++op.copiesInFlight;
  sends_.erase(sends_.begin() + static_cast<std::ptrdiff_t>(nextSend_));
  owner_->lent(op);
  return true;
}

bool Link::takeBack(const Message& message) {
  if (message.slot >= out_.size()) return false;
  Chunk& chunk = out_[message.slot];
  if (chunk.state != ChunkState::Lent || chunk.turn != message.turn) return false;
  chunk.state = ChunkState::Idle;  // the send may claim it again
  ChunkRules::endLoan(chunk, false);
  return true;
}

void Link::giveUp(Op* op) {
  for (Chunk& chunk : out_) {
    if (chunk.op == op && chunk.state == ChunkState::Lent) chunk.op = nullptr;
  }
}

/// The next chunk of the next send in turn, or all of it by a direct copy: claims a slot, announces
/// it, submits the copy.
bool Link::claimOut() {
  if (sends_.empty() || freeOut_.empty() || !backlog_.empty() || !nextToMove()) return false;
  Op& op = *sends_[nextSend_];
  if (op.route == Op::Route::Lent) return lend(op);
  Chunk& chunk = out_[freeOut_.back()];
  chunk.way = op.route == Op::Route::Direct ? Way::Pushed : Way::ThroughSlot;
  const bool direct = chunk.way == Way::Pushed;
  chunk.detour = op.detour;
  chunk.offset = op.issued;
  chunk.length =
      direct ? op.descriptor.bytes : chunkLength(op.descriptor.bytes, op.issued, op.chunkBytes);
  Message message{};
  message.type = direct ? MessageType::Direct : MessageType::Chunk;
  owner_->address(op, &message);
  message.slot = chunk.slot;
  message.offset = chunk.offset;
  message.length = chunk.length;
  message.turn = chunk.turn + 1;
  if (!connection_->trySend(message)) return false;

  ++chunk.turn;
  chunk.op = &op;
  chunk.state = ChunkState::Copying;
  chunk.eager = !op.matched;
  if (chunk.eager) ++eager_;
  freeOut_.pop_back();
  ++outBusy_;
  ++outCopying_;
  op.issued += chunk.length;
  ++op.copiesInFlight;
  if (direct) {
    if (chunk.timed()) chunk.submittedNs = monotonicNs();
    owner_->movesDirectly(op);
  }
  const LaneJob job = jobOf(chunk, op);
  if (op.issued == op.descriptor.bytes) {
    sends_.erase(sends_.begin() + static_cast<std::ptrdiff_t>(nextSend_));
  } else {
    ++nextSend_;
  }
  if (Status status = outLanesOf(chunk).submit(job); !status) {
    // Announced, but never filled: `ready` must not show, or the receiver would take it for the
    // bytes.
    owner_->fatal(status);
    ChunkRules::countCopied(chunk);
    chunk.state = ChunkState::HandedOver;
  } else if (op.partner) {
    mirrorChunk(chunk, op.partner);
  }
  return true;
}

bool Link::progress() {
  if (!connection_) return false;
  bool moved = !backlog_.empty() && flushMessages();
  if (outBusy_ > 0) {
    for (Chunk& chunk : out_) {
      if (chunk.state != ChunkState::Idle) moved |= advance(kOutRules, chunk);
    }
  }
  while (claimOut()) moved = true;
  if (inBusy_ > 0) {
    // Arrivals are queued in the order the sender filled them.
    std::size_t kept = 0;
    for (Chunk* chunk : announced_) {
      moved |= advance(kInRules, *chunk);
      if (chunk->state == ChunkState::Announced) announced_[kept++] = chunk;
    }
    announced_.resize(kept);
    for (std::vector<Chunk>* chunks : {&in_, &mirrors_}) {
      for (Chunk& chunk : *chunks) {
        if (chunk.inMoves()) moved |= advance(kInRules, chunk);
      }
    }
  }
  return moved;
}

void Link::abandonPeer(std::vector<Op*>* torn) {
  if (std::exchange(peerAbandoned_, true) || !connection_) return;
  backlog_.clear();
  std::vector<Op*> tornDirect;
  for (Chunk& chunk : in_) {
    // What is being pulled, too, may be newer bytes than the send's; that ends with its copy.
    const bool pulling = chunk.inMoves() && chunk.way == Way::Pulled;
    if (chunk.state != ChunkState::Announced && !pulling) continue;
    const bool whole = chunk.way == Way::Pulled ? pulling && ChunkRules::held(chunk)
                                                : chunk.place.ready->reached(chunk.turn);
    if (whole) continue;
    if (chunk.op && !chunk.op->failed) torn->push_back(chunk.op);
    if (std::exchange(chunk.early, false)) --early_;
    if (chunk.way != Way::Pushed || !chunk.op) continue;
    // The copy has ended with the peer. It leaves the slot to `unwanted`.
    --incoming_;
    tornDirect.push_back(std::exchange(chunk.op, nullptr));
  }
  for (Op* op : tornDirect) owner_->copyEnded(*op, 0);
  // What the peer had not read it never will.
  for (Chunk& chunk : out_) {
    if (chunk.state != ChunkState::Lent || chunk.place.credit->reached(chunk.turn)) continue;
    chunk.state = ChunkState::Idle;
    ChunkRules::endLoan(chunk, false);
  }
}

bool Link::drained() const {
  if (!connection_ || shared_ || peerAbandoned_ || connection_->peerGone()) return true;
  return outSending_ == 0 && backlog_.empty() && connection_->drained();
}

}  // namespace hoccl
