// Random correct programs with transfers on both sides of HOCCL_MIN_BYTES, which nothing may fail,
// and the same with one pair that does not fit. HOCCL_STORM_SEED adds to every seed,
// HOCCL_STORM_ROUNDS says how long each one is.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

int fromEnvironment(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::atoi(text) : otherwise;
}

struct Variant {
  const char* name;
  bool oneNode;
  bool bothSides;  ///< of the threshold
  std::vector<std::pair<const char*, const char*>> environment;
};

const Variant kVariants[] = {
    {"Plain", false, true, {}},
    {"Delays", false, true, {{"EMUCUDA_DELAY_US", "100"}, {"HOCCL_SPIN_US", "0"}}},
    {"OneNode", true, true, {{"EMUCUDA_DELAY_US", "50"}}},
    {"Tcp", false, true, {{"HOCCL_TRANSPORT", "tcp"}, {"HOCCL_SOCKET_IFNAME", "=lo"}}},
    {"FewSlots",
     false,
     true,
     {{"HOCCL_SLOTS", "1"}, {"HOCCL_SLOT_BYTES", "128KiB"}, {"HOCCL_FLAG_POOL", "16"}}},
    {"NoneSteered", false, false, {{"HOCCL_MIN_BYTES", "1GiB"}}},
};

class ThresholdStorm : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Variants, ThresholdStorm,
                         ::testing::Range<std::size_t>(0, std::size(kVariants)),
                         [](const auto& info) { return kVariants[info.param].name; });

Job& configure(Job& job, const Variant& variant, int seed) {
  if (variant.oneNode) job.oneNode();
  for (const auto& [name, value] : variant.environment) job.env(name, value);
  job.env("HOCCL_TIMEOUT_MS", "20000").env("NCCLSTANDIN_TIMEOUT_MS", "60000");
  // A wait of the stand-in NCCL occupies a channel of copies, of which there are four a direction
  // else, and two threads with three streams have more of them pending.
  job.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
  job.argument("seed", std::to_string(seed + fromEnvironment("HOCCL_STORM_SEED", 0)));
  job.argument("bothSides", variant.bothSides ? "1" : "0");
  return job;
}

TEST_P(ThresholdStorm, NoCorrectProgramIsFailed) {
  const Variant& variant = kVariants[GetParam()];
  Job job("thresholdStorm", 3);
  configure(job, variant, static_cast<int>(GetParam()));
  job.argument("rounds", std::to_string(fromEnvironment("HOCCL_STORM_ROUNDS", 40)));
  job.finish(110);
}

TEST_P(ThresholdStorm, AMismatchFailsBothRanksAndNobodyElse) {
  const Variant& variant = kVariants[GetParam()];
  if (!variant.bothSides) return;
  for (int seed : {100, 200, 300}) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Job job("thresholdStorm", 3);
    configure(job, variant, seed + static_cast<int>(GetParam()));
    job.argument("rounds", "8").argument("planted", "1");
    job.finish(60);
    int concerned = 0;
    for (int rank : {0, 1, 2}) {
      const std::string result = job.said(rank, "planted");
      if (result.empty()) continue;
      ++concerned;
      EXPECT_EQ(result, "4") << job.transcript();
      EXPECT_NE(job.said(rank, "error").find("the two ranks' counts differ"), std::string::npos)
          << job.said(rank, "error");
    }
    EXPECT_EQ(concerned, 2);
  }
}

}  // namespace
}  // namespace e2e
