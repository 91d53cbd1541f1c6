// Movers that reach each other through RDMA NICs: in the RDMA lab (docs/rdma-lab.md), or on a
// machine that has some; skipped elsewhere. All ranks are on one host, whose NICs reach themselves.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

bool anyDevice() {
  std::error_code error;
  const std::filesystem::directory_iterator devices("/sys/class/infiniband", error);
  return !error && devices != std::filesystem::directory_iterator();
}

class Verbs : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!anyDevice()) GTEST_SKIP() << "there is no RDMA device";
  }
};

struct VerbsJob : Job {
  VerbsJob(const std::string& scenario, int ranks) : Job(scenario, ranks) {
    env("HOCCL_TRANSPORT", "verbs").env("HOCCL_SOCKET_IFNAME", "=lo");
  }
};

void expectStaged(const Job& job, int rank, std::uint64_t ops) {
  std::uint64_t sum = 0;
  for (const auto& comm : job.communicators(rank)) {
    EXPECT_EQ(comm["paths"]["nccl"]["ops"].get<std::uint64_t>(), 0u) << comm;
    EXPECT_EQ(comm["transport"], "verbs") << comm;
    sum += comm["paths"]["staged"]["ops"].get<std::uint64_t>();
  }
  EXPECT_EQ(sum, ops);
}

TEST_F(Verbs, TransfersOfOddSizesAndBothWays) {
  VerbsJob sizes("sizes", 2);
  sizes.finish(60);
  for (int rank : {0, 1}) expectStaged(sizes, rank, 17);
  VerbsJob both("bothWays", 2);
  both.finish(60);
  for (int rank : {0, 1}) {
    expectStaged(both, rank, 48);
    EXPECT_EQ(both.said(rank, "smOps"), "0");
  }
}

TEST_F(Verbs, FewAndSmallSlotsOneQueuePair) {
  VerbsJob job("bothWays", 2);
  job.env("HOCCL_SLOT_BYTES", "128KiB").env("HOCCL_SLOTS", "1").env("HOCCL_QPS_PER_PEER", "1");
  job.finish(60);
}

TEST_F(Verbs, Rule9ASenderThatLeavesEarlyHasDelivered) {
  VerbsJob job("senderLeaves", 2);
  job.start();
  EXPECT_TRUE(job.awaitEnd(0, 30)) << "the sender waits for a receive it need not wait for";
  ::usleep(500'000);  // its mover goes, too
  job.post("sender gone");
  job.finish(60);
}

TEST_F(Verbs, Rule9ThePeersMoverIsKilled) {
  VerbsJob job("moverDies", 2);
  job.start();
  ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
  ASSERT_EQ(::kill(job.moverOf(1), SIGKILL), 0);
  job.post("killed");
  job.finish(60);
  const std::string error = job.said(0, "error");
  EXPECT_NE(error.find("rank 1"), std::string::npos) << error;
}

TEST_F(Verbs, Rule10AListThatFitsNoDeviceMeansPlainNcclAndOneLine) {
  Job job("plain", 2);
  job.env("HOCCL_TRANSPORT", "verbs").env(1, "HOCCL_IB_HCA", "=there_is_none").finish(60);
  const std::string errors = job.errors(0) + job.errors(1);
  EXPECT_NE(errors.find("HOCCL_IB_HCA='=there_is_none'"), std::string::npos) << errors;
  for (int rank : {0, 1}) {
    for (const auto& comm : job.communicators(rank)) EXPECT_FALSE(comm["steered"]) << comm;
  }
}

}  // namespace
}  // namespace e2e
