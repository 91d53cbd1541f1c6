#pragma once

// What a mover (or the net plugin) needs of a way to reach a peer. Nothing here blocks, knows CUDA,
// or is called from more than one thread at a time, except where said.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/base/flag.h"
#include "common/base/status.h"

namespace hoccl {

/// 128 random bits that name one mover (or one plugin instance) for its life.
struct PeerId {
  std::uint64_t high = 0, low = 0;
  auto operator<=>(const PeerId&) const = default;
};

enum class MessageType : std::uint32_t {
  Ready = 1,   ///< receiver to sender: the receive is started; `bytes` is what it expects; `slot` 1:
               ///< it could pull them
  Chunk = 2,   ///< sender to receiver: [offset, offset+length) comes in `slot`
  Failed = 3,  ///< either way: the pair ends here; `reason` says why
  // Direct copies between GPUs of a node (docs/direct.md), where slots are shared.
  Direct = 4,  ///< sender to receiver: the bytes come straight into the receiver's buffer; the flags
               ///< of `slot` say when, as if they came in there
  Handle = 5,  ///< to who is to copy: part `slot` of how an allocation is mapped (HandlePart)
  Forget = 6,  ///< the same way: unmap allocation `turn`, and forget its handle
  Forgotten = 7,  ///< the answer, once it is unmapped
  Settled = 8,    ///< the answer to Failed: no copy of that pair that is not announced will be made
  Waiting = 9,    ///< sender to receiver: a send waits for its Ready; answered with Failed if that
                  ///< cannot come any more
  Stalled = 10,   ///< either way: that send (`slot` 0) or receive (1) has waited for some time for the
                  ///< other one; its side had passed `length` of the pair on to NCCL before it
  Pull = 11,      ///< sender to receiver: the bytes lie at `offset` of the sender's allocation
                  ///< `length` (Handle) and stay there until the receiver has set `credit` of `slot`
  Refused = 12,   ///< receiver to sender: that Pull was not followed; `offset` 1: since the
                  ///< allocation cannot be mapped
};

enum class FailReason : std::uint32_t {
  Aborted = 1,       ///< the communicator was aborted or destroyed there
  SizeMismatch = 2,  ///< send and receive of one pair differ; `bytes` and `length` are the two sizes
  LocalError = 3,    ///< a driver call or another peer failed there
};

/// What movers tell each other. Exactly one cache line.
struct Message {
  MessageType type;
  std::uint32_t slot;  ///< Chunk: the slot; Failed: a FailReason
  std::uint64_t communicator;
  std::int32_t source, destination;  ///< ranks of the pair, in the direction of the data
  std::uint64_t pairSequence;
  std::uint64_t bytes;   ///< of the whole operation
  std::uint64_t offset;  ///< Chunk: where it starts; Ready, Pull: where in the allocation
  std::uint64_t length;  ///< Chunk: how long it is; Pull: the allocation
  /// Chunk, Direct, Pull: the value of the slot's flags for this use. Ready: the allocation that the
  /// sender may copy into, of which Handle messages have told it; 0: none.
  std::uint64_t turn;
};
static_assert(sizeof(Message) == kCacheLine);

/// A Handle message. The parts of an allocation follow each other.
struct HandlePart {
  static constexpr std::uint32_t kParts = 2;
  static constexpr std::size_t kBytes = 48;
  MessageType type;
  std::uint32_t part;  ///< Message::slot
  std::uint64_t allocation;
  unsigned char bytes[kBytes];
};
static_assert(sizeof(HandlePart) == sizeof(Message));

/// One staging slot as this side sees it. Flags carry the slot's turn, which counts its uses.
///   out: a copy engine fills `data` and then sets `ready`; `credit` shows when it may be used again.
///   in:  `ready` shows that `data` has arrived; a copy engine empties it and then sets `credit`.
struct Slot {
  std::byte* data = nullptr;
  Flag* ready = nullptr;
  Flag* credit = nullptr;
  /// out: this side's alone, for its own copy out of the slot (docs/staging.md, mirrors).
  Flag* mirrored = nullptr;
};

/// Local staging memory; data and flags all lie inside [base, base + bytes), which the owner registers
/// with CUDA once (rule 8).
struct Staging {
  std::byte* base = nullptr;
  std::size_t bytes = 0;
  std::uint64_t slotBytes = 0;
  std::vector<Slot> out, in;
};

struct StagingGeometry {
  std::uint32_t slots = 0;       ///< per direction
  std::uint64_t slotBytes = 0;
  bool operator==(const StagingGeometry&) const = default;
};

/// A message with descriptors, between processes of one host.
struct HandedOver {
  static constexpr std::size_t kMostBytes = 4096;
  std::vector<std::byte> data;
  std::vector<UniqueFd> fds;
};

/// An established link to one peer. Slot i of `out` here is slot i of `in` there.
class Connection {
 public:
  virtual ~Connection() = default;
  [[nodiscard]] virtual const char* transport() const = 0;
  [[nodiscard]] virtual PeerId peer() const = 0;
  [[nodiscard]] virtual const Staging& staging() const = 0;
  /// True when both sides' slots are the same memory: a filled slot has arrived, no `tryWrite`.
  [[nodiscard]] virtual bool sharedSlots() const = 0;

