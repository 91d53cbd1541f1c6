// Memory of virtual memory management (cuMemCreate, PyTorch's expandable_segments) that a mover
// maps.

#include <gtest/gtest.h>

#include <string>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

constexpr const char* kWarning = "is freed while the mover";

int operations(const Job& job, int rank, const char* path) {
  int sum = 0;
  for (const auto& comm : job.communicators(rank)) sum += comm["paths"][path]["ops"].get<int>();
  return sum;
}

void expectOnlyStaged(const Job& job, int ranks = 2) {
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_GT(operations(job, rank, "staged"), 0);
    EXPECT_EQ(operations(job, rank, "app-copies"), 0);
    EXPECT_EQ(job.errors(rank), "");
  }
}

void expectNothingFreedWhileMapped(const Job& job) {
  for (int rank : {0, 1}) EXPECT_EQ(job.said(rank, "freedWhileMapped"), "0");
}

class SpansOf : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Scenarios, SpansOf,
                         ::testing::Values("sizes", "bothWays", "ring", "streams", "late",
                                           "manyInFlight", "twoStreams", "twoCommunicators",
                                           "nested", "threads"));

/// Scenarios that check every byte, with all buffers made of segments of 2 MiB.
TEST_P(SpansOf, AllBuffers) {
  const int ranks = std::string(GetParam()) == "ring" ? 3 : 2;
  Job job(GetParam(), ranks);
  job.env("E2E_MEMORY", "mapped").finish(60);
  expectOnlyStaged(job, ranks);
}

TEST(Spans, FabricHandles) {
  for (const char* which : {"all", "odd"}) {
    SCOPED_TRACE(which);
    Job job("spansSizes", 2);
    job.env("E2E_FABRIC", which).env("EMUCUDA_FABRIC", "1").env("HOCCL_APP_COPIES", "never");
    job.finish(60);
    expectOnlyStaged(job);
  }
}

TEST(Spans, Collectives) {
  Job job("collectives", 3);
  job.env("E2E_MEMORY", "mapped").argument("steered", "70001").argument("small", "1003").finish(60);
  for (int rank : {0, 1, 2}) {
    EXPECT_EQ(std::to_string(operations(job, rank, "staged")), job.said(rank, "steered"));
    EXPECT_EQ(operations(job, rank, "app-copies"), 0);
    EXPECT_EQ(job.said(rank, "smOps"), "0");
  }
}

TEST(Spans, OffsetsAndSizesAroundTheSeams) {
  Job job("spansSizes", 2);
  job.finish(60);
  expectOnlyStaged(job);
  for (int rank : {0, 1}) {
    EXPECT_EQ(std::to_string(operations(job, rank, "staged")), job.said(rank, "transfers"));
  }
}

TEST(Spans, RandomDelaysOfTheDriverChangeNothing) {
  for (const char* seed : {"1", "7"}) {
    Job job("spansRemap", 2);
    job.env("EMUCUDA_DELAY_US", "300").env("EMUCUDA_SEED", seed).finish(60);
    expectOnlyStaged(job);
    expectNothingFreedWhileMapped(job);
  }
}

TEST(Rule8, SegmentsMappedAnewAtTheSameAddressAreOtherMemory) {
  for (const char* which : {"all", "middle"}) {
    Job job("spansRemap", 2);
    job.argument("which", which).argument("rounds", "30").env("EMUCUDA_DILATION", "1").finish(60);
    expectOnlyStaged(job);
    expectNothingFreedWhileMapped(job);
  }
}

TEST(Rule8, AThousandRoundsOfMapOperateUnmap) {
  Job job("spansRemap", 2);
  job.argument("rounds", "1000").argument("part", "seam").env("EMUCUDA_DILATION", "1").finish(200);
  expectOnlyStaged(job);
  expectNothingFreedWhileMapped(job);
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.said(rank, "flat"), "yes") << "device memory";
    RecordProperty("unmapMsMedianAndMost" + std::to_string(rank), job.said(rank, "unmapMs"));
  }
}

TEST(Rule8, AnUnmapWaitsForAReceiveWhoseSenderComesLate) {
  Job job("spansPending", 2);
  job.env("HOCCL_TIMEOUT_MS", "10000").finish();
  expectOnlyStaged(job);
  expectNothingFreedWhileMapped(job);
  EXPECT_EQ(job.said(0, "unmappedEarly"), "no");
}

TEST(Rule8, AnUnmapDoesNotWaitForOperationsOnOtherSegments) {
  Job job("spansPending", 2);
  job.argument("what", "other").env("HOCCL_TIMEOUT_MS", "10000").finish();
  expectOnlyStaged(job);
  expectNothingFreedWhileMapped(job);
  EXPECT_EQ(job.said(0, "unmappedEarly"), "yes");
}

TEST(Rule8, AnUnmapWhoseSenderNeverComesIsBoundedAndSaysWhatWasPending) {
  Job job("spansPending", 2);
  job.argument("never", "1").env("HOCCL_TIMEOUT_MS", "500").finish();
  EXPECT_EQ(job.said(0, "unmappedEarly"), "yes");
  const std::string errors = job.errors(0);
  EXPECT_NE(errors.find(kWarning), std::string::npos) << errors;
  EXPECT_NE(errors.find("1 operation, the first a receive of 4194295 bytes from rank 1"),
            std::string::npos)
      << errors;
}

