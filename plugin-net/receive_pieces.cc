// Pieces of large messages that come to a receiving end over sockets: which receive they belong to,
// and whether it takes them. On the threads of the sockets.

#include <fmt/format.h>

#include "plugin-net/receive_connection.h"

namespace hoccl::net_plugin {

std::byte* ReceiveEnd::reserve(Slot& slot, std::uint32_t turn, std::uint64_t offset,
                               std::uint64_t bytes, std::uint64_t total) {
  if (turn == 0 || slot.gate.load(std::memory_order_acquire) != turn || total > slot.capacity ||
      offset > total || bytes > total - offset) {
    return nullptr;
  }
  std::uint64_t known = 0;
  if (!slot.total.compare_exchange_strong(known, total) && known != total) return nullptr;
  const std::uint64_t before = slot.reserved.fetch_add(bytes, std::memory_order_seq_cst);
  // Looked at again: the gate may have been closed before the place was taken.
  const bool open = slot.gate.load(std::memory_order_seq_cst) == turn;
  if (!open || before + bytes > total) return nullptr;
  return slot.staged != nullptr ? slot.staged->place(offset, bytes, total) : slot.data + offset;
}

std::byte* ReceiveEnd::DataSink::place(const FrameHeader& header, Status* bad) {
  if (static_cast<Kind>(header.kind) == Kind::Ahead) return placeAhead(header, bad);
  const Piece piece = pieceOf(header);
  const Place& at = piece.body.place;
  if (static_cast<Kind>(header.kind) == Kind::Data && at.slot < kReceiveSlots &&
      piece.body.base <= piece.body.total) {
    Slot& slot = end_.slots_[at.slot];
    const std::uint64_t left = piece.body.total - piece.body.base;
    if (piece.offset <= left) {
      const std::uint64_t offset = piece.body.base + piece.offset;
      std::byte* const place = reserve(slot, at.turn, offset, header.bytes, piece.body.total);
      if (place != nullptr) return place;
    }
  }
  *bad = Status::error(Code::Remote,
                       fmt::format("it sent [{}, +{}) of a message of {} bytes for receive {}/{}, "
                                   "which does not take that",
                                   piece.body.base + piece.offset, header.bytes, piece.body.total,
                                   at.slot, at.turn));
  return nullptr;
}

std::byte* ReceiveEnd::DataSink::placeAhead(const FrameHeader& header, Status* bad) {
  const AheadPiece piece = aheadPieceOf(header);
  const AheadBody& body = piece.body;
  if (body.index >= end_.openedAhead_.load(std::memory_order_seq_cst)) return nullptr;  // not now
  const OpenByIndex& open = end_.openAhead_[body.index % kReceiveSlots];
  // Where a receive has been opened, `ahead_` has been set for good.
  if (open.index.load(std::memory_order_acquire) == body.index && body.tag == end_.ahead_->tag) {
    Slot& slot = end_.slots_[open.slot.load(std::memory_order_relaxed)];
    const std::uint32_t turn = slot.gate.load(std::memory_order_acquire);
    // Looked at again: with all of its message there, the slot may be another receive's by now.
    if (open.index.load(std::memory_order_acquire) == body.index) {
      std::byte* const place = reserve(slot, turn, piece.offset, header.bytes, body.total);
      if (place != nullptr) return place;
    }
  }
  *bad = Status::error(Code::Remote,
                       fmt::format("it sent [{}, +{}) of message {} of tag {}, of {} bytes, ahead, "
                                   "which the receive does not take",
                                   piece.offset, header.bytes, body.index, body.tag, body.total));
  return nullptr;
}

void ReceiveEnd::DataSink::arrived(const FrameHeader& header) {
  // A piece without bytes would count for nothing.
  if (header.bytes == 0) return;
  const bool ahead = static_cast<Kind>(header.kind) == Kind::Ahead;
  const std::uint32_t at =
      ahead ? end_.openAhead_[aheadPieceOf(header).body.index % kReceiveSlots].slot.load(
                  std::memory_order_relaxed)
            : pieceOf(header).body.place.slot;
  Slot& slot = end_.slots_[at];
  if (slot.staged != nullptr) {
    const Piece piece = pieceOf(header);
    slot.staged->arrived(piece.body.base + piece.offset, header.bytes, piece.body.total);
    return;
  }
  slot.received.fetch_add(header.bytes, std::memory_order_release);
}

}  // namespace hoccl::net_plugin
