// Memory of virtual memory management (cuMemCreate, PyTorch's expandable_segments) between ranks of
// one node: the movers hand each other its segments, and then copies go directly.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <string>

#include "test/e2e/harness.h"
#include "test/e2e/paths.h"

namespace e2e {
namespace {

/// Whatever is received while a span is being handed over is staged.
void expectDirectOrStaged(const Job& job, bool someDirect, int ranks = 2) {
  for (int rank = 0; rank < ranks; ++rank) {
    if (someDirect) {
      EXPECT_GT(total(job, rank, "direct", "ops"), 0u) << job.communicators(rank);
    }
    EXPECT_GT(total(job, rank, "direct", "ops") + total(job, rank, "staged", "ops"), 0u);
    EXPECT_EQ(total(job, rank, "app-copies", "ops") + total(job, rank, "nccl", "ops"), 0u);
    EXPECT_EQ(job.errors(rank), "");
  }
}

void expectNothingFreedWhileMapped(const Job& job) {
  for (int rank : {0, 1}) EXPECT_EQ(job.said(rank, "freedWhileMapped"), "0");
}

class DirectSpansOf : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Scenarios, DirectSpansOf,
                         ::testing::Values("bothWays", "ring", "threads", "streams", "late",
                                           "manyInFlight"));

/// All buffers made of segments of 2 MiB. The last three scenarios use each buffer once.
TEST_P(DirectSpansOf, AllBuffers) {
  const std::string scenario = GetParam();
  const bool again = scenario == "bothWays" || scenario == "ring" || scenario == "threads";
  const int ranks = scenario == "ring" ? 3 : 2;
  Job job(scenario, ranks);
  job.oneNode().env("E2E_MEMORY", "mapped").finish(60);
  expectDirectOrStaged(job, again, ranks);
}

TEST(DirectSpans, OffsetsAndSizesAroundTheSeamsWithoutAnySm) {
  Job job("spansSizes", 2);
  job.oneNode().finish(60);
  expectDirectOrStaged(job, true);
}

TEST(DirectSpans, SeveralThreadsAndCommunicators) {
  Job job("spansThreads", 2);
  job.oneNode().finish(60);
  expectDirectOrStaged(job, true);
}

TEST(DirectSpans, ManyOverTheSameSegments) {
  Job job("spansMany", 2);
  job.oneNode().finish(60);
  expectDirectOrStaged(job, false);
}

/// An unmap comes at any moment of the handing over.
TEST(DirectSpans, MappedAnewAtTheSameAddressTheyAreOtherMemory) {
  for (const char* which : {"all", "middle"}) {
    Job job("spansRemap", 2);
    job.oneNode().argument("which", which).argument("rounds", "60").env("EMUCUDA_DILATION", "1");
    job.finish(60);
    expectDirectOrStaged(job, false);
    expectNothingFreedWhileMapped(job);
  }
}

TEST(DirectSpans, RandomDelaysOfTheDriverChangeNothing) {
  for (const char* seed : {"1", "7"}) {
    for (const char* scenario : {"spansRemap", "bothWays"}) {
      Job job(scenario, 2);
      job.oneNode().env("EMUCUDA_DELAY_US", "300").env("EMUCUDA_SEED", seed);
      job.env("E2E_MEMORY", "mapped").finish(60);
      expectDirectOrStaged(job, false);
      if (std::string(scenario) == "spansRemap") expectNothingFreedWhileMapped(job);
    }
  }
}

TEST(DirectSpans, AnUnmapWaitsForAReceiveWhoseSenderComesLate) {
  Job job("spansPending", 2);
  job.oneNode().env("HOCCL_TIMEOUT_MS", "10000").finish();
  expectNothingFreedWhileMapped(job);
  EXPECT_EQ(job.said(0, "unmappedEarly"), "no");
}

/// Memory that has no descriptor, or only some of it.
TEST(DirectSpans, FabricHandles) {
  for (const char* which : {"all", "odd"}) {
    for (const char* scenario : {"bothWays", "spansSizes", "spansRemap"}) {
      SCOPED_TRACE(std::string(scenario) + " " + which);
      Job job(scenario, 2);
      job.oneNode().env("E2E_MEMORY", "mapped").env("E2E_FABRIC", which);
      job.env("EMUCUDA_FABRIC", "1").finish(60);
      expectDirectOrStaged(job, std::string(scenario) != "spansRemap");
      if (std::string(scenario) == "spansRemap") expectNothingFreedWhileMapped(job);
    }
  }
}

TEST(DirectSpans, WhatThePeersGpuDoesNotReachIsStaged) {
  Job job("bothWays", 2);
  job.oneNode().env("E2E_MEMORY", "mapped").env("EMUCUDA_P2P_REFUSE", "0-1").finish(60);
  for (int rank : {0, 1}) {
    EXPECT_EQ(total(job, rank, "staged", "ops"), 48u) << job.communicators(rank);
    EXPECT_EQ(job.errors(rank), "");
  }
}

/// A mover maps no further segment after so many, of whichever application.
TEST(DirectSpans, WhatAMoverCannotMapGoesAnotherWay) {
  for (const char* before : {"0", "7", "20"}) {
    Job job("bothWays", 2);
    job.oneNode().env("E2E_MEMORY", "mapped").env(1, "EMUCUDA_REFUSE_IPC_IN", "hoccl-mover");
    job.env(1, "EMUCUDA_REFUSE_IPC_OPEN", before).finish(60);
    for (int rank : {0, 1}) EXPECT_EQ(total(job, rank, "nccl", "ops"), 0u);
  }
}

/// More hand-overs at once, in both directions, than the sockets between the movers hold.
TEST(DirectSpans, AThousandSpansOfBothSidesInFlight) {
  Job job("manyInFlight", 2);
  job.oneNode().env("E2E_MEMORY", "mapped").argument("count", "500").finish(60);
  expectDirectOrStaged(job, false);
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.transcript().find("timed out"), std::string::npos) << job.errors(rank);
  }
}

