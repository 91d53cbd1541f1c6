#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace hoccl {

/// No copy is shorter, tails included: shorter ones into the device would ride the compute channel
/// (FACTS 4, rule 5).
inline constexpr std::uint64_t kMinChunkBytes = 64 << 10;

/// What one more chunk costs, in bytes the copy engines would have moved meanwhile, and how much
/// more it weighs than the lag a longer chunk adds (docs/staging.md).
inline constexpr double kChunkCostBytes = 220e3;
inline constexpr double kChunkCostWeight = 3;

/// Length of the chunks of a transfer of `bytes`: all alike, but for the last. Copying out and copying
/// in form a pipeline of two stages of equal speed: n chunks of c bytes take n * (c + cost) + c, of
/// which back-to-back transfers hide the last c. Chunks of unequal length gain nothing, since the second
/// stage always lags by the longest.
inline std::uint64_t chunkBytesFor(std::uint64_t bytes, std::uint64_t largest) {
  constexpr std::uint64_t kPage = 4096;
  const double best = std::sqrt(static_cast<double>(bytes) * kChunkCostBytes * kChunkCostWeight);
  const auto count = static_cast<std::uint64_t>(
      std::max(1.0, std::round(static_cast<double>(bytes) / std::min<double>(best, largest))));
  const std::uint64_t even = (bytes + count - 1) / count;
  return std::clamp((even + kPage - 1) / kPage * kPage, std::min(2 * kMinChunkBytes, largest), largest);
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
