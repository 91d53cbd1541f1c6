#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/gpu/host_registration.h"
#include "common/net/transport.h"
#include "common/runtime/op.h"
#include "common/runtime/peer_imports.h"
#include "common/runtime/shared_lanes.h"

namespace hoccl {

/// What a chunk in a staging slot is doing. An out-slot goes Idle → Copying → (Sending →)
/// HandedOver → Idle, an in-slot Idle → Announced → Copying → Idle. Over an out-slot whose send has
/// a mirror lies an in-slot of this side, the mirror slot: what goes out there comes in here as
/// well.
enum class ChunkState : std::uint8_t {
  Idle,
  Announced,   ///< in: bytes are on their way into the slot, as the peer says, or this side's send
  Copying,     ///< a copy engine is at work
  Copied,      ///< in, pulled: that has ended; waits for the sender's word that the bytes were held
  Sending,     ///< out, slots not shared: waits until the transport takes the write
  HandedOver,  ///< out: the bytes are the peer's; waits for its credit
  Lent,        ///< out: the peer copies from the send's buffer; waits for its credit
};

/// A direct copy takes a slot as well, for its flags. One that is pushed: an out-slot here goes the
/// way of any other, and at the peer an in-slot goes from Announced to Idle when the bytes are in
/// the receiver's buffer. One that is pulled: an in-slot goes Idle → Announced → Copying → Copied →
/// Idle, and the out-slot Idle → Lent → Idle. There `ready` comes last: the sender has held the
/// bytes until their copy had ended.
enum class Way : std::uint8_t { ThroughSlot, Pushed, Pulled };

struct Chunk {
  ChunkState state = ChunkState::Idle;
  std::uint32_t slot = 0;
  Slot place;  ///< the slot; of a mirror its `credit` is the out-slot's `mirrored`
  std::uint64_t turn = 0;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  Op* op = nullptr;
  Link* link = nullptr;
  Way way = Way::ThroughSlot;
  std::uint64_t submittedNs = 0;  ///< out, timed
  bool eager = false;             ///< out: sent before the receiver was ready
  bool detour = false;            ///< the bytes are in the link's Detour instead of the slot
  /// In: no receive is ready for it yet, so the slot keeps the bytes. With neither `op` nor `early`
  /// nobody wants them any more.
  bool early = false;
  Message announcement{};  ///< in
  /// In: its copy has been submitted.
  [[nodiscard]] bool inMoves() const {
    return state == ChunkState::Copying || state == ChunkState::Copied;
  }
  /// Out: how long it takes matters for turns.
  [[nodiscard]] bool timed() const {
    return way != Way::ThroughSlot && length >= Turns::kLeastBytes;
  }
};

/// What the mover knows of a chunk's receive.
enum class Claim {
  Ready,     ///< copy it in now
  Early,     ///< the receive has not come or not started
  Unwanted,  ///< it is over, or failed
  Mismatch,  ///< it expects another number of bytes
};

/// What a link asks of the mover around it.
class LinkOwner {
 public:
  virtual ~LinkOwner() = default;
  virtual SharedLanes& outLanes() = 0;
  virtual SharedLanes& inLanes() = 0;
  virtual SharedLanes& peerLanes() = 0;
  /// Where `op`'s only copy may write the end of the operation by itself; address 0 if it may not.
  virtual FlagWrite finishWrite(const Op& op) = 0;
  /// Fills in which communicator and pair a message of `op` belongs to.
  virtual void address(const Op& op, Message* message) = 0;
  /// A copy of `op` has ended (or its submission failed).
  virtual void copyEnded(Op& op, std::uint64_t bytes) = 0;
  /// All of `op` goes or comes by a direct copy that begins now; nobody can have seen its end.
  virtual void movesDirectly(const Op& op) = 0;
  /// From now on the peer may copy from the buffer of that send, until `returned`.
  virtual void lent(Op& op) = 0;
  /// `read`: it has; else it says that it will not, and the send has to go another way, or end.
  virtual void returned(Op& op, bool read) = 0;
  /// The peer lends the bytes of that receive: finds `op.target`, null if they cannot be had.
  virtual void borrow(Op& op, const Message& message) = 0;
  /// They are not pulled: `op.target` is not needed.
  virtual void refused(Op& op) = 0;
  /// Whether it is that send's turn to go directly (turns.h).
  virtual bool mayGo(const Op& op) = 0;
  /// A direct copy of this mover that has a turn by its size has ended.
  virtual void directCopyTook(std::uint64_t bytes, std::uint64_t ns) = 0;
  /// The receive a Chunk, Direct or Pull message belongs to.
  virtual Claim claim(const Message& message, Op** op) = 0;
  /// A driver call failed: nothing can be moved any more.
  virtual void fatal(const Status& status) = 0;
};

/// The staging slots and messages between this mover and one peer's, with the chunks in them.
class Link {
 public:
  static constexpr std::int32_t kAnyRank = -1;

  Link(LinkOwner* owner, const PeerId& peer, std::size_t importCapacity = 0)
      : owner_(owner), peer_(peer), imports_(importCapacity) {}
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  [[nodiscard]] const PeerId& peer() const { return peer_; }
  [[nodiscard]] bool up() const { return connection_ != nullptr; }
  void establish(std::unique_ptr<Connection> connection, HostRegistration registration);
  [[nodiscard]] Connection* connection() const { return connection_.get(); }
  /// Of the link to this mover itself: sends with `Op::detour` take it from now on.
  void useDetour(std::unique_ptr<Detour> detour) { detour_ = std::move(detour); }
  [[nodiscard]] bool hasDetour() const { return detour_ != nullptr; }

