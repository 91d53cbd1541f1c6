// Rule 8: no allocation goes while a mover has it mapped.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

constexpr const char* kWarning = "is freed while the mover";

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Mappings and descriptors of a process: what it holds on to.
struct Holdings {
  explicit Holdings(pid_t pid) {
    const std::string proc = "/proc/" + std::to_string(pid);
    std::ifstream maps(proc + "/maps");
    for (std::string line; std::getline(maps, line);) ++mappings;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(proc + "/fd", ignored)) {
      (void)entry;
      ++descriptors;
    }
  }
  int mappings = 0;
  int descriptors = 0;
};

TEST(Rule8, TenThousandRoundsOfAllocateOperateFree) {
  Job job("freesRounds", 2);
  job.argument("rounds", "10000").env("EMUCUDA_DILATION", "1").start();
  // Some imports may be on their way in or out at either look.
  constexpr int kSlack = 40;
  ASSERT_TRUE(job.awaitAll("early", 60)) << job.transcript();
  const Holdings early[] = {Holdings(job.moverOf(0)), Holdings(job.moverOf(1))};
  job.post("early-seen");
  ASSERT_TRUE(job.awaitAll("late", 100)) << job.transcript();
  for (int rank : {0, 1}) {
    const Holdings late(job.moverOf(rank));
    EXPECT_LT(late.mappings, early[rank].mappings + kSlack) << "rank " << rank;
    EXPECT_LT(late.descriptors, early[rank].descriptors + kSlack) << "rank " << rank;
  }
  job.post("late-seen");
  job.finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.said(rank, "freedWhileMapped"), "0");
    EXPECT_LT(std::stoi(job.said(rank, "places")), 100) << "addresses never came back";
    EXPECT_FALSE(contains(job.errors(rank), kWarning)) << job.errors(rank);
  }
}

TEST(Rule8, AFreeDoesNotWaitForOperationsOnOtherMemory) {
  Job job("freesPending", 2);
  job.argument("what", "other").env("HOCCL_TIMEOUT_MS", "500").finish();
  EXPECT_EQ(job.said(0, "freedWhileMapped"), "0");
  EXPECT_FALSE(contains(job.errors(0), kWarning)) << job.errors(0);
}

TEST(Rule8, AFreeWaitsForAReceiveWhoseSenderComesLate) {
  Job job("freesPending", 2);
  job.env("HOCCL_TIMEOUT_MS", "10000").finish();
  EXPECT_EQ(job.said(0, "freedWhileMapped"), "0");
  EXPECT_FALSE(contains(job.errors(0), kWarning)) << job.errors(0);
}

TEST(Rule8, AFreeWhoseSenderNeverComesIsBoundedAndSaysWhatWasPending) {
  Job job("freesPending", 2);
  job.argument("never", "1").env("HOCCL_TIMEOUT_MS", "500").finish();
  const std::string errors = job.errors(0);
  EXPECT_TRUE(contains(errors, kWarning)) << errors;
  EXPECT_TRUE(contains(errors, "1 operation, the first a receive of 65536 bytes from rank 1"))
      << errors;
  EXPECT_TRUE(contains(errors, "the peer has sent nothing")) << errors;
}

TEST(Rule8, FreesThatNobodySeesAreWhatTheBackstopsAreFor) {
  Job nothing("freesUnseen", 2);
  nothing.finish();
  // Both buffers of both ranks: the emulated driver counts what the rest of these tests rules out.
  EXPECT_EQ(nothing.said(0, "freedWhileMapped"), "4");
}

TEST(Rule8, AFailedAllocationMakesTheMoverLetGo) {
  Job job("freesUnseen", 2);
  job.argument("before", "outOfMemory").finish();
  for (int rank : {0, 1}) EXPECT_EQ(job.said(rank, "freedWhileMapped"), "0");
}

TEST(Rule8, IdleMemoryIsLetGoOf) {
  Job job("freesUnseen", 2);
  job.argument("before", "idle").env("HOCCL_IMPORT_IDLE_MS", "100").finish();
  for (int rank : {0, 1}) EXPECT_EQ(job.said(rank, "freedWhileMapped"), "0");
}

TEST(Rule8, AForkedChildsFreeTakesNothingFromItsParent) {
  Job job("freesForkedChild", 2);
  job.finish();
  for (int rank : {0, 1}) EXPECT_EQ(job.said(rank, "freedWhileMapped"), "0");
}

TEST(Frees, WithoutACommunicatorEverythingIsPassedOn) {
  Job job("freesWithoutCommunicator", 1);
  job.finish();
}

}  // namespace
}  // namespace e2e