  // What comes may show only in these calls: who waits for a flag of a slot makes one now and then.
  /// Queues a message; false while there is no room. Delivered in order, also with regard to writes.
  [[nodiscard]] virtual bool trySend(const Message& message) = 0;
  [[nodiscard]] virtual bool tryReceive(Message* message) = 0;
  /// Without shared slots: moves the first `bytes` of out-slot `slot` to the peer's in-slot, whose
  /// `ready` then shows `turn`. The slot stays in use until `credit` shows `turn`. False: try later.
  [[nodiscard]] virtual bool tryWrite(std::uint32_t slot, std::uint64_t bytes, std::uint64_t turn) = 0;

  /// Makes the peer look at its messages even if it sleeps, for those that end something. A system call.
  virtual void nudge() = 0;

  /// True once the peer is known to be gone: what it sent before can still be received, nothing more
  /// will come. Any thread.
  [[nodiscard]] virtual bool peerGone() const = 0;
  /// Once it is gone: why, for a person.
  [[nodiscard]] virtual std::string goneReason() const { return "its mover has ended"; }
  /// A descriptor that becomes readable when `watch` should be called, which takes nudges and finds
  /// out whether the peer is gone. Any one thread, not necessarily that of the other calls.
  [[nodiscard]] virtual int watchFd() const = 0;
  virtual void watch() = 0;

  /// Gives the peer a message with descriptors, waiting for room for at most so many ms. Only
  /// between processes of one host, and from the thread that calls `watch`.
  virtual Status handOver(const void*, std::size_t, std::span<const int>, std::uint64_t) {
    return Status::error(Code::Unsupported, "no descriptor can be sent to another host");
  }
  /// The next such message that `watch` has found; false: none. `watch` finds a few at a time.
  [[nodiscard]] virtual bool takeHandedOver(HandedOver*) { return false; }

  /// Something of this side is under way that shows only in the calls above: they have to be made
  /// soon even if nobody waits for anything. A mover does not go to sleep meanwhile.
  [[nodiscard]] virtual bool busy() const { return false; }

  /// Nothing of this side is on its way any more: the peer would get all of it if this process
  /// ended now. Only for tear-down.
  [[nodiscard]] virtual bool drained() const { return true; }
};

/// A connection being made by either side. `watchFd` becomes readable (or the deadline passes) when
/// `advance` has something to do.
class Handshake {
 public:
  enum class State {
    Pending,
    Done,
    Crossed,  ///< both sides connected at once; the connection from the other side is the one kept
    Failed
  };
  enum class Decision : std::uint32_t { Refuse = 0, Accept = 1, Crossed = 2 };
  virtual ~Handshake() = default;
  [[nodiscard]] virtual int watchFd() const = 0;
  virtual State advance() = 0;
  /// Who is at the other end; known at once when connecting, when accepting only after its greeting.
  [[nodiscard]] virtual const PeerId* peer() const = 0;
  [[nodiscard]] virtual bool accepting() const = 0;
  /// Accepting side, once `peer` is known; `reason` tells a refused peer why.
  virtual void decide(Decision decision, const std::string& reason) = 0;
  /// After Done.
  [[nodiscard]] virtual std::unique_ptr<Connection> take() = 0;
  /// After Failed.
  [[nodiscard]] virtual Status status() const = 0;
};

/// One way of reaching peers: a listening address, and connections to others' addresses.
class Transport {
 public:
  virtual ~Transport() = default;
  [[nodiscard]] virtual const char* name() const = 0;
  /// Where peers reach this transport; at most 64 bytes, opaque to everybody else.
  [[nodiscard]] virtual const std::string& address() const = 0;
  [[nodiscard]] virtual int listenFd() const = 0;
  /// The next peer that knocks, or null.
  [[nodiscard]] virtual std::unique_ptr<Handshake> accept() = 0;
  [[nodiscard]] virtual Status connect(const PeerId& peer, const std::string& address,
                                       std::unique_ptr<Handshake>* out) = 0;
};

}  // namespace hoccl
