// Making and ending communicators.

#include <gtest/gtest.h>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

/// All communicators of the rank were steered and NCCL saw no send.
void expectSteered(const Job& job, int rank, std::size_t communicators) {
  const nlohmann::json comms = job.communicators(rank);
  EXPECT_EQ(comms.size(), communicators) << comms;
  for (const auto& comm : comms) EXPECT_TRUE(comm["steered"]) << comm;
  EXPECT_EQ(job.callCount(rank, "ncclSend"), 0);
}

TEST(Communicators, Blocking) {
  Job job("blocking", 2);
  job.finish();
  for (int rank : {0, 1}) expectSteered(job, rank, 1);
}

TEST(Communicators, NonBlocking) {
  Job job("nonBlocking", 2);
  job.finish();
  for (int rank : {0, 1}) expectSteered(job, rank, 3);
}

TEST(Communicators, Split) {
  Job job("split", 4);
  job.finish(60);
  for (int rank = 0; rank < 4; ++rank) expectSteered(job, rank, rank == 3 ? 3 : 4);
}

TEST(Communicators, CreatedInAGroup) {
  Job job("createdInGroup", 2);
  job.finish();
  for (int rank : {0, 1}) expectSteered(job, rank, 3);
}

TEST(Communicators, SeveralAlive) {
  Job job("several", 2);
  job.finish();
  for (int rank : {0, 1}) expectSteered(job, rank, 6);
}

TEST(Communicators, OfOneRank) {
  Job job("alone", 1);
  job.finish();
  for (const auto& comm : job.communicators(0)) EXPECT_FALSE(comm["steered"]) << comm;
  EXPECT_EQ(job.callCount(0, "ncclSend", " bytes=200003 "), 2);
}

TEST(Communicators, AbortEndsAReceiveWithoutASender) {
  Job job("abortPending", 2);
  job.finish();
  for (int rank : {0, 1}) expectSteered(job, rank, 3);
}

TEST(Communicators, AbortByAnotherThread) {
  Job job("abortPending", 2);
  job.argument("by", "thread").finish();
}

TEST(Communicators, AbortEndsASendWithoutAReceiver) {
  Job job("abortSend", 2);
  job.finish();
  EXPECT_NE(job.said(1, "error").find("rank 0"), std::string::npos) << job.transcript();
}

}  // namespace
}  // namespace e2e
