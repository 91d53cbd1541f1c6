#pragma once

#include <cstdint>

namespace hoccl {

/// The 32 bits that come with a write and say what it was. Two bits of kind, then
///   Piece:   slot (8), piece (6), pieces - 1 (6), turn (10)
///   Message: sequence number (30)
///   Credit:  slot (8), 12 bits 0, turn (10)
///   Other:   a code (6), value (24)
/// Numbers are cut to their lowest bits; `distance` finds the one that was meant.
struct Immediate {
  enum class Kind : std::uint32_t { Piece = 0, Message = 1, Credit = 2, Other = 3 };
  enum class Other : std::uint32_t {
    Probe = 0,     ///< says that the path works
    Consumed = 1,  ///< so many messages have been taken
  };
  static constexpr std::uint32_t kMostSlots = 256, kMostPieces = 64;
  static constexpr unsigned kTurnBits = 10, kSequenceBits = 30, kValueBits = 24;

  static std::uint32_t piece(std::uint32_t slot, std::uint32_t piece, std::uint32_t pieces,
                             std::uint64_t turn) {
    return make(Kind::Piece, slot << 22 | piece << 16 | (pieces - 1) << 10 | low(turn, kTurnBits));
  }
  static std::uint32_t message(std::uint64_t sequence) {
    return make(Kind::Message, low(sequence, kSequenceBits));
  }
  static std::uint32_t credit(std::uint32_t slot, std::uint64_t turn) {
    return make(Kind::Credit, slot << 22 | low(turn, kTurnBits));
  }
  static std::uint32_t other(Other code, std::uint64_t value) {
    return make(Kind::Other, static_cast<std::uint32_t>(code) << 24 | low(value, kValueBits));
  }

  static Kind kind(std::uint32_t bits) { return static_cast<Kind>(bits >> 30); }
  static std::uint32_t slot(std::uint32_t bits) { return bits >> 22 & 255; }
  static std::uint32_t pieceIndex(std::uint32_t bits) { return bits >> 16 & 63; }
  static std::uint32_t pieceCount(std::uint32_t bits) { return (bits >> 10 & 63) + 1; }
  static std::uint32_t turn(std::uint32_t bits) { return low(bits, kTurnBits); }
  static std::uint32_t sequence(std::uint32_t bits) { return low(bits, kSequenceBits); }
  static Other code(std::uint32_t bits) { return static_cast<Other>(bits >> 24 & 63); }
  static std::uint32_t value(std::uint32_t bits) { return low(bits, kValueBits); }

  /// How far the number that was cut to `cut` lies ahead of `reference` (or behind: negative), if
  /// it is less than half the range of the `bits` bits away.
  static std::int64_t distance(std::uint32_t cut, std::uint64_t reference, unsigned bits) {
    const std::uint32_t range = 1u << bits;
    const std::uint32_t ahead = (cut - low(reference, bits)) & (range - 1);
    return ahead < range / 2 ? std::int64_t{ahead} : std::int64_t{ahead} - std::int64_t{range};
  }

 private:
  static std::uint32_t make(Kind kind, std::uint32_t rest) {
    return static_cast<std::uint32_t>(kind) << 30 | rest;
  }
  static std::uint32_t low(std::uint64_t value, unsigned bits) {
    return static_cast<std::uint32_t>(value & ((1ull << bits) - 1));
  }
};

}  // namespace hoccl
