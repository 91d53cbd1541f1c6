#include "common/base/associative_cache.h"

#include <gtest/gtest.h>

namespace hoccl {
namespace {

struct Key {
  std::uint64_t value = 0, set = 0;
  bool operator==(const Key&) const = default;
  [[nodiscard]] std::uint64_t hash() const { return set << 32; }
};

using Cache = AssociativeCache<Key, int, 4, 3>;

TEST(AssociativeCache, KeysOfOneSetStayUntilThereAreMoreThanWays) {
  Cache cache;
  EXPECT_EQ(cache.find({1, 2}), nullptr);
  for (int n = 1; n <= 3; ++n) cache.insert({std::uint64_t(n), 2}, n);
  cache.insert({1, 3}, 10);  // another set
  for (int n = 1; n <= 3; ++n) {
    int* const found = cache.find({std::uint64_t(n), 2});
    ASSERT_NE(found, nullptr) << n;
    EXPECT_EQ(*found, n);
  }
  cache.insert({4, 2}, 4);
  EXPECT_EQ(cache.find({1, 2}), nullptr) << "the first one goes";
  for (int n = 2; n <= 4; ++n) {
    int* const found = cache.find({std::uint64_t(n), 2});
    ASSERT_NE(found, nullptr) << n;
    EXPECT_EQ(*found, n);
  }
  EXPECT_EQ(*cache.find({1, 3}), 10);
}

TEST(AssociativeCache, AKnownKeyKeepsItsPlace) {
  Cache cache;
  for (int n = 1; n <= 3; ++n) cache.insert({std::uint64_t(n), 1}, n);
  for (int again = 0; again < 5; ++again) cache.insert({2, 1}, 20 + again);
  EXPECT_EQ(*cache.find({1, 1}), 1);
  EXPECT_EQ(*cache.find({2, 1}), 24);
  EXPECT_EQ(*cache.find({3, 1}), 3);
}

/// As the buffers of a training step: aligned addresses, sizes that differ little.
TEST(AssociativeCache, TheBuffersOfATrainingStepFit) {
  struct Buffer {
    std::uint64_t address = 0, bytes = 0;
    bool operator==(const Buffer&) const = default;
    [[nodiscard]] std::uint64_t hash() const { return spreadBits(address ^ spreadBits(bytes)); }
  };
  for (const std::uint64_t step : {512ull, 1ull << 16, 2ull << 20, 1ull << 30}) {
    AssociativeCache<Buffer, int, 128, 8> cache;
    const auto buffer = [&](int n) {
      return Buffer{0x7f0000000000 + n * step, (4ull << 20) + n % 3 * 512};
    };
    for (int n = 0; n < 256; ++n) cache.insert(buffer(n), n);
    int lost = 0;
    for (int n = 0; n < 256; ++n) lost += cache.find(buffer(n)) ? 0 : 1;
    EXPECT_EQ(lost, 0) << "steps of " << step;
  }
}

}  // namespace
}  // namespace hoccl
