// Ranks of a node in full traffic, over NVLink and over PCIe, while movers and applications are
// stopped and killed at random moments (rule 9). HOCCL_STORM_SEEDS says how many seeds.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "test/e2e/harness.h"
#include "test/e2e/paths.h"

namespace e2e {
namespace {

struct Variant {
  const char* name;
  std::vector<std::pair<const char*, const char*>> environment;
  int ranks = 3, nodes = 1;
};
void PrintTo(const Variant& v, std::ostream* out) { *out << v.name; }

const Variant kVariants[] = {
    {"Nvlink", {}},
    {"Pcie", {{"EMUCUDA_NVLINK", "0"}}},
    {"PcieDelays",
     {{"EMUCUDA_NVLINK", "0"}, {"EMUCUDA_DELAY_US", "200"}, {"HOCCL_IMPORT_CACHE", "1"}}},
    {"PcieOneOfAll", {{"EMUCUDA_NVLINK", "0"}, {"HOCCL_SLOTS", "1"}, {"HOCCL_LANE_DEPTH", "1"}}},
    {"PcieSegments",
     {{"EMUCUDA_NVLINK", "0"}, {"E2E_MEMORY", "mapped"}, {"EMUCUDA_DELAY_US", "50"}}},
    {"PcieIdleOften",
     {{"EMUCUDA_NVLINK", "0"}, {"HOCCL_IMPORT_IDLE_MS", "1"}, {"HOCCL_SPIN_US", "0"}}},
    {"TwoNodesNvlink", {{"HOCCL_IMPORT_CACHE", "1"}}, 4, 2},
    {"TwoNodesPcieOneOfAll",
     {{"EMUCUDA_NVLINK", "0"}, {"HOCCL_SLOTS", "1"}, {"HOCCL_LANE_DEPTH", "1"}},
     4,
     2},
};

int seeds() {
  const char* text = std::getenv("HOCCL_STORM_SEEDS");
  return text && *text ? std::atoi(text) : 1;
}

class PeerStorm : public ::testing::TestWithParam<Variant> {
 protected:
  static void configure(Job& job, int seed) {
    job.oneNode().argument("seed", std::to_string(seed)).env("EMUCUDA_SEED", std::to_string(seed));
    const int ranks = GetParam().ranks;
    for (int rank = 0; GetParam().nodes > 1 && rank < ranks; ++rank) {
      job.env(rank, "NCCL_HOSTID", "storm-node-" + std::to_string(rank * GetParam().nodes / ranks));
    }
    for (const auto& [name, value] : GetParam().environment) job.env(name, value);
  }
};
INSTANTIATE_TEST_SUITE_P(Variants, PeerStorm, ::testing::ValuesIn(kVariants),
                         [](const auto& info) { return std::string(info.param.name); });

/// Nobody fails, whoever stands still for a while.
TEST_P(PeerStorm, Rule9StoppedMoversAndApplicationsGoOn) {
  const int ranks = GetParam().ranks;
  for (int seed = 1; seed <= seeds(); ++seed) {
    SCOPED_TRACE(seed);
    Job job("peerStorm", ranks);
    configure(job, seed);
    job.argument("all", "1").argument("ms", "2500").start();
    ASSERT_TRUE(job.awaitAll("moving", 40)) << job.transcript();
    std::mt19937 random(static_cast<unsigned>(seed));
    for (int n = 0; n < 12; ++n) {
      const int rank = static_cast<int>(random() % ranks);
      const pid_t victim = random() % 4 == 0 ? job.pid(rank) : job.moverOf(rank);
      ASSERT_GT(victim, 0);
      ASSERT_EQ(::kill(victim, SIGSTOP), 0);
      ::usleep(static_cast<useconds_t>(random() % 120'000));
      ASSERT_EQ(::kill(victim, SIGCONT), 0);
      ::usleep(static_cast<useconds_t>(random() % 30'000));
    }
    job.finish(60);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(job.said(rank, "failed"), "0") << job.transcript();
      EXPECT_GT(total(job, rank, "direct", "ops"), 0u);
    }
    if (HasFailure()) return;
  }
}

/// One mover, or one application, is killed; the others see an error in time, and take no wrong
/// byte for received.
TEST_P(PeerStorm, Rule9ADeathAtARandomMoment) {
  const int ranks = GetParam().ranks;
  for (int seed = 1; seed <= 2 * seeds(); ++seed) {
    SCOPED_TRACE(seed);
    Job job("peerStorm", ranks);
    configure(job, seed);
    job.start();
    ASSERT_TRUE(job.awaitAll("moving", 40)) << job.transcript();
    std::mt19937 random(static_cast<unsigned>(seed) + 100);
    const int dies = static_cast<int>(random() % ranks);
    const bool application = seed % 2 == 0;
    const pid_t mover = job.moverOf(dies);
    ASSERT_GT(mover, 0);
    ::usleep(static_cast<useconds_t>(random() % 200'000));
    if (random() % 2) {  // a stopped peer at the same time
      const pid_t other = job.moverOf((dies + 1) % ranks);
      ASSERT_EQ(::kill(other, SIGSTOP), 0);
      ::usleep(50'000);
      ASSERT_EQ(::kill(application ? job.pid(dies) : mover, SIGKILL), 0);
      ::usleep(static_cast<useconds_t>(random() % 300'000));
      ASSERT_EQ(::kill(other, SIGCONT), 0);
    } else {
      ASSERT_EQ(::kill(application ? job.pid(dies) : mover, SIGKILL), 0);
    }
    if (application) job.expectDeath(dies);
    job.finish(40);
    for (int rank = 0; rank < ranks; ++rank) {
      if (application && rank == dies) continue;
      EXPECT_EQ(job.said(rank, "failed"), "1") << job.transcript();
    }
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace e2e