/// Memory costs the mover descriptors. Where it may have few it keeps none for its peers, and one
/// that has none left for what its application hands over says so and goes on. (The emulated driver
/// takes a descriptor for each segment as well.)
TEST(DirectSpans, FewDescriptors) {
  Job job("manyInFlight", 2);
  job.oneNode().env("HOCCL_MOVER_PATH",
                    job.script("mover", "#!/bin/sh\nulimit -n 128\nexec '" E2E_MOVER "' \"$@\"\n"));
  job.argument("count", "27").env("E2E_MEMORY", "mapped").finish(60);
  for (int rank : {0, 1}) {
    EXPECT_EQ(total(job, rank, "nccl", "ops") + total(job, rank, "app-copies", "ops"), 0u);
    EXPECT_EQ(job.errors(rank), "");
  }
}

/// A mover that gives spans up by itself asks its peers to, while they are used again.
TEST(DirectSpans, GivenUpByTheMoverAtOnceAndHandedOverAnew) {
  for (const char* scenario : {"spansRemap", "spansMany", "bothWays", "spansThreads"}) {
    SCOPED_TRACE(scenario);
    Job job(scenario, 2);
    job.oneNode().env("HOCCL_IMPORT_CACHE", "1").env("HOCCL_IMPORT_IDLE_MS", "1");
    job.env("E2E_MEMORY", "mapped").env("EMUCUDA_DILATION", "1").finish(60);
    expectDirectOrStaged(job, false);
    if (std::string(scenario) == "spansRemap") expectNothingFreedWhileMapped(job);
  }
}

// --- Deaths and stops (rule 9) -------------------------------------------------------------------

class DirectSpansOfRank : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfRank, DirectSpansOfRank, ::testing::Values(0, 1));

TEST_P(DirectSpansOfRank, AMoverThatDiesReleasesStreamsAndIsReported) {
  Job job("moverDies", 2);
  job.oneNode().env("E2E_MEMORY", "mapped").start();
  ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
  const pid_t mover = job.moverOf(GetParam());
  ASSERT_GT(mover, 0);
  ASSERT_EQ(::kill(mover, SIGKILL), 0);
  job.post("killed");
  job.finish();
  const std::string other = job.said(1 - GetParam(), "error");
  EXPECT_NE(other.find("rank " + std::to_string(GetParam())), std::string::npos) << other;
}

/// At any moment of the handing over.
TEST_P(DirectSpansOfRank, AnApplicationKilledWhileItsSpansGoOver) {
  for (unsigned us : {0u, 3'000u, 10'000u, 30'000u}) {
    Job job("directPeerDies", 2);
    job.oneNode().env("E2E_MEMORY", "mapped").env("EMUCUDA_DILATION", "500");
    job.argument("dies", std::to_string(GetParam())).start();
    ASSERT_TRUE(job.awaitAll("moving")) << job.transcript();
    const pid_t mover = job.moverOf(GetParam()), application = job.pid(GetParam());
    ASSERT_GT(mover, 0);
    job.expectDeath(GetParam());
    ::usleep(us);
    ASSERT_EQ(::kill(application, SIGKILL), 0);
    EXPECT_TRUE(job.awaitGone(mover, 5)) << "its mover lives on";
    job.finish();
    const std::string error = job.said(1 - GetParam(), "error");
    EXPECT_NE(error.find("rank " + std::to_string(GetParam())), std::string::npos) << error;
  }
}

TEST_P(DirectSpansOfRank, AnAbortEndsThoughAMoverIsStopped) {
  Job job("abortWhileStopped", 2);
  job.oneNode().env("E2E_MEMORY", "mapped").env("HOCCL_TIMEOUT_MS", "1000").start();
  ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
  const pid_t mover = job.moverOf(GetParam());
  ASSERT_GT(mover, 0);
  ASSERT_EQ(::kill(mover, SIGSTOP), 0);
  job.post("stopped");
  const bool ended = job.awaitEnd(1, 10);
  ::kill(mover, SIGCONT);
  EXPECT_TRUE(ended) << job.transcript();
  job.post("going on");
  job.finish();
}

TEST(DirectSpans, AbortsAtRandomMomentsEndInTime) {
  Job job("abortStorm", 2);
  job.oneNode().env("E2E_MEMORY", "mapped").argument("seed", "3").argument("rounds", "30");
  job.finish(60);
  for (int rank : {0, 1}) {
    ASSERT_FALSE(job.said(rank, "slowestAbortMs").empty());
    EXPECT_LT(std::stoi(job.said(rank, "slowestAbortMs")), 5000);
  }
}

}  // namespace
}  // namespace e2e
