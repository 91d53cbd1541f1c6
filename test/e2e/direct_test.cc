// Ranks of one node with a GPU each: direct copies from buffer to buffer.

#include <gtest/gtest.h>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

std::uint64_t total(const Job& job, int rank, const std::string& path, const char* what) {
  std::uint64_t sum = 0;
  for (const auto& comm : job.communicators(rank)) {
    sum += comm["paths"][path][what].get<std::uint64_t>();
  }
  return sum;
}

/// All of it on that path, and NCCL has seen no send and no receive.
void expectAll(const Job& job, int rank, const std::string& path, std::uint64_t ops) {
  for (const char* each : {"direct", "staged", "app-copies", "nccl"}) {
    EXPECT_EQ(total(job, rank, each, "ops"), each == path ? ops : 0u)
        << each << " of rank " << rank << ": " << job.communicators(rank);
    if (each != path) {
      EXPECT_EQ(total(job, rank, each, "bytes"), 0u) << each;
    }
  }
  EXPECT_EQ(job.callCount(rank, "ncclSend") + job.callCount(rank, "ncclRecv"), 0);
}

TEST(Direct, OddSizesAndOffsetsOneWay) {
  Job job("sizes", 2);
  job.oneNode().finish();
  for (int rank : {0, 1}) expectAll(job, rank, "direct", 17);
}

TEST(Direct, BothWaysInAGroupWithoutAnySm) {
  Job job("bothWays", 2);
  job.oneNode().finish();
  for (int rank : {0, 1}) {
    expectAll(job, rank, "direct", 48);
    EXPECT_EQ(job.said(rank, "smOps"), "0");
  }
}

TEST(Direct, RandomDelaysOfTheDriverChangeNothing) {
  for (const char* seed : {"1", "7"}) {
    Job job("bothWays", 2);
    job.oneNode().env("EMUCUDA_DELAY_US", "300").env("EMUCUDA_SEED", seed).finish();
    for (int rank : {0, 1}) expectAll(job, rank, "direct", 48);
  }
}

TEST(Direct, OneSlotAndOneCopyAtATime) {
  Job job("bothWays", 2);
  job.oneNode().env("HOCCL_SLOTS", "1").env("HOCCL_LANE_DEPTH", "1").finish();
  for (int rank : {0, 1}) expectAll(job, rank, "direct", 48);
}

TEST(Direct, RingOfThree) {
  Job job("ring", 3);
  job.oneNode().finish();
  for (int rank : {0, 1, 2}) expectAll(job, rank, "direct", 12);
}

TEST(Direct, SeveralStreams) {
  Job job("streams", 2);
  job.oneNode().finish();
  for (int rank : {0, 1}) expectAll(job, rank, "direct", 64);
}

TEST(Direct, TwoHundredInFlightFromBothSides) {
  Job job("manyInFlight", 2);
  job.oneNode().finish(60);
  for (int rank : {0, 1}) expectAll(job, rank, "direct", 400);
}

TEST(Direct, AFlowThatWaitsHoldsUpNoOther) {
  Job job("independent", 2);
  job.oneNode().finish();
  for (int rank : {0, 1}) expectAll(job, rank, "direct", 12);
}

TEST(Direct, ThreadsWithACommunicatorEach) {
  Job job("threads", 2);
  job.oneNode().finish();
  for (int rank : {0, 1}) expectAll(job, rank, "direct", 240);
}

TEST(Direct, SwitchedOff) {
  Job job("bothWays", 2);
  job.oneNode().env("HOCCL_P2P", "0").finish();
  for (int rank : {0, 1}) expectAll(job, rank, "staged", 48);
}

TEST(Direct, GpusThatDoNotReachEachOtherAreStaged) {
  Job job("bothWays", 2);
  job.oneNode().env("EMUCUDA_P2P", "0").finish();
  for (int rank : {0, 1}) expectAll(job, rank, "staged", 48);
}

}  // namespace
}  // namespace e2e
