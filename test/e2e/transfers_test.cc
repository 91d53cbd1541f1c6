// Send and receive through the movers.

#include <gtest/gtest.h>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

/// Operations and bytes of all communicators of a rank on a path: "staged" or "nccl".
std::uint64_t total(const nlohmann::json& comms, const std::string& path, const char* what) {
  std::uint64_t sum = 0;
  for (const auto& comm : comms) {
    sum += comm["paths"][path][what].get<std::uint64_t>();
  }
  return sum;
}

/// Everything went through the movers: NCCL has seen no send and no receive.
void expectAllSteered(const Job& job, int rank, std::uint64_t ops) {
  const nlohmann::json comms = job.communicators(rank);
  EXPECT_EQ(total(comms, "staged", "ops"), ops) << comms;
  EXPECT_EQ(total(comms, "nccl", "ops"), 0u) << comms;
  EXPECT_EQ(job.callCount(rank, "ncclSend") + job.callCount(rank, "ncclRecv"), 0);
}

TEST(Transfers, OddSizesAndOffsetsOneWay) {
  Job job("sizes", 2);
  job.finish();
  for (int rank : {0, 1}) expectAllSteered(job, rank, 17);
}

TEST(Transfers, BothWaysInAGroupWithoutAnySm) {
  Job job("bothWays", 2);
  job.finish();
  for (int rank : {0, 1}) {
    expectAllSteered(job, rank, 48);
    EXPECT_EQ(job.said(rank, "smOps"), "0");
    EXPECT_EQ(job.said(rank, "h2dUnder32KiB"), "0");
  }
}

TEST(Transfers, RandomDelaysOfTheDriverChangeNothing) {
  for (const char* seed : {"1", "7"}) {
    Job job("bothWays", 2);
    job.env("EMUCUDA_DELAY_US", "300").env("EMUCUDA_SEED", seed).finish();
  }
}

TEST(Transfers, SmallSlotsCutEverythingIntoManyChunks) {
  Job job("bothWays", 2);
  job.env("HOCCL_SLOT_BYTES", "128KiB").env("HOCCL_SLOTS", "2").finish();
  Job single("bothWays", 2);
  single.env("HOCCL_SLOTS", "1").finish();
}

TEST(Transfers, RingOfThree) {
  Job job("ring", 3);
  job.finish();
  for (int rank : {0, 1, 2}) expectAllSteered(job, rank, 12);
}

TEST(Transfers, SeveralStreams) {
  Job job("streams", 2);
  job.finish();
  for (int rank : {0, 1}) expectAllSteered(job, rank, 64);
}

TEST(Transfers, OneSideComesLongBeforeTheOther) {
  Job job("late", 2);
  job.finish();
  for (int rank : {0, 1}) expectAllSteered(job, rank, 6);
}

TEST(Transfers, TwoHundredInFlightFromBothSides) {
  Job job("manyInFlight", 2);
  job.finish(60);
  for (int rank : {0, 1}) expectAllSteered(job, rank, 400);
}

TEST(Transfers, AFlowThatWaitsHoldsUpNoOther) {
  Job job("independent", 2);
  job.finish();
  for (int rank : {0, 1}) expectAllSteered(job, rank, 12);
}

TEST(Transfers, ThreadsWithACommunicatorEach) {
  Job job("threads", 2);
  job.finish();
  for (int rank : {0, 1}) expectAllSteered(job, rank, 240);
}

TEST(Transfers, EveryKindOfStreamAndAThreadWithoutContext) {
  Job job("contexts", 2);
  job.finish();
  for (int rank : {0, 1}) expectAllSteered(job, rank, 32);
}

TEST(Transfers, AFlagPoolSmallerThanTheLaunches) {
  for (const char* pool : {"1", "2", "8"}) {
    SCOPED_TRACE(pool);
    Job job("smallPool", 2);
    job.env("HOCCL_FLAG_POOL", pool).finish(40);
  }
}

TEST(Transfers, AFlagPoolSmallerThanWhatIsInFlight) {
  Job job("manyInFlight", 2);
  job.env("HOCCL_FLAG_POOL", "64").finish(60);
}

TEST(Transfers, AFlagPoolAgainstTheStreamsOfAGroup) {
  // As many slots as the group has streams: one group at a time.
  Job fits("smallPool", 2);
  fits.argument("grouped", "1").env("HOCCL_FLAG_POOL", "2").finish();
  Job tooSmall("smallPool", 2);
  tooSmall.argument("grouped", "1").argument("tooSmall", "1").env("HOCCL_FLAG_POOL", "1").finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(tooSmall.said(rank, "result"), "5");  // ncclInvalidUsage
    const std::string error = tooSmall.said(rank, "error");
    EXPECT_NE(error.find("HOCCL_FLAG_POOL is 1"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace e2e
