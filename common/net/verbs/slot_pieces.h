#pragma once

#include <array>
#include <cstdint>

#include "common/net/verbs/immediate.h"

namespace hoccl {

/// A set of a slot's pieces.
using PieceMask = std::uint64_t;
constexpr PieceMask maskOf(std::uint32_t pieces) {
  return pieces >= 64 ? ~PieceMask{0} : (PieceMask{1} << pieces) - 1;
}

/// What a receiver has got of a slot, as it tells the sender when a path has failed.
struct SlotReport {
  std::uint64_t ready = 0;  ///< the last turn that came in full
  std::uint64_t turn = 0;   ///< the one coming in, if `mask` is not 0
  PieceMask mask = 0;
};

/// An out-slot's bytes on their way, in pieces over several queue pairs.
struct OutPieces {
  static constexpr std::uint8_t kNoPath = 255;
  std::uint64_t turn = 0, bytes = 0, pieceBytes = 0;
  std::uint32_t pieces = 0;
  PieceMask pending = 0;  ///< to be posted
  PieceMask landed = 0;   ///< the peer's, as a completion or its report says
  std::array<std::uint8_t, Immediate::kMostPieces> path{};  ///< over which it was posted last
  std::uint64_t credit = 0;  ///< the last turn the peer has given back

  void begin(std::uint64_t newTurn, std::uint64_t newBytes, std::uint64_t newPieceBytes) {
    turn = newTurn;
    bytes = newBytes;
    pieceBytes = newPieceBytes;
    pieces = static_cast<std::uint32_t>((bytes + pieceBytes - 1) / pieceBytes);
    pending = maskOf(pieces);
    landed = 0;
    path.fill(kNoPath);
  }
  /// Every piece is the peer's, and no queue pair reads the slot any more.
  [[nodiscard]] bool complete() const { return landed == maskOf(pieces); }
  [[nodiscard]] std::uint64_t offsetOf(std::uint32_t piece) const { return piece * pieceBytes; }
  [[nodiscard]] std::uint64_t lengthOf(std::uint32_t piece) const {
    const std::uint64_t left = bytes - offsetOf(piece);
    return left < pieceBytes ? left : pieceBytes;
  }
  void posted(std::uint32_t piece, std::uint8_t over) {
    pending &= ~(PieceMask{1} << piece);
    path[piece] = over;
  }
  /// A completion; that of a path over which it did not go last says nothing, nor does one that
  /// comes behind the peer's report that it lacks the piece.
  void completed(std::uint32_t piece, std::uint8_t over) {
    if (piece < pieces && path[piece] == over) landed |= (PieceMask{1} << piece) & ~pending;
  }
  /// The peer's queue pair of that path takes nothing more, and this is what it has got: what it
  /// lacks goes again. True if anything does.
  bool failedOver(std::uint8_t failed, const SlotReport& report) {
    if (turn == 0) return false;
    for (std::uint32_t piece = 0; piece < pieces; ++piece) {
      const PieceMask bit = PieceMask{1} << piece;
      if (path[piece] != failed || (pending & bit)) continue;
      if (has(piece, report)) {
        landed |= bit;
      } else {
        landed &= ~bit;
        pending |= bit;
      }
    }
    return pending != 0;
  }
  /// The same of what is over: a piece is missing that was acknowledged over that path.
  [[nodiscard]] bool lost(std::uint8_t failed, const SlotReport& report) const {
    for (std::uint32_t piece = 0; piece < pieces; ++piece) {
      if (path[piece] == failed && !has(piece, report)) return true;
    }
    return false;
  }
  /// The peer says that it has got it.
  [[nodiscard]] bool has(std::uint32_t piece, const SlotReport& report) const {
    return credit >= turn || report.ready >= turn ||
           (report.turn == turn && (report.mask & PieceMask{1} << piece) != 0);
  }
};

/// An in-slot's pieces as they come. Each counts once.
struct InPieces {
  enum class Arrival { Piece, Whole, Again, Nonsense };
  SlotReport got;
  std::uint32_t pieces = 0;

  Arrival arrived(std::uint32_t immediate) {
    const std::int64_t ahead =
        Immediate::distance(Immediate::turn(immediate), got.ready, Immediate::kTurnBits);
    if (ahead <= 0) return Arrival::Again;
    const std::uint64_t turn = got.ready + static_cast<std::uint64_t>(ahead);
    const std::uint32_t piece = Immediate::pieceIndex(immediate);
    const std::uint32_t count = Immediate::pieceCount(immediate);
    if (got.mask != 0 && (turn != got.turn || count != pieces)) return Arrival::Nonsense;
    if (piece >= count) return Arrival::Nonsense;
    const PieceMask bit = PieceMask{1} << piece;
    if (got.mask & bit) return Arrival::Again;
    got.turn = turn;
    got.mask |= bit;
    pieces = count;
    if (got.mask != maskOf(count)) return Arrival::Piece;
    got.ready = turn;
    got.mask = 0;
    return Arrival::Whole;
  }
};

}  // namespace hoccl
