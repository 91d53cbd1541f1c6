#pragma once

#include <algorithm>
#include <cstdint>

namespace hoccl {

/// No copy is shorter, tails included: shorter ones into the device would ride the compute channel
/// (FACTS 4, rule 5).
inline constexpr std::uint64_t kMinChunkBytes = 64 << 10;
/// First and last chunks of a long transfer: short, because the far side's copy engine idles until the
/// first has arrived and this side's while the last is copied out.
inline constexpr std::uint64_t kEdgeChunkBytes = 256 << 10;

/// Length of the chunk that starts at `offset` of a transfer of `bytes` (at least kMinChunkBytes):
/// growing from the edge size, at most `largest`, shrinking again to the end. The receiver learns
/// lengths from messages, so only the sender's plan counts.
constexpr std::uint64_t chunkLength(std::uint64_t bytes, std::uint64_t offset, std::uint64_t largest) {
  const std::uint64_t remaining = bytes - offset;
  const std::uint64_t grown = std::max(kEdgeChunkBytes, offset);
  const std::uint64_t shrunk = std::max(kEdgeChunkBytes, remaining / 2);
  std::uint64_t length = std::min({grown, shrunk, largest, remaining});
  if (length < remaining) {
    length = std::max(length / 4096 * 4096, std::min(kMinChunkBytes, largest));
    if (remaining - length < kMinChunkBytes) {
      // A tail too short to stand alone joins this chunk, or takes some of it when the slot is full.
      length = remaining <= largest ? remaining : remaining - kMinChunkBytes;
    }
  }
  return length;
}

}  // namespace hoccl
