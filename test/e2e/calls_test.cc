// What stays with NCCL, what is counted, and what a steered call costs the application thread.

#include <gtest/gtest.h>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

TEST(Calls, CapturedOperationsAreNccls) {
  Job job("capture", 2);
  job.finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.callCount(rank, "ncclSend"), 6);
    EXPECT_EQ(job.callCount(rank, "ncclSend", " bytes=300001 "), 6);
    EXPECT_EQ(job.callCount(rank, "ncclSend", " depth=1 "), 3);
    EXPECT_EQ(job.callCount(rank, "ncclRecv"), 6);
    const nlohmann::json comms = job.communicators(rank);
    ASSERT_EQ(comms.size(), 1u);
    const auto& comm = comms[0];
    EXPECT_EQ(comm["reasons"]["nccl-capture"], 12) << comm;
    EXPECT_EQ(comm["paths"]["staged"]["ops"], 4) << comm;
  }
}

TEST(Calls, WhatNcclRefusesOrIgnoresReachesIt) {
  Job job("oddCalls", 2);
  job.finish();
  for (int rank : {0, 1}) {
    for (const char* peer : {" peer=-1 ", " peer=2 ", " peer=1000000 "}) {
      EXPECT_EQ(job.callCount(rank, "ncclSend", peer), 1) << peer;
      EXPECT_EQ(job.callCount(rank, "ncclRecv", peer), 1) << peer;
    }
    for (const char* type : {" dtype=99 ", " dtype=-1 "}) {
      EXPECT_EQ(job.callCount(rank, "ncclSend", type), 1) << type;
      EXPECT_EQ(job.callCount(rank, "ncclRecv", type), 1) << type;
    }
    EXPECT_EQ(job.callCount(rank, rank == 0 ? "ncclSend" : "ncclRecv", " bytes=0 dtype=7 "), 1);
    EXPECT_EQ(job.callCount(rank, "ncclSend", " bytes=65535 "), 1);
    EXPECT_EQ(job.callCount(rank, "ncclSend", " bytes=65536 "), 0);
    const nlohmann::json comms = job.communicators(rank);
    ASSERT_EQ(comms.size(), 1u);
    // One each way, and a send and a receive with itself.
    EXPECT_EQ(comms[0]["paths"]["staged"]["ops"], 4);
  }
}

TEST(Calls, AFailedDriverCallStopsNothingBehindIt) {
  Job job("deadStream", 2);
  job.env("EMUCUDA_DILATION", "1");
  job.finish(60);
  EXPECT_NE(job.errors(0).find("cuStreamBatchMemOp"), std::string::npos) << job.errors(0);
}

TEST(Calls, CountersAgreeWithWhatWasDone) {
  Job job("counters", 2);
  job.env("HOCCL_STATS", "1").finish();
  for (int rank : {0, 1}) {
    for (const auto& comm : job.communicators(rank, "before")) {
      EXPECT_EQ(comm["paths"]["staged"]["ops"], 0);
      EXPECT_EQ(comm["paths"]["nccl"]["ops"], 0);
    }
    // Also after the communicators have gone.
    for (const char* when : {"alive", "stats"}) {
      const nlohmann::json comms = job.communicators(rank, when);
      ASSERT_EQ(comms.size(), 2u) << job.transcript();
      EXPECT_NE(comms[0]["id"], comms[1]["id"]);
      EXPECT_EQ(comms[0]["rank"], rank);
      EXPECT_EQ(comms[0]["ranks"], 2);
      EXPECT_EQ(comms[0]["why"], "");
      EXPECT_EQ(comms[0]["paths"]["staged"]["ops"], 6);
      EXPECT_EQ(comms[0]["paths"]["staged"]["bytes"], 6 * 300001);
      EXPECT_EQ(comms[0]["paths"]["nccl"]["ops"], 4);
      EXPECT_EQ(comms[0]["paths"]["nccl"]["bytes"], 4 * 1003);
      EXPECT_EQ(comms[0]["reasons"], (nlohmann::json{{"nccl-small", 4}}));
      EXPECT_EQ(comms[1]["paths"]["staged"]["ops"], 2);
      EXPECT_EQ(comms[1]["paths"]["staged"]["bytes"], 2 * 65536);
      EXPECT_EQ(comms[1]["paths"]["nccl"]["ops"], 0);
    }
    const std::string id = job.communicators(rank).at(0)["id"];
    const std::string errors = job.errors(rank);
    const std::size_t line = errors.find("hoccl stats: communicator " + id);
    ASSERT_NE(line, std::string::npos) << errors;
    const std::string text = errors.substr(line, errors.find('\n', line) - line);
    EXPECT_NE(text.find("staged 6 ops 1800006 bytes"), std::string::npos) << text;
    EXPECT_NE(text.find("nccl-small 4 ops 4012 bytes"), std::string::npos) << text;
  }
}

