#pragma once

// Which way the operations of a job's ranks went, as HOCCL counts them.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "test/e2e/harness.h"

namespace e2e {

/// Of all communicators of that rank; `what` is "ops" or "bytes".
inline std::uint64_t total(const Job& job, int rank, const std::string& path, const char* what) {
  std::uint64_t sum = 0;
  for (const auto& comm : job.communicators(rank)) {
    sum += comm["paths"][path][what].get<std::uint64_t>();
  }
  return sum;
}

/// All of it on that path, and NCCL has seen no send and no receive.
inline void expectAll(const Job& job, int rank, const std::string& path, std::uint64_t ops) {
  for (const char* each : {"direct", "staged", "app-copies", "nccl"}) {
    EXPECT_EQ(total(job, rank, each, "ops"), each == path ? ops : 0u)
        << each << " of rank " << rank << ": " << job.communicators(rank);
    if (each != path) {
      EXPECT_EQ(total(job, rank, each, "bytes"), 0u) << each;
    }
  }
  EXPECT_EQ(job.callCount(rank, "ncclSend") + job.callCount(rank, "ncclRecv"), 0);
}

}  // namespace e2e
