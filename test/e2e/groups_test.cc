// Groups of steered operations and NCCL's.

#include <gtest/gtest.h>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

TEST(Groups, SteeredSmallAndAllReduce) {
  Job job("mixed", 2);
  job.finish();
  for (int rank : {0, 1}) {
    // NCCL has got what is its own, inside the group, and nothing else.
    for (const char* function : {"ncclSend", "ncclRecv"}) {
      EXPECT_EQ(job.callCount(rank, function), 2);
      EXPECT_EQ(job.callCount(rank, function, " bytes=1003 "), 2);
      EXPECT_EQ(job.callCount(rank, function, " depth=1 "), 2);
    }
    EXPECT_EQ(job.callCount(rank, "ncclAllReduce", " depth=1 "), 2);
    EXPECT_EQ(job.callCount(rank, "ncclGroupStart"), 2);
    EXPECT_EQ(job.callCount(rank, "ncclGroupEnd"), 2);
  }
}

TEST(Groups, StartsThenTheRealGroupEndThenWaits) {
  Job job("order", 2);
  job.finish();
}

TEST(Groups, StreamsOfAGroupStartAndEndTogether) {
  Job job("twoStreams", 2);
  job.finish();
}

TEST(Groups, AStreamOfAGroupHasWhatTheOtherDidAndReceived) {
  Job job("crossedStreams", 2);
  job.finish();
}

TEST(Groups, AnOwnBlockHasWhatTheOtherStreamDidAndIsThereForIt) {
  for (const char* how : {"engine", "kernel"}) {
    SCOPED_TRACE(how);
    Job job("ownBlockOnStreams", 2);
    job.env("HOCCL_OWN_BLOCK", how).finish();
    for (int rank : {0, 1}) {
      const auto stats = nlohmann::json::parse(job.said(rank, "stats"));
      EXPECT_EQ(stats["ownBlocksByKernel"], std::string(how) == "kernel" ? 1 : 0);
    }
  }
}

TEST(Groups, TwoCommunicators) {
  Job job("twoCommunicators", 2);
  job.finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.callCount(rank, "ncclSend", " bytes=1003 "), 3);
    EXPECT_EQ(job.callCount(rank, "ncclSend"), 3);
  }
}

TEST(Groups, NestedAndEmpty) {
  Job job("nested", 2);
  job.finish();
  for (int rank : {0, 1}) {
    // Every one of them reaches NCCL, in the same order.
    EXPECT_EQ(job.callCount(rank, "ncclGroupStart"), 8);
    EXPECT_EQ(job.callCount(rank, "ncclGroupEnd"), 9);
    EXPECT_EQ(job.callCount(rank, "ncclRecv", " depth=3 "), 1);
    EXPECT_EQ(job.callCount(rank, "ncclSend", " depth=2 "), 1);
  }
}

TEST(Groups, MoreOperationsAndStreamsThanUsual) {
  Job job("large", 2);
  job.finish(60);
}

TEST(Groups, AFailedCallFailsItsGroup) {
  Job job("failedCall", 2);
  job.finish();
}

TEST(Groups, ACallThatHocclRefusesFailsWhatNcclHasOfTheGroup) {
  Job job("refusedInGroup", 2);
  job.finish();
}

TEST(Groups, OfASimulatedOneNothingHappens) {
  for (const bool appCopies : {false, true}) {
    Job job("simulated", 2);
    if (appCopies) job.env("HOCCL_APP_COPIES", "always");
    job.finish();
    for (int rank : {0, 1}) EXPECT_EQ(job.errors(rank), "");
  }
}

}  // namespace
}  // namespace e2e
