#include "common/runtime/link.h"

#include <algorithm>

#include "common/runtime/chunk_plan.h"
#include "common/runtime/state_machine.h"

namespace hoccl {

/// The conditions and actions of the chunk state machines.
struct ChunkRules {
  static const Slot& outSlot(const Chunk& c) { return c.link->connection_->staging().out[c.slot]; }
  static const Slot& inSlot(const Chunk& c) { return c.link->connection_->staging().in[c.slot]; }

  // Out-slots.
  static bool copiedShared(const Chunk& c) {
    return c.link->shared_ && outSlot(c).ready->reached(c.turn);
  }
  static bool copiedUnshared(const Chunk& c) {
    return !c.link->shared_ && outSlot(c).ready->reached(c.turn);
  }
  static void countCopied(Chunk& c) {
    --c.link->owner_->outLane().inFlight;
    --c.link->outCopying_;
    if (Op* op = std::exchange(c.op, nullptr)) c.link->owner_->copyEnded(*op, c.length);
  }
  static bool writeTaken(const Chunk& c) {
    return c.link->peerAbandoned_ || c.link->connection_->tryWrite(c.slot, c.length, c.turn);
  }
  static void nothing(Chunk&) {}
  static bool credited(const Chunk& c) {
    return c.link->peerAbandoned_ || outSlot(c).credit->reached(c.turn);
  }
  static void freeOut(Chunk& c) {
    c.link->freeOut_.push_back(c.slot);
    --c.link->outBusy_;
  }

  // In-slots.
  static bool mayCopyIn(const Chunk& c) {
    if (!c.op) return false;
    const SharedLane& lane = c.link->owner_->inLane();
    if (!lane.room()) return false;
    // A chunk still on its way may be queued ahead of its arrival, behind a wait for the sender's
    // flag: its copy has been submitted there and depends on nothing but copies. Not far ahead, so
    // that chunks of others which have arrived are not held up.
    return inSlot(c).ready->reached(c.turn) ||
           (c.link->shared_ && !c.link->peerAbandoned_ && lane.inFlight < kAwaitDepth);
  }
  static void copyIn(Chunk& c) {
    Link& link = *c.link;
    LinkOwner& owner = *link.owner_;
    const Slot& slot = inSlot(c);
    LaneJob job;
    job.device = c.op->address + c.offset;
    job.host = slot.data;
    job.bytes = c.length;
    if (!slot.ready->reached(c.turn)) {
      job.await = {link.registration_.deviceAddress(*slot.ready), c.turn};
    }
    // `finish` first: once the slot's flag shows, nothing of this operation is still to be written.
    c.op->issued += c.length;
    if (c.op->issued == c.op->descriptor.bytes) job.writes[0] = owner.finishWrite(*c.op);
    job.writes[1] = {link.registration_.deviceAddress(*slot.credit), c.turn};
    ++c.op->copiesInFlight;
    ++owner.inLane().inFlight;
    ++link.inCopying_;
    if (Status status = owner.inLane().lane->submit(job); !status) {
      slot.credit->set(c.turn);  // nothing runs on the lane any more
      owner.fatal(status);
    }
  }
  static bool unwanted(const Chunk& c) {
    return !c.op && (inSlot(c).ready->reached(c.turn) || c.link->peerAbandoned_);
  }
  static void giveBack(Chunk& c) {
    inSlot(c).credit->set(c.turn);
    --c.link->inBusy_;
  }
  static bool copiedIn(const Chunk& c) { return inSlot(c).credit->reached(c.turn); }
  static void countCopiedIn(Chunk& c) {
    --c.link->owner_->inLane().inFlight;
    --c.link->inCopying_;
    --c.link->inBusy_;
    if (Op* op = std::exchange(c.op, nullptr)) c.link->owner_->copyEnded(*op, c.length);
  }