TEST(Calls, WithoutStatsNothingIsPrinted) {
  Job job("counters", 2);
  job.finish();
  for (int rank : {0, 1}) EXPECT_EQ(job.errors(rank), "");
}

TEST(Calls, StrictTurnsAnUnsteeredOperationIntoAnError) {
  Job job("strict", 2);
  // Two ranks of one node.
  job.env(1, "NCCL_HOSTID", "e2e-node-0").env("HOCCL_STRICT", "1").finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.said(rank, "result"), "5") << job.transcript();  // ncclInvalidUsage
    const std::string error = job.said(rank, "error");
    for (const char* part : {"HOCCL_STRICT", "300001 bytes", "all ranks are on one node"}) {
      EXPECT_NE(error.find(part), std::string::npos) << error;
    }
    EXPECT_EQ(job.callCount(rank, "ncclSend", " bytes=1003 "), 2);
    EXPECT_EQ(job.callCount(rank, "ncclSend", " bytes=300001 "), 1);  // the one to itself
  }
}

TEST(Calls, StrictPassesWhatIsSteeredAndWhatCannotBe) {
  for (const char* scenario : {"capture", "oddCalls", "mixed"}) {
    SCOPED_TRACE(scenario);
    Job job(scenario, 2);
    job.env("HOCCL_STRICT", "1").finish();
  }
}

/// By kind of memory: what is mapped by its handle; segments, of which each buffer has three. And
/// with own blocks, which the streams copy.
struct Warm {
  const char* memory;
  bool ownBlocks;
};
class WarmCalls : public ::testing::TestWithParam<Warm> {};
INSTANTIATE_TEST_SUITE_P(Memory, WarmCalls,
                         ::testing::Values(Warm{"device", false}, Warm{"mapped", false},
                                           Warm{"device", true}, Warm{"mapped", true}),
                         [](const auto& info) {
                           return std::string(info.param.memory) +
                                  (info.param.ownBlocks ? "OwnBlocks" : "");
                         });

TEST_P(WarmCalls, NeitherAllocateNorLockNorEnterTheKernel) {
#if HOCCL_SANITIZED
  GTEST_SKIP() << "a sanitizer has its own malloc";
#endif
  const bool segments = std::string(GetParam().memory) == "mapped";
  Job job("launchPath", 2);
  if (GetParam().ownBlocks) job.argument("toItself", "1").env("HOCCL_OWN_BLOCK", "kernel");
  job.env("E2E_MEMORY", GetParam().memory)
      .argument("bytes", segments ? "4500001" : "200003")
      .finish(60);
  const auto stats = nlohmann::json::parse(job.said(0, "stats"));
  EXPECT_EQ(stats["ownBlocksByKernel"], GetParam().ownBlocks ? 120 : 0);
  for (const auto& comm : job.communicators(0)) EXPECT_EQ(comm["paths"]["app-copies"]["ops"], 0);
  bool leftToNccl = false;
  for (const auto& comm : job.communicators(0)) leftToNccl |= comm["paths"]["nccl"]["ops"] > 0;
  EXPECT_TRUE(leftToNccl);
  // The watch sees what creating a communicator does, and what the emulated driver does in the
  // calls.
  for (const char* what : {"controlAllocations", "controlLocks", "seen"}) {
    EXPECT_GT(std::atoi(job.said(0, what).c_str()), 0) << what;
  }
  EXPECT_EQ(job.said(0, "allocations"), "0");
  EXPECT_EQ(job.said(0, "locks"), "0");
#if defined(__x86_64__)
  EXPECT_GT(std::atoi(job.said(0, "controlSystemCalls").c_str()), 0);
  EXPECT_EQ(job.said(0, "systemCalls"), "0") << "the first is " << job.said(0, "firstSystemCall");
#endif
}

}  // namespace
}  // namespace e2e
