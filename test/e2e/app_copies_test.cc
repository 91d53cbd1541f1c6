// Application-side copies: buffers the mover cannot map, and processes that let it map none.

#include <gtest/gtest.h>

#include <string>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

/// Operations of a rank's communicators on that path.
int operations(const Job& job, int rank, const char* path) {
  int sum = 0;
  for (const auto& comm : job.communicators(rank)) sum += comm["paths"][path]["ops"].get<int>();
  return sum;
}

void expectOnlyAppCopies(const Job& job, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_GT(operations(job, rank, "app-copies"), 0);
    EXPECT_EQ(operations(job, rank, "staged"), 0);
  }
}

class AppCopiesOf : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Scenarios, AppCopiesOf,
                         ::testing::Values("sizes", "bothWays", "ring", "streams", "late",
                                           "independent", "twoStreams", "crossedStreams",
                                           "twoCommunicators", "nested"));

/// Scenarios that check every byte, with buffers none of which a mover may map.
TEST_P(AppCopiesOf, AllBuffers) {
  const int ranks = std::string(GetParam()) == "ring" ? 3 : 2;
  Job job(GetParam(), ranks);
  job.env("HOCCL_APP_COPIES", "always").finish(60);
  expectOnlyAppCopies(job, ranks);
}

class AppCopiesOfMemory : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Kinds, AppCopiesOfMemory,
                         ::testing::Values("managed", "pool", "unexportable"));

TEST_P(AppCopiesOfMemory, SendsAndReceives) {
  Job job("bothWays", 2);
  job.env("E2E_MEMORY", GetParam()).finish(60);
  expectOnlyAppCopies(job, 2);
  for (int rank : {0, 1}) EXPECT_EQ(job.said(rank, "smOps"), "0");
}

TEST_P(AppCopiesOfMemory, Collectives) {
  Job job("collectives", 3);
  job.env("E2E_MEMORY", GetParam())
      .argument("steered", "70001")
      .argument("small", "1003")
      .finish(60);
  for (int rank : {0, 1, 2}) {
    EXPECT_EQ(std::to_string(operations(job, rank, "app-copies")), job.said(rank, "steered"));
    EXPECT_EQ(operations(job, rank, "staged"), 0);
    EXPECT_EQ(job.said(rank, "smOps"), "0");
  }
}

TEST_P(AppCopiesOfMemory, OneSideCanBeMappedTheOtherCannot) {
  for (int rank : {0, 1}) {
    Job job("bothWays", 2);
    job.env(rank, "E2E_MEMORY", GetParam()).finish(60);
    EXPECT_GT(operations(job, rank, "app-copies"), 0);
    EXPECT_EQ(operations(job, rank, "staged"), 0);
    EXPECT_GT(operations(job, 1 - rank, "staged"), 0);
    EXPECT_EQ(operations(job, 1 - rank, "app-copies"), 0);
  }
}

TEST_P(AppCopiesOfMemory, IsAnErrorWhenForbidden) {
  Job job("sizes", 2);
  job.env("E2E_MEMORY", GetParam()).env("HOCCL_APP_COPIES", "never");
  job.expectDeath(0);
  job.expectDeath(1);
  job.finish(60);
  EXPECT_NE((job.errors(0) + job.errors(1)).find("HOCCL_APP_COPIES=never"), std::string::npos)
      << job.transcript();
}

TEST(AppCopies, HostMemory) {
  Job job("hostMemory", 2);
  job.finish(60);
  expectOnlyAppCopies(job, 2);
  for (int rank : {0, 1}) EXPECT_EQ(job.said(rank, "smOps"), "0");
}

TEST(AppCopies, MemoryUnknownToCudaIsRefused) {
  Job job("unknownMemory", 2);
  job.finish(60);
  for (int rank : {0, 1}) {
    EXPECT_NE(job.said(rank, "error").find("memory CUDA does not know"), std::string::npos);
  }
}

TEST(AppCopies, WaitForRoomWhereTheyMayTakeLittle) {
  for (const char* scenario : {"streams", "bothWays"}) {
    Job job(scenario, 2);
    job.env("HOCCL_APP_COPIES", "always").env("HOCCL_APP_COPY_BYTES", "1MiB").finish(60);
    expectOnlyAppCopies(job, 2);
  }
}

TEST(AppCopies, RandomDelaysOfTheDriverChangeNothing) {
  for (const char* seed : {"1", "7"}) {
    Job job("bothWays", 2);
    job.env("HOCCL_APP_COPIES", "always").env("EMUCUDA_DELAY_US", "300").env("EMUCUDA_SEED", seed);
    job.finish(60);
  }
}

TEST(AppCopies, OfAProcessWhoseFreesCannotBeSeen) {
  Job job("sizes", 2);
  job.env("HOCCL_APP_COPIES", "auto").finish(60);
  expectOnlyAppCopies(job, 2);
  EXPECT_NE(job.errors(0).find("frees of device memory are not seen"), std::string::npos)
      << job.errors(0);
}

}  // namespace
}  // namespace e2e