  /// Jobs on the in-lane below which one more may wait there for its chunk to arrive.
  static constexpr std::uint32_t kAwaitDepth = 2;
};

namespace {

using Rule = Transition<ChunkState, Chunk>;

constexpr Rule kOutRules[] = {
    {ChunkState::Copying, ChunkState::HandedOver, ChunkRules::copiedShared, ChunkRules::countCopied},
    {ChunkState::Copying, ChunkState::Sending, ChunkRules::copiedUnshared, ChunkRules::countCopied},
    {ChunkState::Sending, ChunkState::HandedOver, ChunkRules::writeTaken, ChunkRules::nothing},
    {ChunkState::HandedOver, ChunkState::Idle, ChunkRules::credited, ChunkRules::freeOut},
};

constexpr Rule kInRules[] = {
    {ChunkState::Announced, ChunkState::Copying, ChunkRules::mayCopyIn, ChunkRules::copyIn},
    {ChunkState::Announced, ChunkState::Idle, ChunkRules::unwanted, ChunkRules::giveBack},
    {ChunkState::Copying, ChunkState::Idle, ChunkRules::copiedIn, ChunkRules::countCopiedIn},
};

}  // namespace

void Link::establish(std::unique_ptr<Connection> connection, HostRegistration registration) {
  connection_ = std::move(connection);
  registration_ = std::move(registration);
  shared_ = connection_->sharedSlots();
  const Staging& staging = connection_->staging();
  auto prepare = [this](std::vector<Chunk>& chunks, std::size_t count) {
    chunks.resize(count);
    for (std::uint32_t i = 0; i < count; ++i) {
      chunks[i].slot = i;
      chunks[i].link = this;
    }
  };
  prepare(out_, staging.out.size());
  prepare(in_, staging.in.size());
  announced_.reserve(in_.size());
  freeOut_.reserve(out_.size());
  for (std::uint32_t i = static_cast<std::uint32_t>(out_.size()); i-- > 0;) freeOut_.push_back(i);
}

void Link::send(const Message& message) {
  if (peerAbandoned_) return;
  if (!backlog_.empty() || !connection_->trySend(message)) backlog_.push_back(message);
}

bool Link::flushMessages() {
  std::size_t sent = 0;
  while (sent < backlog_.size() && connection_->trySend(backlog_[sent])) ++sent;
  backlog_.erase(backlog_.begin(), backlog_.begin() + static_cast<std::ptrdiff_t>(sent));
  return sent > 0;
}

void Link::forget(Op* op) {
  std::erase(sends_, op);
  for (Chunk& chunk : in_) {
    if (chunk.op == op && chunk.state == ChunkState::Announced) chunk.op = nullptr;
  }
}

bool Link::announce(const Message& message) {
  if (message.slot >= in_.size()) return false;
  Chunk& chunk = in_[message.slot];
  // The sender reuses a slot on seeing the credit, which this side may not have looked at yet.
  if (chunk.state == ChunkState::Copying) advance(kInRules, chunk);
  if (chunk.state != ChunkState::Idle || message.length > connection_->staging().slotBytes ||
      message.turn <= chunk.turn) {
    return false;
  }
  Op* op = owner_->receiveFor(message);
  if (op && (message.offset > op->descriptor.bytes ||
             message.length > op->descriptor.bytes - message.offset)) {
    return false;
  }
  chunk.turn = message.turn;
  chunk.offset = message.offset;
  chunk.length = message.length;
  chunk.op = op;
  if (op) op->announced += message.length;
  chunk.state = ChunkState::Announced;
  ++inBusy_;
  announced_.push_back(message.slot);
  return true;
}

/// The next chunk of the next send in turn: claims a slot, announces it, submits the copy.
bool Link::claimOut() {
  SharedLane& lane = owner_->outLane();
  if (sends_.empty() || freeOut_.empty() || !lane.room() || !backlog_.empty()) return false;
  if (nextSend_ >= sends_.size()) nextSend_ = 0;
  Op& op = *sends_[nextSend_];
  Chunk& chunk = out_[freeOut_.back()];
  const Staging& staging = connection_->staging();
  chunk.offset = op.issued;
  chunk.length = chunkLength(op.descriptor.bytes, op.issued, staging.slotBytes);
  Message message{.type = MessageType::Chunk,
                  .slot = chunk.slot,
                  .communicator = 0,
                  .source = 0,
                  .destination = 0,
                  .pairSequence = op.descriptor.pairSequence,
                  .bytes = op.descriptor.bytes,
                  .offset = chunk.offset,
                  .length = chunk.length,
                  .turn = chunk.turn + 1};
  owner_->address(op, &message);
  if (!connection_->trySend(message)) return false;

  ++chunk.turn;
  chunk.op = &op;
  chunk.state = ChunkState::Copying;
  freeOut_.pop_back();
  ++outBusy_;
  ++outCopying_;
  ++lane.inFlight;
  op.issued += chunk.length;
  ++op.copiesInFlight;
  LaneJob job;
  job.device = op.address + chunk.offset;
  job.host = staging.out[chunk.slot].data;
  job.bytes = chunk.length;
  job.writes[1] = {registration_.deviceAddress(*staging.out[chunk.slot].ready), chunk.turn};
  if (op.issued == op.descriptor.bytes) {
    job.writes[0] = owner_->finishWrite(op);  // first: see copyIn
    sends_.erase(sends_.begin() + static_cast<std::ptrdiff_t>(nextSend_));
  } else {
    ++nextSend_;
  }
  if (Status status = lane.lane->submit(job); !status) {
    staging.out[chunk.slot].ready->set(chunk.turn);  // nothing runs on the lane any more
    owner_->fatal(status);
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
    for (std::uint32_t slot : announced_) {
      moved |= advance(kInRules, in_[slot]);
      if (in_[slot].state == ChunkState::Announced) announced_[kept++] = slot;
    }
    announced_.resize(kept);
    for (Chunk& chunk : in_) {
      if (chunk.state == ChunkState::Copying) moved |= advance(kInRules, chunk);
    }
  }
  return moved;
}

void Link::abandonPeer(std::vector<Op*>* torn) {
  if (std::exchange(peerAbandoned_, true) || !connection_) return;
  backlog_.clear();
  for (Chunk& chunk : in_) {
    if (chunk.state != ChunkState::Announced && chunk.state != ChunkState::Copying) continue;
    Flag& ready = *connection_->staging().in[chunk.slot].ready;
    if (ready.reached(chunk.turn)) continue;
    if (chunk.op) torn->push_back(chunk.op);
    // A copy on the in-lane may wait for this flag, which no copy engine will write any more.
    if (chunk.state == ChunkState::Copying) ready.set(chunk.turn);
  }
}

}  // namespace hoccl
