// Memory of virtual memory management (cuMemCreate, PyTorch's expandable_segments) between ranks of
// one node: the movers hand each other its segments, and then copies go directly.

#include <gtest/gtest.h>

#include <string>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

std::uint64_t operations(const Job& job, int rank, const char* path) {
  std::uint64_t sum = 0;
  for (const auto& comm : job.communicators(rank)) {
    sum += comm["paths"][path]["ops"].get<std::uint64_t>();
  }
  return sum;
}

/// Whatever is received while a span is being handed over is staged.
void expectDirectOrStaged(const Job& job, bool someDirect, int ranks = 2) {
  for (int rank = 0; rank < ranks; ++rank) {
    if (someDirect) {
      EXPECT_GT(operations(job, rank, "direct"), 0u) << job.communicators(rank);
    }
    EXPECT_GT(operations(job, rank, "direct") + operations(job, rank, "staged"), 0u);
    EXPECT_EQ(operations(job, rank, "app-copies") + operations(job, rank, "nccl"), 0u);
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

TEST(DirectSpans, WhatThePeersGpuDoesNotReachIsStaged) {
  Job job("bothWays", 2);
  job.oneNode().env("E2E_MEMORY", "mapped").env("EMUCUDA_P2P_REFUSE", "0-1").finish(60);
  for (int rank : {0, 1}) {
    EXPECT_EQ(operations(job, rank, "staged"), 48u) << job.communicators(rank);
    EXPECT_EQ(job.errors(rank), "");
  }
}

/// A mover maps no further segment after so many, of whichever application.
TEST(DirectSpans, WhatAMoverCannotMapGoesAnotherWay) {
  for (const char* before : {"0", "7", "20"}) {
    Job job("bothWays", 2);
    job.oneNode().env("E2E_MEMORY", "mapped").env(1, "EMUCUDA_REFUSE_IPC_IN", "hoccl-mover");
    job.env(1, "EMUCUDA_REFUSE_IPC_OPEN", before).finish(60);
    for (int rank : {0, 1}) EXPECT_EQ(operations(job, rank, "nccl"), 0u);
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
    EXPECT_EQ(operations(job, rank, "nccl") + operations(job, rank, "app-copies"), 0u);
    EXPECT_EQ(job.errors(rank), "");
  }
}

}  // namespace
}  // namespace e2e
