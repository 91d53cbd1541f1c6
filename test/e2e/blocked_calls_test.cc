// Aborts that meet calls waiting for room.

#include <gtest/gtest.h>
#include <signal.h>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

TEST(BlockedCalls, AnAbortEndsACallThatWaitsForTheRingOfAStoppedMover) {
  Job job("ringFull", 2);
  job.env("HOCCL_TIMEOUT_MS", "1000").start();
  ASSERT_TRUE(job.awaitAll("ready")) << job.transcript();
  const pid_t mover = job.moverOf(0);
  ASSERT_GT(mover, 0);
  ASSERT_EQ(::kill(mover, SIGSTOP), 0);
  job.post("stopped");
  job.finish(40);
}

TEST(BlockedCalls, OneOfAnAbortedCommunicatorDoesNotReachTheNext) {
  Job job("poolReused", 2);
  job.env("HOCCL_FLAG_POOL", "2").finish(40);
}

}  // namespace
}  // namespace e2e
