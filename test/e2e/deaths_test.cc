// Processes that die, stop or leave.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

class MoverDeath : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfRank, MoverDeath, ::testing::Values(0, 1));

TEST_P(MoverDeath, ReleasesStreamsAndIsReported) {
  Job job("moverDies", 2);
  job.start();
  ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
  const pid_t mover = job.moverOf(GetParam());
  ASSERT_GT(mover, 0);
  ASSERT_EQ(::kill(mover, SIGKILL), 0);
  job.post("killed");
  job.finish();
  // Who lost its own mover says so, the other names the rank whose mover it was.
  const std::string own = job.said(GetParam(), "error"), other = job.said(1 - GetParam(), "error");
  EXPECT_NE(own.find("killed by signal 9"), std::string::npos) << own;
  EXPECT_NE(own.find(std::to_string(mover)), std::string::npos) << own;
  EXPECT_NE(other.find("rank " + std::to_string(GetParam())), std::string::npos) << other;
}

TEST(Deaths, AnApplicationKilledMidTransfer) {
  Job job("applicationDies", 2);
  job.env("EMUCUDA_DILATION", "100");
  job.start();
  ASSERT_TRUE(job.awaitAll("moving")) << job.transcript();
  const pid_t mover = job.moverOf(0), application = job.pid(0);
  ASSERT_GT(mover, 0);
  job.expectDeath(0);
  ::usleep(30'000);
  ASSERT_EQ(::kill(application, SIGKILL), 0);
  EXPECT_TRUE(job.awaitGone(mover, 5)) << "its mover lives on";
  job.finish();
  const std::string error = job.said(1, "error");
  EXPECT_NE(error.find("rank 0"), std::string::npos) << error;
  EXPECT_NE(error.find(std::to_string(application)), std::string::npos) << error;
}

class MoverStop : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfRank, MoverStop, ::testing::Values(0, 1));

TEST_P(MoverStop, IsWaitedFor) {
  Job job("moverStops", 2);
  job.start();
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

/// Rule 11: an idle mover uses no CPU, one with an operation pending little.
TEST(Movers, UseNoCpuWithoutWork) {
  for (const bool pending : {false, true}) {
    SCOPED_TRACE(pending ? "a receive pending" : "idle");
    Job job("idle", 2);
    job.argument("pending", pending ? "1" : "0").start();
    ASSERT_TRUE(job.awaitAll("idle")) << job.transcript();
    const pid_t mover = job.moverOf(1);
    ASSERT_GT(mover, 0);
    ::usleep(200'000);
    const long before = Job::cpuMs(mover);
    ::usleep(1'000'000);
    const long used = Job::cpuMs(mover) - before;
    EXPECT_LE(used, pending ? 300 : 20) << "ms of CPU in a second";
    job.post("measured");
    job.finish();
  }
}

TEST(Deaths, ASenderThatLeavesEarlyHasDelivered) {
  Job job("senderLeaves", 2);
  job.start();
  EXPECT_TRUE(job.awaitEnd(0, 20)) << "the sender waits for a receive it need not wait for";
  ::usleep(300'000);  // its mover goes, too
  job.post("sender gone");
  job.finish();
  const std::string error = job.said(1, "error");
  EXPECT_NE(error.find("rank 0"), std::string::npos) << error;
}

TEST(Deaths, APeerThatExitsIsNamed) {
  Job job("peerExits", 2);
  job.finish();
  const std::string error = job.said(1, "error");
  EXPECT_NE(error.find("rank 0"), std::string::npos) << error;
}

TEST_P(MoverStop, IsEndedByAnAbort) {
  Job job("abortWhileStopped", 2);
  job.env("HOCCL_TIMEOUT_MS", "1000").start();
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

TEST(Deaths, AForkedChildDoesNotKeepTheMover) {
  Job job("forks", 2);
  job.start();
  ASSERT_TRUE(job.awaitAll("forked")) << job.transcript();
  const pid_t movers[] = {job.moverOf(0), job.moverOf(1)};
  job.post("go");
  for (const pid_t mover : movers) {
    ASSERT_GT(mover, 0);
    EXPECT_TRUE(job.awaitGone(mover, 5)) << "a mover lives on with its application's child";
  }
  job.post("movers gone");
  job.finish();
}

TEST(Deaths, ExitWithAPendingReceiveLeavesNothing) {
  Job job("leavesPending", 2);
  job.finish();
}

TEST(Deaths, ApplicationsKilledTogetherLeaveNothing) {
  Job job("moverDies", 2);
  job.start();
  ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
  for (int rank : {0, 1}) {
    job.expectDeath(rank);
    ::kill(job.pid(rank), SIGKILL);
  }
  job.finish();
}

TEST(Deaths, AnApplicationKilledWhileItsMoverIsStopped) {
  Job job("moverDies", 2);
  job.start();
  ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
  const pid_t mover = job.moverOf(0);
  ASSERT_GT(mover, 0);
  for (int rank : {0, 1}) job.expectDeath(rank);
  ASSERT_EQ(::kill(mover, SIGSTOP), 0);
  for (int rank : {0, 1}) ::kill(job.pid(rank), SIGKILL);
  ::usleep(200'000);
  ::kill(mover, SIGCONT);
  job.finish();
}

}  // namespace
}  // namespace e2e
