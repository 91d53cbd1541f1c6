#pragma once

#include <vector>

namespace hoccl::bench {

/// The middle value, or the mean of the two middle ones. Not for an empty vector.
double median(std::vector<double> values);
/// The smallest value that at least `percent` (0 to 100) of the values do not exceed (nearest
/// rank). Not for an empty vector.
double percentile(std::vector<double> values, double percent);
/// `byRank[rank][batch]`: of each batch the slowest rank, and of those the median. Every rank has
/// the same number of batches, at least one.
double medianOfSlowest(const std::vector<std::vector<double>>& byRank);

}  // namespace hoccl::bench
