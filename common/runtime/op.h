#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/gpu/driver.h"
#include "common/runtime/segment.h"
#include "common/runtime/turns.h"

namespace hoccl {

struct Communicator;
struct Import;
struct PeerImport;
class Link;

/// One steered send, receive or mirror inside the mover, from its descriptor to its end.
struct Op {
  /// What has to come before bytes may move.
  enum Waiting : std::uint32_t {
    kForStart = 1,   ///< the user's streams have reached the operation
    kForImport = 2,  ///< the buffer is mapped here
    kForLink = 4,    ///< the connection to the peer stands
    kForMirror = 8,  ///< a send: its mirror's buffer is mapped here, too
    kForRoute = 16,  ///< a send within a node: the receiver has said where to, and that is mapped
  };
  enum class Route : std::uint8_t {
    Staged,  ///< through the slots of the link
    Direct,  ///< a send: by one copy into `target`
    Lent,    ///< a send: by one copy that the receiver's mover makes
  };

  OpDescriptor descriptor{};
  Communicator* communicator = nullptr;
  Import* import = nullptr;
  Link* link = nullptr;
  CUdeviceptr address = 0;  ///< of the buffer in this process; of staging: the host address
  std::uint32_t waiting = 0;
  std::uint32_t copiesInFlight = 0;
  std::uint64_t announced = 0;   ///< a receive: bytes the peer has announced
  std::uint64_t issued = 0;      ///< bytes whose copy has been submitted
  std::uint64_t done = 0;        ///< bytes whose copy has ended
  std::uint64_t chunkBytes = 0;  ///< a send: how it is cut
  bool matched = false;  ///< a send: the receiver has said Ready; before that only eager chunks go
  bool failed = false;
  Route route = Route::Staged;
  bool detour = false;  ///< a send to its own rank: its chunks take the link's Detour
  /// A receive: the sender may copy into the buffer, and has not announced anything yet.
  bool offered = false;
  bool pulls = false;  ///< a receive: the peer has been told that it could pull
  bool lent = false;   ///< a send: the peer may be copying from the buffer
  /// A send's, if it goes directly; a receive's, if it is pulled.
  PeerImport* target = nullptr;
  CUdeviceptr targetAddress = 0;      ///< where in it
  std::uint32_t turn = Turns::kNone;  ///< a send's, among those of its launch that may go directly
  Op* nextForTarget = nullptr;        ///< in the list of those that wait for `target`
  Op* partner = nullptr;  ///< a send: its mirror; a mirror: its send; while neither is over
  Op* next = nullptr;     ///< in the one list it is on: free, or waiting for an import

  [[nodiscard]] bool send() const { return descriptor.kind == OpKind::Send; }
  [[nodiscard]] bool mirror() const { return descriptor.kind == OpKind::Mirror; }
};

/// Recycles operations; allocates in slabs, and only when more are pending than ever before.
class OpPool {
 public:
  Op* take() {
    if (!free_) grow();
    Op* op = free_;
    free_ = op->next;
    *op = Op{};
    return op;
  }
  void give(Op* op) {
    op->next = free_;
    free_ = op;
  }

 private:
  static constexpr std::size_t kSlab = 1024;
  void grow() {
    slabs_.push_back(std::make_unique<Op[]>(kSlab));
    for (std::size_t i = 0; i < kSlab; ++i) give(&slabs_.back()[i]);
  }
  std::vector<std::unique_ptr<Op[]>> slabs_;
  Op* free_ = nullptr;
};

/// All operations of one outermost group: they start when every stream has started and end
/// together.
struct Launch {
  struct Stream {
    std::uint32_t slot;
    std::uint64_t sequence;
  };
  std::vector<Stream> streams;  ///< keeps its capacity between uses
  std::vector<Op*> ops;         ///< until started
  std::uint32_t opsExpected = 0;
  std::uint32_t streamsExpected = 0;
  std::uint32_t opsSeen = 0;
  std::uint32_t opsDone = 0;
  Turns turns;
  bool active = false;
  bool started = false;
  bool finishByLane = false;  ///< the last copy writes `finish` itself

  [[nodiscard]] bool complete() const {
    return opsSeen == opsExpected && streams.size() == streamsExpected;
  }
};

}  // namespace hoccl
