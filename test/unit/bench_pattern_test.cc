#include <gtest/gtest.h>

#include <vector>

#include "tools/bench/pattern.h"

namespace hoccl::bench {
namespace {

constexpr std::size_t kBytes = 1003;  // not a multiple of 8

std::vector<std::uint8_t> filled(const BytePattern& pattern, std::size_t first, std::size_t bytes,
                                 bool inverted = false) {
  std::vector<std::uint8_t> data(bytes);
  pattern.fill(first, bytes, data.data(), inverted);
  return data;
}

TEST(BenchPattern, FillMatchesItsBytes) {
  const BytePattern pattern = BytePattern::of(1, 0, 2);
  const auto data = filled(pattern, 0, kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) ASSERT_EQ(data[i], pattern.at(i)) << i;
  // A later piece is the same bytes as that part of the whole.
  EXPECT_EQ(filled(pattern, 64, 100),
            std::vector<std::uint8_t>(data.begin() + 64, data.begin() + 164));
}

TEST(BenchPattern, RightBytesAreRight) {
  const BytePattern pattern = BytePattern::of(0, 0, 1);
  std::uint64_t first = 0;
  for (std::size_t bytes : {1u, 7u, 8u, 9u, 1003u})
    EXPECT_EQ(pattern.countWrong(0, bytes, filled(pattern, 0, bytes).data(), &first), 0u) << bytes;
}

TEST(BenchPattern, CountsEachWrongByteAndFindsTheFirst) {
  const BytePattern pattern = BytePattern::of(0, 0, 1);
  auto data = filled(pattern, 0, kBytes);
  for (std::size_t at : {77u, 78u, 500u, 1002u}) data[at] ^= 0x10;
  std::uint64_t first = 0;
  EXPECT_EQ(pattern.countWrong(0, kBytes, data.data(), &first), 4u);
  EXPECT_EQ(first, 77u);
  EXPECT_EQ(pattern.countWrong(496, kBytes - 496, data.data() + 496, &first), 2u);
  EXPECT_EQ(first, 500u);
}

TEST(BenchPattern, PoisonIsWrongInEveryByte) {
  const BytePattern pattern = BytePattern::of(3, 0, 4);
  std::uint64_t first = 0;
  EXPECT_EQ(pattern.countWrong(0, kBytes, filled(pattern, 0, kBytes, true).data(), &first), kBytes);
}

TEST(BenchPattern, OtherRankBlockNumberAndPlaceAreWrong) {
  const BytePattern pattern = BytePattern::of(0, 0, 1);
  std::uint64_t first = 0;
  // By chance one byte in 256 agrees.
  constexpr std::uint64_t most = kBytes - kBytes / 50;
  EXPECT_GT(
      pattern.countWrong(0, kBytes, filled(BytePattern::of(1, 0, 1), 0, kBytes).data(), &first),
      most);
  EXPECT_GT(
      pattern.countWrong(0, kBytes, filled(BytePattern::of(0, 1, 1), 0, kBytes).data(), &first),
      most);
  EXPECT_GT(
      pattern.countWrong(0, kBytes, filled(BytePattern::of(0, 0, 2), 0, kBytes).data(), &first),
      most);
  for (std::size_t shift : {8u, 4096u, 65536u, 1u << 20, 8u << 20})
    EXPECT_GT(pattern.countWrong(0, kBytes, filled(pattern, shift, kBytes).data(), &first), most)
        << shift;
}

}  // namespace
}  // namespace hoccl::bench
