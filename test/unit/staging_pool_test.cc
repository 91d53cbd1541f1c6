// Sizes of the blocks for application-side copies. What the pool does is in test/e2e (AppCopies).

#include "common/runtime/staging_pool.h"

#include <gtest/gtest.h>

#include <set>

namespace hoccl {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

TEST(StagingPool, BlocksHoldTheOperationAndLoseLessThanAQuarter) {
  EXPECT_EQ(stagingBlockBytes(1), kMiB);
  EXPECT_EQ(stagingBlockBytes(kMiB), kMiB);
  EXPECT_EQ(stagingBlockBytes(kMiB + 1), kMiB + kMiB / 4);
  EXPECT_EQ(stagingBlockBytes(2 * kMiB - 1), 2 * kMiB);
  EXPECT_EQ(stagingBlockBytes(5ull << 30), 5ull << 30);
  for (std::uint64_t bytes = kMiB; bytes < 1ull << 40; bytes += bytes / 7 + 1) {
    const std::uint64_t block = stagingBlockBytes(bytes);
    ASSERT_GE(block, bytes);
    ASSERT_LT(block - bytes, bytes / 4 + 1) << bytes;
  }
}

TEST(StagingPool, FewSizesServeAllOperations) {
  std::set<std::uint64_t> sizes;
  for (std::uint64_t bytes = 1; bytes <= 1ull << 30; bytes += bytes / 50 + 1) {
    sizes.insert(stagingBlockBytes(bytes));
  }
  EXPECT_LE(sizes.size(), 4u * 10 + 1);
}

}  // namespace
}  // namespace hoccl
