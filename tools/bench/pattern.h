#pragma once

#include <cstddef>
#include <cstdint>

namespace hoccl::bench {

/// The bytes a sending rank puts into a buffer: each depends on the seed and on its position, so
/// that bytes of another rank, another iteration or another place do not pass for right ones.
struct BytePattern {
  std::uint64_t seed = 0;

  /// For block `part` of what `rank` sends in operation number `number` of a run.
  static BytePattern of(int rank, int part, std::uint64_t number);

  [[nodiscard]] std::uint8_t at(std::uint64_t position) const;
  /// Writes positions [first, first + bytes) to `out`; inverted gives the poison, which differs
  /// from the right value in every byte. `first` is a multiple of 8.
  void fill(std::uint64_t first, std::size_t bytes, std::uint8_t* out, bool inverted = false) const;
  /// Bytes of `data`, which holds positions [first, first + bytes), that are wrong. `first` is a
  /// multiple of 8. `firstWrong` receives the lowest wrong position, where there is one.
  [[nodiscard]] std::uint64_t countWrong(std::uint64_t first, std::size_t bytes,
                                         const std::uint8_t* data, std::uint64_t* firstWrong) const;
};

}  // namespace hoccl::bench