TEST(Rule8, SegmentsWhoseUnmapNobodySeesAreNoticedAtTheNextUse) {
  Job job("spansRemap", 2);
  job.argument("seen", "0").finish(60);
  expectOnlyStaged(job);
}

TEST(Rule8, SegmentsThatNobodyUsesAreLetGoOf) {
  for (const char* before : {"nothing", "idle", "outOfMemory"}) {
    SCOPED_TRACE(before);
    Job job("spansUnseen", 2);
    job.argument("before", before);
    if (std::string(before) == "idle") job.env("HOCCL_IMPORT_IDLE_MS", "100");
    job.finish();
    expectOnlyStaged(job);
    // Two segments of each rank: the emulated driver counts what the other two rule out.
    const char* const wanted = std::string(before) == "nothing" ? "4" : "0";
    for (int rank : {0, 1}) EXPECT_EQ(job.said(rank, "freedWhileMapped"), wanted);
  }
}

TEST(Rule8, SpansAreBounded) {
  Job job("spansMany", 2);
  job.env("HOCCL_IMPORT_CACHE", "2").env("EMUCUDA_DILATION", "1").finish(60);
  expectOnlyStaged(job);
}

TEST(Spans, ManyOverTheSameSegments) {
  Job job("spansMany", 2);
  job.env("EMUCUDA_DILATION", "1").finish(60);
  expectOnlyStaged(job);
}

TEST(Spans, SeveralThreadsAndCommunicators) {
  Job job("spansThreads", 2);
  job.env("EMUCUDA_DILATION", "1").finish(60);
  expectOnlyStaged(job);
  expectNothingFreedWhileMapped(job);
}

TEST(Spans, AGroupThatFailsHoldsNothing) {
  Job job("spansFailedGroup", 2);
  job.env("HOCCL_TIMEOUT_MS", "2000").finish();
  expectNothingFreedWhileMapped(job);
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.errors(rank).find(kWarning), std::string::npos) << job.errors(rank);
  }
}

TEST(Spans, OneSegmentThatCannotBeExportedConcernsItsBuffersAlone) {
  Job job("spansUnexportable", 2);
  job.finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(operations(job, rank, "staged"), 4);
    EXPECT_EQ(operations(job, rank, "app-copies"), 4);
    EXPECT_EQ(job.errors(rank), "");
  }
}

TEST(Spans, WithoutFileDescriptorsForAWhile) {
  Job job("spansNoDescriptors", 2);
  job.finish();
  EXPECT_EQ(operations(job, 0, "app-copies"), 1 + 2);
  EXPECT_EQ(operations(job, 0, "staged"), 2);
  EXPECT_EQ(operations(job, 1, "staged"), 4);
  const std::string errors = job.errors(0);
  const std::size_t at = errors.find("no file descriptor is left (ulimit -n)");
  ASSERT_NE(at, std::string::npos) << errors;
  EXPECT_EQ(errors.find("no file descriptor", at + 1), std::string::npos) << errors;
}

TEST(Spans, WhatTheMoverCannotMapTheApplicationCopies) {
  for (const char* succeed : {"0", "5"}) {
    SCOPED_TRACE(succeed);
    Job job("spansSizes", 2);
    job.env("EMUCUDA_REFUSE_IPC_OPEN", succeed).env("EMUCUDA_REFUSE_IPC_IN", "hoccl-mover");
    job.finish(60);
    for (int rank : {0, 1}) {
      EXPECT_GT(operations(job, rank, "app-copies"), 0);
      EXPECT_EQ(operations(job, rank, "staged") > 0, std::string(succeed) != "0");
      // Once, not for each buffer.
      const std::string errors = job.errors(rank);
      const std::size_t at = errors.find("the mover cannot map the application's memory");
      ASSERT_NE(at, std::string::npos) << errors;
      EXPECT_EQ(errors.find("the mover cannot map", at + 1), std::string::npos) << errors;
    }
  }
}

TEST(Spans, MemoryThatNoMoverMapsIsAnErrorWhenCopiesAreForbidden) {
  Job job("spansSizes", 2);
  job.env("EMUCUDA_REFUSE_IPC_OPEN", "0").env("EMUCUDA_REFUSE_IPC_IN", "hoccl-mover");
  job.env("HOCCL_APP_COPIES", "never");
  job.expectDeath(0);
  job.expectDeath(1);
  job.finish(60);
  EXPECT_NE((job.errors(0) + job.errors(1)).find("HOCCL_APP_COPIES=never"), std::string::npos)
      << job.transcript();
}

TEST(Spans, AlwaysMeansApplicationSideCopiesForThemToo) {
  Job job("spansSizes", 2);
  job.env("HOCCL_APP_COPIES", "always").finish(60);
  for (int rank : {0, 1}) EXPECT_EQ(operations(job, rank, "staged"), 0);
}

}  // namespace
}  // namespace e2e
