#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "common/net/transport.h"
#include "common/runtime/mover_events.h"
#include "common/runtime/op.h"

namespace hoccl {

/// An allocation of a peer's application, which this mover has been told of and maps when it is to
/// copy into it, or out of it.
struct PeerImport {
  enum class State {
    Told,     ///< not mapped
    Pending,  ///< being mapped
    Ready,
    Failed,  ///< cannot be mapped here
  };
  State state = State::Told;
  BufferRef buffer{};
  std::uint64_t serial = 0;  ///< names it between loop and control thread; 0 until it is mapped
  CUdeviceptr address = 0;
  std::uint32_t users = 0;  ///< sends into it and receives out of it
  std::uint64_t lastUse = 0;
  Op* waiters = nullptr;  ///< list by Op::nextForTarget
};

/// What one peer has told of its application's memory, and what of it is mapped here. The peer says
/// when an allocation has to go (Forget), and hears when it has gone (Forgotten): its application
/// may be about to free it (rule 8). Unmapping itself is the control thread's.
class PeerImports {
 public:
  explicit PeerImports(std::size_t capacity) : capacity_(capacity) {}

  /// The two messages that tell of `buffer`'s allocation.
  static void describe(const BufferRef& buffer, Message (*parts)[HandlePart::kParts]);
  /// Takes one of them. False: it makes no sense.
  [[nodiscard]] bool tell(const Message& message);

  /// The allocation for one more copy; null if the peer has not told of it. `fresh`: the caller has
  /// to have it mapped, under the serial it finds there.
  PeerImport* acquire(std::uint64_t allocation, bool* fresh);
  void release(PeerImport* import);
  /// What is to be mapped, or being unmapped, under that serial; null: it has been given up.
  PeerImport* find(std::uint64_t serial);
  /// One that was Pending is mapped there; 0: it cannot be.
  void settle(PeerImport* import, CUdeviceptr address);

  /// The peer wants it back. One it has not told of is forgotten at once.
  void forget(std::uint64_t allocation);
  /// The control thread has unmapped that.
  void unmapped(std::uint64_t serial);

  /// nextUnmap or nextForgotten may have something.
  [[nodiscard]] bool work() const { return work_; }
  /// Something to unmap now; false: nothing. A span that no send has needed has address 0: its
  /// mapping is the control thread's affair.
  bool nextUnmap(CUdeviceptr* address, std::uint64_t* serial, BufferRef* which);
  /// An allocation of which nothing is left; false: none.
  bool nextForgotten(std::uint64_t* allocation);
  /// The peer has gone: everything has to be unmapped. What is being mapped is found no more.
  void abandon();

 private:
  [[nodiscard]] bool unmappable(const PeerImport& import) const {
    return import.state == PeerImport::State::Ready && import.users == 0;
  }
  /// What the capacity bounds: a span, once given up, could not be mapped again.
  static bool counts(const PeerImport& import) { return import.buffer.kind == BufferKind::Device; }
  void unmap(PeerImport& import, CUdeviceptr* address, std::uint64_t* serial, BufferRef* which);

  std::size_t capacity_;
  std::unordered_map<std::uint64_t, std::unique_ptr<PeerImport>> known_;  ///< by allocation
  std::vector<std::unique_ptr<PeerImport>> leaving_;            ///< those the peer wants back
  std::unordered_map<std::uint64_t, std::uint64_t> unmapping_;  ///< of those: allocation by serial
  std::vector<std::uint64_t> forgotten_;
  unsigned char part_[HandlePart::kParts * HandlePart::kBytes] = {};
  std::uint64_t partOf_ = 0;  ///< the allocation whose first part has come
  std::uint64_t serials_ = 0;
  std::uint64_t clock_ = 0;
  std::size_t mapped_ = 0;  ///< Pending and Ready ones of known_
  bool work_ = false;
};

/// The other side: which allocations of this side's application one peer has been told of, and
/// which it has been asked to forget and has not answered yet. Of a span it is told when the
/// control thread has handed it over.
class ToldPeer {
 public:
  enum class State {
    New,      ///< not told; from now on Told
    Sharing,  ///< a span that is being handed over
    Told,
    Refused,  ///< a span that could not be handed over
    /// Or not all of it, or the peer cannot map it: it has been told, to be asked to forget it.
    Part,
  };
  State tell(std::uint64_t allocation);
  /// The peer cannot map what it has been told of.
  void refused(std::uint64_t allocation);
  /// A span: New once, and from then on Sharing until `shared`.
  State share(std::uint64_t allocation);
  /// That is over. `tell`: the peer is to be told of it now; `forget`: and behind that asked to
  /// forget it.
  void shared(std::uint64_t allocation, SpanShare share, bool* tell, bool* forget);

  enum class TakenBack {
    NotTold,
    Ask,    ///< the peer is to be asked now
    Later,  ///< when it has been told (`shared`)
  };
  /// The peer is to forget it, and `ticket` waits for the answer.
  TakenBack takeBack(std::uint64_t allocation, std::uint64_t ticket);
  /// The answer has come; false: to nothing.
  bool answered(std::uint64_t allocation, std::uint64_t* ticket);
  /// The peer has gone, and with it its mappings: the next ticket that need not wait; false: none.
  bool nextVoid(std::uint64_t* ticket);
  [[nodiscard]] bool waits() const { return !asked_.empty(); }

 private:
  std::unordered_map<std::uint64_t, State> told_;
  std::unordered_set<std::uint64_t> forgetWhenShared_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> asked_;  ///< allocation, ticket
};

}  // namespace hoccl
