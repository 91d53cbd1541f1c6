#include <gtest/gtest.h>

#include "tools/bench/statistics.h"

namespace hoccl::bench {
namespace {

TEST(BenchStatistics, MedianOfOddAndEven) {
  EXPECT_DOUBLE_EQ(median({3, 1, 2}), 2);
  EXPECT_DOUBLE_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_DOUBLE_EQ(median({5}), 5);
}

TEST(BenchStatistics, PercentileIsANearestRank) {
  std::vector<double> hundred;
  for (int i = 100; i >= 1; --i) hundred.push_back(i);
  EXPECT_DOUBLE_EQ(percentile(hundred, 99), 99);
  EXPECT_DOUBLE_EQ(percentile(hundred, 100), 100);
  EXPECT_DOUBLE_EQ(percentile(hundred, 0), 1);
  EXPECT_DOUBLE_EQ(percentile({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 99), 10);
  EXPECT_DOUBLE_EQ(percentile({8}, 50), 8);
}

TEST(BenchStatistics, SlowestRankOfEachBatchThenTheMedian) {
  // Slowest by batch: 5, 9, 3.
  EXPECT_DOUBLE_EQ(medianOfSlowest({{1, 9, 2}, {5, 2, 3}}), 5);
  // The median of each rank alone (2 and 3) would be wrong.
  EXPECT_DOUBLE_EQ(medianOfSlowest({{2, 10}, {10, 2}}), 10);
}

}  // namespace
}  // namespace hoccl::bench
