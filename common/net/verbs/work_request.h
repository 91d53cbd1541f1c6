#pragma once

#include <infiniband/verbs.h>

#include <cstdint>

#include "common/net/verbs/queue_pair.h"

namespace hoccl {

/// What a work request was, packed into its wr_id: completions with an error tell nothing else.
struct WorkId {
  enum class Kind : std::uint32_t {
    Receive,
    Piece,
    Body,  ///< the bytes of a piece whose word comes behind; completes only with an error
    Word,  ///< that word, which stands for both
    Message,
    Small,  ///< a credit or the like
    Probe
  };
  static constexpr std::uint64_t kBytesUnit = 4096;
  static constexpr std::uint32_t kMostSlots = 256;

  Kind kind = Kind::Receive;
  std::uint8_t path = 0;
  std::uint32_t generation = 0;  ///< of the path, its lowest 14 bits
  std::uint32_t slot = 0, piece = 0;
  std::uint64_t units = 0;  ///< of kBytesUnit bytes, rounded up

  static std::uint32_t cut(std::uint32_t generation) { return generation & 0x3fff; }
  static std::uint64_t unitsOf(std::uint64_t bytes) {
    return (bytes + kBytesUnit - 1) / kBytesUnit;
  }
  [[nodiscard]] std::uint64_t pack() const {
    return static_cast<std::uint64_t>(kind) | std::uint64_t{path} << 4 |
           std::uint64_t{cut(generation)} << 10 | std::uint64_t{slot} << 24 |
           std::uint64_t{piece} << 32 | units << 38;
  }
  static WorkId unpack(std::uint64_t id) {
    return {static_cast<Kind>(id & 15),
            static_cast<std::uint8_t>(id >> 4 & 63),
            static_cast<std::uint32_t>(id >> 10 & 0x3fff),
            static_cast<std::uint32_t>(id >> 24 & 255),
            static_cast<std::uint32_t>(id >> 32 & 63),
            id >> 38};
  }
};

/// Posts `count` receives without memory: writes say by their immediate what they were. 0 or an
/// errno value.
int postReceives(const QueuePair& pair, std::uint8_t path, std::uint32_t generation,
                 std::uint32_t count);

}  // namespace hoccl
