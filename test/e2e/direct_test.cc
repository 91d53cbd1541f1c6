// Ranks of one node with a GPU each: direct copies from buffer to buffer.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <string>

#include "test/e2e/harness.h"
#include "test/e2e/paths.h"

namespace e2e {
namespace {

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

// The last 256 that have ended are kept one by one, those before them as a sum by path.
TEST(Direct, IsCountedOfCommunicatorsThatEndedLongAgo) {
  Job job("manyEnded", 2);
  job.oneNode().finish(60);
  for (int rank : {0, 1}) {
    const auto forgotten = nlohmann::json::parse(job.said(rank, "stats"))["forgotten"];
    EXPECT_EQ(forgotten["communicators"], 1) << forgotten;
    EXPECT_EQ(forgotten["paths"]["direct"]["ops"], 2) << forgotten;
    EXPECT_EQ(forgotten["paths"]["direct"]["bytes"], 2 * 200003) << forgotten;
    EXPECT_EQ(forgotten["paths"]["staged"]["ops"], 0) << forgotten;
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

class DirectCollectivesOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DirectCollectivesOf, ::testing::Values(2, 3));

TEST_P(DirectCollectivesOf, AllRootsInAndOutOfPlaceAtOddSizesWithoutAnySm) {
  Job job("collectives", GetParam());
  job.oneNode().argument("small", "1003").finish(60);
  for (int rank = 0; rank < GetParam(); ++rank) {
    EXPECT_EQ(total(job, rank, "nccl", "ops"), std::stoul(job.said(rank, "small")));
    EXPECT_EQ(job.said(rank, "smOps"), "0");
  }
}

/// A copy within a GPU would be a kernel: the own block goes to the neighbour's memory and back.
TEST_P(DirectCollectivesOf, CopyNothingToTheHost) {
  Job job("collectivesCopies", GetParam());
  job.oneNode().finish(60);
  const int n = GetParam();
  const auto copies = [](int count) { return "0 0 " + std::to_string(count); };
  for (int rank = 0; rank < n; ++rank) {
    const bool root = rank == 1;
    EXPECT_EQ(job.said(rank, "AllGather"), copies(n - 1 + 2));
    EXPECT_EQ(job.said(rank, "AlltoAll"), copies(n - 1 + 2));
    EXPECT_EQ(job.said(rank, "Gather"), copies(root ? 2 : 1));
    EXPECT_EQ(job.said(rank, "Scatter"), copies(root ? n - 1 + 2 : 0));
    EXPECT_EQ(job.said(rank, "Broadcast"), copies(root ? n - 1 + 2 : 0));
    EXPECT_EQ(job.said(rank, "Bcast"), copies(root ? n - 1 : 0));
  }
}

TEST_P(DirectCollectivesOf, OneSlotAndRandomDelays) {
  Job job("collectives", GetParam());
  job.oneNode()
      .env("HOCCL_SLOTS", "1")
      .env("HOCCL_SLOT_BYTES", "128KiB")
      .env("HOCCL_LANE_DEPTH", "1");
  job.env("EMUCUDA_DELAY_US", "200").env("EMUCUDA_SEED", "3").argument("small", "1003").finish(60);
  for (int rank = 0; rank < GetParam(); ++rank) EXPECT_EQ(job.said(rank, "smOps"), "0");
}

TEST(Direct, TheOwnBlockGoesThroughTheHostWhereTheNeighbourHasNoRoom) {
  Job job("collectivesCopies", 2);
  job.oneNode().env("EMUCUDA_MEM_GIB", "1").env("HOCCL_SLOT_BYTES", "512MiB").finish(60);
  for (int rank : {0, 1}) EXPECT_EQ(job.said(rank, "AllGather"), "1 1 1");
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

/// The ring goes 0 → 1 → 2 → 0; GPUs 0 and 1 do not reach each other.
TEST(Direct, AMixedNodeIsDirectWhereItCanBe) {
  Job job("ring", 3);
  job.oneNode().env("EMUCUDA_P2P_REFUSE", "0-1").finish();
  const std::uint64_t direct[] = {6, 6, 12};
  for (int rank : {0, 1, 2}) {
    EXPECT_EQ(total(job, rank, "direct", "ops"), direct[rank]) << job.communicators(rank);
    EXPECT_EQ(total(job, rank, "staged", "ops"), 12 - direct[rank]) << job.communicators(rank);
  }
}

/// An import that fails on one side only, of one allocation and not of another.
TEST(Direct, WhatThePeerCannotMapIsStaged) {
  for (const char* succeed : {"2", "3", "5"}) {
    SCOPED_TRACE(succeed);
    Job job("refusedImports", 2);
    job.oneNode().env(0, "EMUCUDA_REFUSE_IPC_OPEN", succeed);
    job.env(0, "EMUCUDA_REFUSE_IPC_IN", "hoccl-mover").finish();
    const std::uint64_t direct = total(job, 0, "direct", "ops");
    EXPECT_EQ(direct, total(job, 1, "direct", "ops"));
    EXPECT_EQ(direct + total(job, 0, "staged", "ops"), 8u) << job.communicators(0);
    EXPECT_GT(total(job, 0, "staged", "ops"), 0u) << job.communicators(0);
  }
}

// --- Frees (rule 8): the sender's mover maps the receiver's memory as well
// -------------------------

constexpr const char* kWarning = "is freed while the mover";

TEST(DirectFrees, ThousandsOfRoundsOfAllocateOperateFree) {
  Job job("freesRounds", 2);
  job.oneNode().argument("rounds", "2000").env("EMUCUDA_DILATION", "1").start();
  ASSERT_TRUE(job.awaitAll("early", 60)) << job.transcript();
  job.post("early-seen");
  ASSERT_TRUE(job.awaitAll("late", 100)) << job.transcript();
  job.post("late-seen");
  job.finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.said(rank, "freedWhileMapped"), "0");
    EXPECT_LT(std::stoi(job.said(rank, "places")), 100) << "addresses never came back";
    EXPECT_EQ(job.errors(rank).find(kWarning), std::string::npos) << job.errors(rank);
    EXPECT_EQ(total(job, rank, "direct", "ops"), 2000u);
  }
}

TEST(DirectFrees, AFreeDoesNotWaitForOperationsOnOtherMemory) {
  Job job("freesPending", 2);
  job.oneNode().argument("what", "other").env("HOCCL_TIMEOUT_MS", "500").finish();
  EXPECT_EQ(job.said(0, "freedWhileMapped"), "0");
  EXPECT_EQ(job.errors(0).find(kWarning), std::string::npos) << job.errors(0);
}

TEST(DirectFrees, AFreeWaitsForAReceiveWhoseSenderComesLate) {
  Job job("freesPending", 2);
  job.oneNode().env("HOCCL_TIMEOUT_MS", "10000").finish();
  EXPECT_EQ(job.said(0, "freedWhileMapped"), "0");
  EXPECT_EQ(job.errors(0).find(kWarning), std::string::npos) << job.errors(0);
}

TEST(DirectFrees, FailedAllocationsAndIdleTimeMakeThePeerLetGo) {
  Job failed("freesUnseen", 2);
  failed.oneNode().argument("before", "outOfMemory").finish();
  Job idle("freesUnseen", 2);
  idle.oneNode().argument("before", "idle").env("HOCCL_IMPORT_IDLE_MS", "100").finish();
  for (const Job* job : {&failed, &idle}) {
    for (int rank : {0, 1}) EXPECT_EQ(job->said(rank, "freedWhileMapped"), "0");
  }
}

/// A stopped peer does not answer: the free is bounded, and says so.
TEST(DirectFrees, APeerThatDoesNotLetGoIsNamed) {
  Job job("directPeerStops", 2);
  job.oneNode().env("HOCCL_TIMEOUT_MS", "700").start();
  ASSERT_TRUE(job.awaitAll("moved")) << job.transcript();
  const pid_t mover = job.moverOf(0);
  ASSERT_GT(mover, 0);
  ASSERT_EQ(::kill(mover, SIGSTOP), 0);
  job.post("stopped");
  const bool freed = job.await("freed");
  ::kill(mover, SIGCONT);
  EXPECT_TRUE(freed) << job.transcript();
  job.post("going on");
  job.finish();
  const std::string errors = job.errors(1);
  EXPECT_NE(errors.find(kWarning), std::string::npos) << errors;
  EXPECT_NE(errors.find("the mover of another GPU of the node"), std::string::npos) << errors;
}

// --- Deaths and aborts (rule 9) ------------------------------------------------------------------

class DirectOfRank : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfRank, DirectOfRank, ::testing::Values(0, 1));

TEST_P(DirectOfRank, AMoverThatDiesReleasesStreamsAndIsReported) {
  Job job("moverDies", 2);
  job.oneNode().start();
  ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
  const pid_t mover = job.moverOf(GetParam());
  ASSERT_GT(mover, 0);
  ASSERT_EQ(::kill(mover, SIGKILL), 0);
  job.post("killed");
  job.finish();
  const std::string own = job.said(GetParam(), "error"), other = job.said(1 - GetParam(), "error");
  EXPECT_NE(own.find("killed by signal 9"), std::string::npos) << own;
  EXPECT_NE(other.find("rank " + std::to_string(GetParam())), std::string::npos) << other;
}

/// In the middle of a direct copy, which takes a hundred times as long as it would.
TEST_P(DirectOfRank, AnApplicationKilledMidCopy) {
  Job job("directPeerDies", 2);
  job.oneNode().env("EMUCUDA_DILATION", "2000").argument("dies", std::to_string(GetParam()));
  job.start();
  ASSERT_TRUE(job.awaitAll("moving")) << job.transcript();
  const pid_t mover = job.moverOf(GetParam()), application = job.pid(GetParam());
  ASSERT_GT(mover, 0);
  job.expectDeath(GetParam());
  ::usleep(30'000);
  ASSERT_EQ(::kill(application, SIGKILL), 0);
  EXPECT_TRUE(job.awaitGone(mover, 5)) << "its mover lives on";
  job.finish();
  const std::string error = job.said(1 - GetParam(), "error");
  EXPECT_NE(error.find("rank " + std::to_string(GetParam())), std::string::npos) << error;
}

TEST_P(DirectOfRank, AStoppedMoverIsWaitedFor) {
  Job job("moverStops", 2);
  job.oneNode().start();
  ASSERT_TRUE(job.awaitAll("ready")) << job.transcript();
  const pid_t mover = job.moverOf(GetParam());
  ASSERT_GT(mover, 0);
  ASSERT_EQ(::kill(mover, SIGSTOP), 0);
  job.post("stopped");
  const bool waited = job.awaitAll("waits");
  ::kill(mover, SIGCONT);
  EXPECT_TRUE(waited) << job.transcript();
  job.finish();
}

TEST_P(DirectOfRank, AnAbortEndsThoughAMoverIsStopped) {
  Job job("abortWhileStopped", 2);
  job.oneNode().env("HOCCL_TIMEOUT_MS", "1000").start();
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

/// The receiver aborts in the middle of a copy: its stream goes on only when the copy has ended, so
/// that what it writes then stays.
TEST(DirectAborts, OfTheReceiverWaitForTheCopyIntoItsMemory) {
  Job job("directAbortMidCopy", 2);
  job.oneNode().env("EMUCUDA_DILATION", "300").finish();
}

class DirectAbortStorm : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, DirectAbortStorm, ::testing::Values(1, 2));

TEST_P(DirectAbortStorm, AtRandomMomentsFromAnotherThreadEndsInTime) {
  Job job("abortStorm", 2);
  job.oneNode().argument("seed", std::to_string(GetParam()));
  job.argument("rounds", GetParam() == 1 ? "200" : "60");
  if (GetParam() != 1) job.env("EMUCUDA_DELAY_US", "300").env("EMUCUDA_SEED", "5");
  job.finish(60);
  for (int rank : {0, 1}) {
    ASSERT_FALSE(job.said(rank, "slowestAbortMs").empty());
    EXPECT_LT(std::stoi(job.said(rank, "slowestAbortMs")), 5000);
  }
}

}  // namespace
}  // namespace e2e
