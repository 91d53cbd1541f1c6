#pragma once

// What an application process and its mover say to each other over their socket pair: the set-up.
// Everything fast goes through the segment.

#include <cstddef>
#include <cstdint>

#include "common/net/transport.h"
#include "common/runtime/pair_counts.h"

namespace hoccl {

inline constexpr std::uint64_t kMoverMagic = 0x72766d2d4c434f48ull;  // "HOCL-mvr"
inline constexpr std::uint32_t kMoverProtocol = 9;
/// The descriptor at which a mover finds its end of the socket pair.
inline constexpr int kMoverSocketFd = 3;
inline constexpr std::size_t kAddressBytes = 72;
inline constexpr std::size_t kHostBytes = 64;
inline constexpr std::size_t kReplyTextBytes = 512;

/// First message to the mover, with two descriptors: the segment's memfd and the eventfd to ring.
struct MoverHello {
  std::uint64_t magic;
  std::uint32_t protocol;
  std::int32_t applicationPid;
  std::uint64_t segmentBytes;
  char gpuUuid[48];
  /// 1: streams of the application wait by memory operations where their kernels run (Doorbell).
  std::uint32_t memoryOpWaits;
};

/// The mover's answer to anything. `ok` 0: `text` says why.
struct MoverReply {
  std::uint64_t magic;
  std::uint32_t ok;
  std::uint32_t refused;         ///< to AddSpan: the segment of the message that cannot be mapped
  PeerId mover;                  ///< to MoverHello
  /// To MoverHello: where peers reach this mover, by transport; empty where it does not listen.
  char shmAddress[kAddressBytes];
  char tcpAddress[kAddressBytes];
  char verbsAddress[kAddressBytes];
  char text[kReplyTextBytes];       ///< to MoverHello, with ok 1: why there is no tcpAddress
  char verbsText[kReplyTextBytes];  ///< to MoverHello: why there is no verbsAddress
};

/// A communicator to be moved for, with one descriptor: a memfd with `ranks` PeerRecords and, behind
/// them, as many PairCounts, which both keep mapped.
struct AddCommunicator {
  std::uint64_t magic;
  std::uint32_t index;
  std::int32_t rank;
  std::uint64_t id;
  std::uint64_t ranks;
};

/// Host memory that operations may name by `id` from now on (BufferKind::Staging), with one
/// descriptor: its memfd.
struct AddStaging {
  std::uint64_t magic;
  std::uint64_t id;
  std::uint64_t bytes;
};

/// Segments most of one AddSpan.
inline constexpr std::size_t kSpanPieces = 32;
inline constexpr std::size_t kFabricHandleBytes = 64;

/// A span to be mapped (BufferKind::Span), by as many messages as it takes: each has the next
/// segments in the order of their addresses, with a descriptor for each that has no fabric handle
/// (cuMemExportToShareableHandle). The last one's answer says that all of it is mapped; after any
/// that says no, nothing of it is. One without segments takes back those before.
struct AddSpan {
  std::uint64_t magic;
  std::uint64_t id;
  std::uint64_t base;   ///< application's address
  std::uint64_t bytes;  ///< of the whole span
  std::uint64_t done;   ///< bytes in the messages before this one
  std::uint64_t pieces;
  std::uint64_t fabric;  ///< bit i: segment i comes by its fabric handle
  std::uint64_t pieceBytes[kSpanPieces];
  unsigned char fabricHandles[kSpanPieces][kFabricHandleBytes];
};
inline constexpr std::size_t kMostMoverMessage = sizeof(AddSpan);  ///< bytes, to the mover
/// Without fabric handles, which are rare, it ends before them: sockets hold few long messages.
inline constexpr std::size_t kShortAddSpan = offsetof(AddSpan, fabricHandles);
inline std::size_t bytesOf(const AddSpan& message) {
  return message.fabric != 0 ? sizeof message : kShortAddSpan;
}
static_assert(sizeof(AddStaging) != sizeof(AddCommunicator) &&
                  sizeof(AddStaging) != sizeof(AddSpan) &&
                  sizeof(AddStaging) != kShortAddSpan && sizeof(AddCommunicator) != kShortAddSpan &&
                  sizeof(AddCommunicator) != sizeof(AddSpan),
              "told apart by their size");

/// One rank of a communicator as every rank learns it from the agreement.
struct PeerRecord {
  PeerId mover;  ///< all zero: cannot be reached from this rank
  std::uint64_t pid;
  std::uint64_t direct;  ///< 1: a GPU of this node, which may be copied to directly
  char gpuUuid[48];      ///< of such a one; empty: not told
  char address[kAddressBytes];  ///< with the transport in front: "shm:…", "tcp:…" (TransportSet)
  char host[kHostBytes];
};

/// The table of an AddCommunicator.
constexpr std::size_t pairCountsOffset(std::uint64_t ranks) {
  return (ranks * sizeof(PeerRecord) + sizeof(PairCounts) - 1) / sizeof(PairCounts) *
         sizeof(PairCounts);
}
constexpr std::size_t peerTableBytes(std::uint64_t ranks) {
  return pairCountsOffset(ranks) + ranks * sizeof(PairCounts);
}
inline PairCounts* pairCountsOf(void* table, std::uint64_t ranks) {
  return reinterpret_cast<PairCounts*>(static_cast<std::byte*>(table) + pairCountsOffset(ranks));
}

/// Copies text into a fixed field, cut and terminated.
template <std::size_t N>
void setText(char (&field)[N], std::string_view text) {
  const std::size_t length = text.size() < N - 1 ? text.size() : N - 1;
  for (std::size_t i = 0; i < length; ++i) field[i] = text[i];
  field[length] = 0;
}
/// The text of a fixed field, which need not be terminated.
template <std::size_t N>
std::string getText(const char (&field)[N]) {
  std::size_t length = 0;
  while (length < N && field[length]) ++length;
  return std::string(field, length);
}

}  // namespace hoccl
