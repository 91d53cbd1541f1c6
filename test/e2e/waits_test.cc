// How streams wait (rule 6): with few hardware channels, and by each of HOCCL_WAIT's kinds.

#include <gtest/gtest.h>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

/// How the ranks' streams waited.
std::uint64_t waits(const Job& job, int rank, const char* kind) {
  return nlohmann::json::parse(job.said(rank, "stats"))["waits"][kind].get<std::uint64_t>();
}

std::uint64_t doorbells(const Job& job, int rank) {
  return nlohmann::json::parse(job.said(rank, "stats"))["doorbells"].get<std::uint64_t>();
}

TEST(Waits, OneStreamWaitsByMemoryOperation) {
  Job job("bothWays", 2);
  job.finish();
  for (int rank : {0, 1}) {
    EXPECT_GT(waits(job, rank, "memop"), 0u);
    EXPECT_EQ(waits(job, rank, "kernel"), 0u);
    EXPECT_GT(doorbells(job, rank), 0u);
  }
}

TEST(Waits, NoDoorbellOnRequest) {
  Job job("bothWays", 2);
  job.env("HOCCL_DOORBELL", "0").finish();
  for (int rank : {0, 1}) {
    EXPECT_GT(waits(job, rank, "memop"), 0u);
    EXPECT_EQ(doorbells(job, rank), 0u);
  }
}

TEST(Waits, WithOneConnectionByKernel) {
  Job job("bothWays", 2);
  job.env("CUDA_DEVICE_MAX_CONNECTIONS", "1").finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(waits(job, rank, "memop"), 0u);
    EXPECT_GT(waits(job, rank, "kernel"), 0u);
    EXPECT_EQ(doorbells(job, rank), 0u) << "for kernels, which look by themselves";
  }
}

TEST(Waits, EachKindOnRequest) {
  for (const char* kind : {"memop", "kernel", "parked"}) {
    Job job("bothWays", 2);
    job.env("HOCCL_WAIT", kind).finish();
    for (int rank : {0, 1}) {
      for (const char* other : {"memop", "kernel", "parked"}) {
        EXPECT_EQ(waits(job, rank, other) > 0, std::string(other) == kind) << kind << " " << other;
      }
      EXPECT_EQ(doorbells(job, rank) > 0, std::string(kind) == "memop") << kind;
    }
  }
}

}  // namespace
}  // namespace e2e
