#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace hoccl {

/// No copy is shorter, tails included: shorter ones into the device would ride the compute channel
/// (FACTS 4, rule 5).
inline constexpr std::uint64_t kMinChunkBytes = 64 << 10;

/// What one more chunk costs, in bytes the copy engines would have moved meanwhile: about 4.5 us
/// at 49 GB/s, both directions busy (docs/staging.md).
inline constexpr double kChunkCostBytes = 220e3;

/// Length of every chunk but the last of a transfer of `bytes`. Copying out and copying in form a
/// pipeline of two stages of equal speed: n chunks of c bytes take n * (c + cost) + c, which is least
/// for c = sqrt(bytes * cost). Unequal chunks gain nothing: the second stage always lags by the longest.
inline std::uint64_t chunkBytesFor(std::uint64_t bytes, std::uint64_t largest) {
  const double best = std::sqrt(static_cast<double>(bytes) * kChunkCostBytes);
  const auto rounded = static_cast<std::uint64_t>(best) / 4096 * 4096;
  return std::clamp(rounded, std::min(2 * kMinChunkBytes, largest), largest);
}

/// Length of the chunk that starts at `offset` of a transfer of `bytes` (at least kMinChunkBytes),
/// with `chunk` (at least 2 * kMinChunkBytes) from chunkBytesFor. The receiver learns lengths from
/// messages, so only the sender's plan counts.
constexpr std::uint64_t chunkLength(std::uint64_t bytes, std::uint64_t offset, std::uint64_t chunk) {
  const std::uint64_t remaining = bytes - offset;
  if (remaining <= chunk) return remaining;
  // A tail too short to stand alone takes some of the chunk before it.
  return remaining - chunk < kMinChunkBytes ? remaining - kMinChunkBytes : chunk;
}

}  // namespace hoccl
