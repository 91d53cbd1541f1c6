#include "tools/bench/statistics.h"

#include <algorithm>
#include <cmath>

namespace hoccl::bench {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double percentile(std::vector<double> values, double percent) {
  std::sort(values.begin(), values.end());
  const double wanted = std::ceil(percent / 100 * static_cast<double>(values.size()));
  const std::size_t index = wanted < 1 ? 0 : static_cast<std::size_t>(wanted) - 1;
  return values[std::min(index, values.size() - 1)];
}

double medianOfSlowest(const std::vector<std::vector<double>>& byRank) {
  std::vector<double> slowest = byRank.front();
  for (const std::vector<double>& times : byRank)
    for (std::size_t batch = 0; batch < slowest.size(); ++batch)
      slowest[batch] = std::max(slowest[batch], times[batch]);
  return median(std::move(slowest));
}

}  // namespace hoccl::bench
