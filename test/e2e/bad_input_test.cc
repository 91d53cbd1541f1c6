// Configurations and installations that do not fit: the job runs on plain NCCL, says why, and
// nothing hangs.

#include <gtest/gtest.h>

#include <sstream>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

/// The job has run by NCCL alone, on both ranks; if `parts` are given, a line of some rank contains
/// all of them.
void expectPlain(Job& job, const std::vector<std::string>& parts, int seconds = 20) {
  job.finish(seconds);
  for (int rank : {0, 1}) {
    EXPECT_EQ(job.callCount(rank, "ncclSend", " bytes=300001 "), 1) << "rank " << rank;
    EXPECT_EQ(job.callCount(rank, "ncclRecv", " bytes=300001 "), 1) << "rank " << rank;
    for (const auto& comm : job.communicators(rank)) {
      EXPECT_FALSE(comm["steered"]) << comm;
      EXPECT_NE(comm["why"], "") << comm;
    }
  }
  bool found = parts.empty();
  for (int rank : {0, 1}) {
    std::istringstream lines(job.errors(rank));
    for (std::string line; std::getline(lines, line);) {
      bool all = true;
      for (const std::string& part : parts) all = all && line.find(part) != std::string::npos;
      found = found || all;
    }
  }
  std::string wanted;
  for (const std::string& part : parts) wanted += "'" + part + "' ";
  EXPECT_TRUE(found) << "no line with " << wanted << "\n" << job.transcript();
}

class BadInput : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfRank, BadInput, ::testing::Values(0, 1));

TEST_P(BadInput, UnknownVariable) {
  Job job("plain", 2);
  job.env(GetParam(), "HOCCL_MIN_BITES", "1MiB");
  expectPlain(job, {"HOCCL_MIN_BITES", "HOCCL_MIN_BYTES"});
}

TEST_P(BadInput, ValueOutOfRange) {
  Job job("plain", 2);
  job.env(GetParam(), "HOCCL_MIN_BYTES", "1KiB");
  expectPlain(job, {"HOCCL_MIN_BYTES", "1KiB", "64KiB"});
}

TEST_P(BadInput, DifferingPolicies) {
  Job job("plain", 2);
  job.env(GetParam(), "HOCCL_MIN_BYTES", "256KiB");
  expectPlain(job, {"HOCCL_MIN_BYTES=65536", "HOCCL_MIN_BYTES=262144"});
}

TEST_P(BadInput, SwitchedOffOnOneRank) {
  Job job("plain", 2);
  job.env(GetParam(), "HOCCL_STEER", "0");
  expectPlain(job, {});
}

TEST_P(BadInput, MissingMover) {
  Job job("plain", 2);
  job.env(GetParam(), "HOCCL_MOVER_PATH", "/nonexistent");
  expectPlain(job, {"HOCCL_MOVER_PATH=/nonexistent", "No such file"});
}

TEST_P(BadInput, MoverThatCannotBeExecuted) {
  Job job("plain", 2);
  job.env(GetParam(), "HOCCL_MOVER_PATH", job.script("mover", "not a program\n"));
  expectPlain(job, {"mover"});
}

TEST_P(BadInput, MoverThatExits) {
  Job job("plain", 2);
  job.env(GetParam(), "HOCCL_MOVER_PATH", job.script("mover", "#!/bin/sh\nexit 3\n"));
  expectPlain(job, {"mover", "did not come up"});
}

TEST_P(BadInput, MoverThatAnswersGarbage) {
  Job job("plain", 2);
  job.env("HOCCL_TIMEOUT_MS", "1000");
  job.env(GetParam(), "HOCCL_MOVER_PATH",
          job.script("mover", "#!/bin/sh\necho 'what do you want' >&3\nexec sleep 60\n"));
  expectPlain(job, {"mover", "different builds"});
}

TEST_P(BadInput, MoverThatNeverAnswers) {
  Job job("plain", 2);
  job.env("HOCCL_TIMEOUT_MS", "1000");
  job.env(GetParam(), "HOCCL_MOVER_PATH", job.script("mover", "#!/bin/sh\nexec sleep 60\n"));
  expectPlain(job, {"mover", "did not come up", "timed out"});
}

TEST_P(BadInput, MissingCore) {
  Job job("plain", 2);
  job.env("HOCCL_AGREE_TIMEOUT_MS", "1500");
  job.env(GetParam(), "HOCCL_CORE_LIB", "/nonexistent/libhoccl.so");
  expectPlain(job, {"cannot load the core", "/nonexistent/libhoccl.so"});
}

TEST_P(BadInput, CoreThatIsAnotherLibrary) {
  Job job("plain", 2);
  job.env("HOCCL_AGREE_TIMEOUT_MS", "1500");
  job.env(GetParam(), "HOCCL_CORE_LIB", E2E_SHIM);
  expectPlain(job, {"not HOCCL's core library"});
}

TEST_P(BadInput, OneRankWithoutPreload) {
  Job job("plain", 2);
  job.env("HOCCL_AGREE_TIMEOUT_MS", "1500").withoutPreload(GetParam());
  if (GetParam() == 0) {
    expectPlain(job, {"unique id", "without HOCCL"});
  } else {
    expectPlain(job, {"rank 1", "1500 ms"});
  }
}

TEST(PlainNccl, WithoutPreloadAnywhere) {
  Job job("plain", 2);
  job.withoutPreload(0).withoutPreload(1);
  expectPlain(job, {});
  for (int rank : {0, 1}) EXPECT_EQ(job.errors(rank), "");
}

/// Both sides name both sizes, whoever comes first.
TEST(Mismatch, BothSidesNameBothSizes) {
  struct Case {
    const char *sent, *wanted, *first;
  };
  for (const Case& each : {Case{"300001", "200003", "0"}, Case{"300001", "200003", "1"},
                           Case{"200003", "300001", "0"}, Case{"100000000", "99999999", "1"}}) {
    SCOPED_TRACE(std::string(each.sent) + " met by " + each.wanted + ", first " + each.first);
    Job job("mismatch", 2);
    job.argument("sent", each.sent).argument("wanted", each.wanted).argument("first", each.first);
    job.finish();
    for (int rank : {0, 1}) {
      const std::string error = job.said(rank, "error");
      EXPECT_NE(error.find(each.sent), std::string::npos) << error;
      EXPECT_NE(error.find(each.wanted), std::string::npos) << error;
      EXPECT_NE(error.find("rank " + std::to_string(1 - rank)), std::string::npos) << error;
      EXPECT_EQ(job.said(rank, "result"), "4");  // ncclInvalidArgument
    }
  }
}

}  // namespace
}  // namespace e2e
