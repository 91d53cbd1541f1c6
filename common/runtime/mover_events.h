#pragma once

// What the mover's two threads say to each other. The loop moves data and never waits for anything
// else; the control thread makes the calls that take milliseconds (imports, registrations, set-up
// of connections) and watches the application and the peers.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/shared_memory.h"
#include "common/gpu/host_registration.h"
#include "common/net/transport.h"
#include "common/runtime/pair_counts.h"
#include "common/runtime/segment.h"
#include "common/runtime/shared_lanes.h"
#include "common/runtime/spsc_queue.h"

namespace hoccl {

/// How bytes go straight between this mover's GPU and another one of the node. Over PCIe nothing
/// promises that a flag in host memory comes after bytes written into another GPU, but it comes
/// after those written into the own one (rule 13): there the receiver's mover copies.
enum class Reach : std::uint8_t {
  None,
  Push,  ///< the sender's mover copies
  Pull,  ///< the receiver's
};

/// Where a rank of a communicator can be reached.
struct PeerInfo {
  PeerId mover;         ///< all zero: this rank cannot be reached from here
  std::string address;  ///< of its transport
  std::string host;     ///< for messages
  std::uint64_t pid = 0;
  Reach reach = Reach::None;
};

/// A communicator as the mover knows it.
struct CommunicatorInfo {
  std::uint32_t index = 0;
  std::uint64_t id = 0;
  std::int32_t rank = 0;
  std::vector<PeerInfo> peers;   ///< by rank
  SharedMemory table;            ///< that the application shares
  PairCounts* counts = nullptr;  ///< by rank, in `table`
};

/// What a peer's mover has of a span after an attempt to hand it over.
enum class SpanShare : std::uint8_t {
  Whole,
  Nothing,  ///< and it would be the same another time
  Later,    ///< nothing, since the peer does not look at its socket: another time it may
  Part,     ///< it has to be asked to let go of that
};

/// Control thread to loop.
struct LoopEvent {
  enum class Kind {
    None,
    CommunicatorAdded,
    LinkUp,
    LinkFailed,
    Imported,
    SpanAdded,
    SpanShared,
    Unmapped,
    Scratch,
    DetourMade,
    Stop
  };
  Kind kind = Kind::None;
  std::unique_ptr<CommunicatorInfo> communicator;
  PeerId peer;
  std::unique_ptr<Connection> connection;
  HostRegistration registration;
  std::uint64_t allocation = 0;  ///< Imported, Unmapped
  std::uint64_t serial = 0;      ///< the same of a peer's memory: PeerImport::serial, and `peer`
  /// SpanAdded; SpanShared, of which `peer` has `share`, or `status` says why not all; Imported, of
  /// a peer's
  BufferRef buffer{};
  SpanShare share = SpanShare::Nothing;  ///< SpanShared
  std::unique_ptr<Detour> detour;
  CUdeviceptr address = 0;  ///< Imported, SpanAdded: of the buffer; Scratch: of the lanes' memory
  Status status;
};

/// Loop to control thread.
struct ControlRequest {
  /// ShareSpan: the peer's mover is to have `buffer`.
  enum class Kind { None, Connect, Import, Unmap, ShareSpan, Retire };
  Kind kind = Kind::None;
  PeerId peer;
  std::string address;
  BufferRef buffer{};
  CUdeviceptr mapped = 0;
  std::uint64_t serial = 0;  ///< Import, Unmap of a peer's memory: PeerImport::serial
  std::unique_ptr<Connection> connection;
  HostRegistration registration;
};

/// The two queues, and the descriptors by which each side wakes the other.
struct MoverQueues {
  static constexpr std::size_t kCapacity = 4096;
  SpscQueue<LoopEvent> toLoop{kCapacity};
  SpscQueue<ControlRequest> toControl{kCapacity};
  int loopEventFd = -1;  ///< also rung by the application
  int controlEventFd = -1;
};

}  // namespace hoccl