  /// Queues a message; kept here while the connection has no room.
  void send(const Message& message);
  [[nodiscard]] bool receive(Message* message) { return connection_->tryReceive(message); }

  /// What the peer has told of its memory, and what of it is mapped here for direct copies.
  [[nodiscard]] PeerImports& imports() { return imports_; }
  /// What the peer has been told of this side's.
  [[nodiscard]] ToldPeer& told() { return told_; }

  /// A send that may move: its chunks go out in turn with those of others, and each comes in to its
  /// mirror, if it has one, as it comes in to the peer. Until the receiver is
  /// ready (`op->matched`) only as many as the eager half of the slots takes, so that a receiver
  /// that does not come holds up nobody (rule 7).
  void startSend(Op* op);
  /// A receive that may move takes the chunks that came before it.
  void startReceive(Op* op);
  /// How many bytes of that receive lie or arrive here.
  [[nodiscard]] std::uint64_t earlyBytes(std::uint64_t communicator, std::int32_t source,
                                         std::uint64_t pairSequence) const;
  /// Nobody will want that communicator's early chunks, or only those from one rank.
  void dropEarly(std::uint64_t communicator, std::int32_t source = kAnyRank);
  /// No further chunk of `op`; copies in flight still end by themselves.
  void forget(Op* op);
  /// The peer announced a chunk or a direct copy. False: the message contradicts the slot's state.
  [[nodiscard]] bool announce(const Message& message);
  /// The peer has refused what was lent to it. False: nothing was.
  [[nodiscard]] bool takeBack(const Message& message);
  /// A send that has failed and is lent is not waited for any longer.
  void giveUp(Op* op);

  /// Everything that can move now. Returns whether anything did.
  bool progress();
  /// Nothing in any slot and nothing to send.
  [[nodiscard]] bool quiet() const { return outBusy_ == 0 && !active(); }
  /// Something here moves, or waits only for room.
  [[nodiscard]] bool active() const {
    return outCopying_ + outSending_ + lent_ > 0 || inBusy_ > early_ || !sends_.empty() ||
           !backlog_.empty();
  }
  /// What this side's slots and messages held for the peer is on its host, or never will be. Some
  /// system calls.
  [[nodiscard]] bool drained() const;
  /// Copies on this side's lanes that touch this link's slots.
  [[nodiscard]] bool copying() const { return outCopying_ + inCopying_ > 0; }
  /// The peer's direct copies, into or out of this side's buffers, that are under way.
  [[nodiscard]] bool peerCopies() const { return incoming_ + lent_ > 0; }
  /// There are such copies, or bytes here that somebody is still to have, or a send whose end has
  /// not been seen.
  [[nodiscard]] bool needed() const { return outCopying_ + inBusy_ + lent_ > 0; }
  /// The peer is to say what becomes of something that is lent to it.
  [[nodiscard]] bool lends() const { return lent_ > 0; }
  [[nodiscard]] bool holdsEarly() const { return early_ > 0; }
  /// The peer is gone: takes back what it will never use.
  /// Adds the receives whose bytes were on their way and will not come.
  void abandonPeer(std::vector<Op*>* torn);
  [[nodiscard]] bool abandoned() const { return peerAbandoned_; }
  /// The peer's end has been noticed; abandonPeer follows.
  [[nodiscard]] bool leaving() const { return leaving_; }
  void setLeaving() { leaving_ = true; }
  /// Gives the connection up, to be ended where it may take time. Only when nothing is copying.
  void dismantle(std::unique_ptr<Connection>* connection, HostRegistration* registration) {
    *registration = std::move(registration_);
    *connection = std::move(connection_);
  }

 private:
  friend struct ChunkRules;
  bool nextToMove();
  bool claimOut();
  LaneJob jobOf(const Chunk& chunk, Op& op);
  [[nodiscard]] CUdeviceptr detourOf(const Chunk& chunk) const {
    return detour_->memory + chunk.slot * detour_->stride;
  }
  SharedLanes& outLanesOf(const Chunk& chunk);
  SharedLanes& inLanesOf(const Chunk& chunk);
  void mirrorChunk(const Chunk& out, Op* mirror);
  bool flushMessages();
  bool lend(Op& op);

  LinkOwner* owner_;
  PeerId peer_;
  // The registration goes before the memory it registers: members are destroyed in reverse order.
  std::unique_ptr<Connection> connection_;
  HostRegistration registration_;
  std::unique_ptr<Detour> detour_;
  bool shared_ = false;
  bool peerAbandoned_ = false;
  bool leaving_ = false;

  std::vector<Chunk> out_, in_, mirrors_;  ///< mirrors_: over out_, the same index
  std::vector<std::uint32_t> freeOut_;
  std::vector<Chunk*> announced_;  ///< in- and mirror slots in the order of their announcement
  std::vector<Op*> sends_;
  std::size_t nextSend_ = 0;
  std::vector<Message> backlog_;            ///< messages the connection had no room for
  std::uint32_t outBusy_ = 0, inBusy_ = 0;  ///< mirror slots count as in-slots, here and below
  std::uint32_t outCopying_ = 0, inCopying_ = 0;
  std::uint32_t incoming_ = 0;    ///< in-slots of copies that the peer pushes
  std::uint32_t lent_ = 0;        ///< out-slots of copies that it pulls
  std::uint32_t toLend_ = 0;      ///< of sends_
  std::uint32_t outSending_ = 0;  ///< out-slots whose write the connection has not taken
  std::uint32_t eager_ = 0;       ///< out-slots in use by eager chunks
  std::uint32_t eagerLimit_ = 0;
  PeerImports imports_;
  ToldPeer told_;
  std::uint32_t early_ = 0;  ///< in-slots that wait for their receive
};

}  // namespace hoccl
