#include "tools/bench/pattern.h"

#include <algorithm>
#include <cstring>

namespace hoccl::bench {
namespace {

// Any odd constants with well spread bits serve: the pattern must be fast and must not repeat at
// the distances a copy can go wrong by, it need not be random.
constexpr std::uint64_t kSpread = 0x9e3779b97f4a7c15u;
constexpr std::uint64_t kMix = 0xd6e8feb86659fd93u;

std::uint64_t wordAt(std::uint64_t seed, std::uint64_t word) {
  std::uint64_t x = (seed ^ word) * kSpread;
  x ^= x >> 32;
  x *= kMix;
  return x ^ (x >> 29);
}

}  // namespace

BytePattern BytePattern::of(int rank, int part, std::uint64_t number) {
  const std::uint64_t block = static_cast<std::uint64_t>(part) + 2;
  return {wordAt(wordAt(static_cast<std::uint64_t>(rank) + 1, block), number + 1)};
}

std::uint8_t BytePattern::at(std::uint64_t position) const {
  return static_cast<std::uint8_t>(wordAt(seed, position / 8) >> (position % 8 * 8));
}

void BytePattern::fill(std::uint64_t first, std::size_t bytes, std::uint8_t* out,
                       bool inverted) const {
  const std::uint64_t flip = inverted ? ~0ull : 0;
  for (std::size_t done = 0; done < bytes; done += 8) {
    const std::uint64_t word = wordAt(seed, (first + done) / 8) ^ flip;
    std::memcpy(out + done, &word, std::min<std::size_t>(8, bytes - done));
  }
}

std::uint64_t BytePattern::countWrong(std::uint64_t first, std::size_t bytes,
                                      const std::uint8_t* data, std::uint64_t* firstWrong) const {
  std::uint64_t wrong = 0;
  for (std::size_t done = 0; done < bytes; done += 8) {
    const std::size_t part = std::min<std::size_t>(8, bytes - done);
    std::uint64_t word = 0, right = wordAt(seed, (first + done) / 8);
    std::memcpy(&word, data + done, part);
    if (part < 8) right &= (1ull << (part * 8)) - 1;
    for (std::uint64_t difference = word ^ right, k = 0; difference != 0; difference >>= 8, ++k) {
      if ((difference & 0xff) == 0) continue;
      if (wrong++ == 0) *firstWrong = first + done + k;
    }
  }
  return wrong;
}

}  // namespace hoccl::bench
