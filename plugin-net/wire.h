#pragma once

// What the two ends of a connection say to each other.
//
// Messages of a tag are counted by the sender, receives of a tag by the receiver: message n goes
// into receive n. A small message travels on the control socket with its payload (Message). It may
// come before its receive; the sender has at most kEagerWindow such messages of a tag under way
// that the receiver has not given back (Credit), which bounds what the receiver has to keep.
//
// A large one goes over the data sockets straight into the receive, whose place the receiver names
// in Posted. Receivers say so by themselves once a tag has had a large message; until then, and
// whenever Posted has not come yet, the sender asks (Announce). From device memory (staged_send.h)
// messages of every size but 0 take this way.
//
// One tag of a connection, the first that the receiver receives, may do without: its receives are
// found by their index (Posted says so, in `ahead`). Pieces of its messages may thus be sent before
// the receive is named (Ahead), and lie in the sockets until it is opened. What they hold up there,
// every message of another tag, then goes over the control socket.
//
// Where the connection has queue pairs (verbs_link.h) and the memory of both ends is registered
// with the NICs, a large message goes over them. Posted then says where in DirectPlace, its
// payload.
//
// A receive into device memory has room for a part of a large message at a time. Posted then says
// how far the sender may go, and More when it may go on; every transfer stays within one part of
// kPartBytes.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/net/tcp/frames.h"
#include "common/net/verbs/nic.h"

namespace hoccl::net_plugin {

inline constexpr std::uint32_t kProtocolVersion = 4;
/// Messages up to here travel on the control socket.
inline constexpr std::size_t kEagerBytes = 16 << 10;
/// Small messages of a tag without a receive that the receiver keeps.
inline constexpr std::uint64_t kEagerWindow = 32;
/// Parts in which a receive into device memory takes a message.
inline constexpr std::uint64_t kPartBytes = 256 << 10;
/// Receives of a connection that may be open, and so posted ahead of the sender.
inline constexpr std::size_t kReceiveSlots = 256;
/// Tags of a connection. NCCL uses one for each rank behind the same NIC.
inline constexpr std::size_t kMaxTags = 4096;

/// Of a connection; those of queue pairs (common/net/verbs/verbs_wire.h) are larger.
enum class Kind : std::uint16_t {
  Message = 1,   ///< sender: message `index`, with its payload
  Announce = 2,  ///< sender: message `index` has `bytes` and waits for Posted
  Posted = 3,    ///< receiver: receive `index` takes up to `bytes`, at `place`
  Credit = 4,    ///< receiver: `index` more small messages of the tag have been received
  Data = 5,      ///< on the data sockets: a piece for `place`
  More = 6,      ///< receiver: receive `index` takes bytes up to `limit` now
  Ahead = 7,     ///< on the data sockets: a piece of a message whose receive has not been named
};

/// Of a receive that is open: the slot, and its turn, which tells uses of a slot apart.
struct Place {
  std::uint32_t slot = 0;
  std::uint32_t turn = 0;
  bool operator==(const Place&) const = default;
};

/// The `user` bytes of a control frame.
struct Control {
  std::int32_t tag = 0;
  std::uint32_t ahead = 0;  ///< Posted: 1 if messages of the tag may be sent ahead
  std::uint64_t index = 0;
  std::uint64_t bytes = 0;
  Place place;
  std::uint64_t limit = 0;  ///< Posted, More: the bytes it takes for now; 0: all, in any pieces
  std::array<std::uint8_t, 8> unused{};
};
static_assert(sizeof(Control) == kFrameUserBytes);

/// The `user` bytes of a piece, behind its offset.
struct PieceBody {
  Place place;
  std::uint64_t total = 0;  ///< of the whole message
  std::uint64_t base = 0;   ///< where the piece's transfer begins in the message
  std::array<std::uint8_t, 16> unused{};
};
struct Piece {
  std::uint64_t offset = 0;
  PieceBody body;
};
static_assert(sizeof(PieceBody) == 40 && sizeof(Piece) == kFrameUserBytes);

/// The same of a piece that is sent ahead.
struct AheadBody {
  std::int32_t tag = 0;
  std::uint32_t reserved = 0;
  std::uint64_t index = 0;  ///< of the message
  std::uint64_t total = 0;  ///< of the message
  std::array<std::uint8_t, 16> unused{};
};
struct AheadPiece {
  std::uint64_t offset = 0;
  AheadBody body;
};
static_assert(sizeof(AheadBody) == 40 && sizeof(AheadPiece) == kFrameUserBytes);

/// The payload of Posted where the receive's memory is registered with the NICs.
struct DirectPlace {
  std::uint64_t address = 0;
  std::uint64_t turn = 0;                        ///< of the receive's slot, in immediates
  std::array<std::uint32_t, kMostRails> keys{};  ///< by rail
  std::uint32_t onDevice = 0;  ///< 1: the CPU does not reach it, so nothing comes over the sockets
  std::uint32_t reserved = 0;
};
static_assert(sizeof(DirectPlace) == 56);

inline std::array<std::byte, kFrameUserBytes> pack(const Control& control) {
  return std::bit_cast<std::array<std::byte, kFrameUserBytes>>(control);
}
inline Control controlOf(const FrameHeader& header) { return std::bit_cast<Control>(header.user); }
inline Piece pieceOf(const FrameHeader& header) { return std::bit_cast<Piece>(header.user); }
inline AheadPiece aheadPieceOf(const FrameHeader& header) {
  return std::bit_cast<AheadPiece>(header.user);
}

}  // namespace hoccl::net_plugin
