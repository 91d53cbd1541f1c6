// Sends and receives of which one is below HOCCL_MIN_BYTES and the other is not: both ranks learn
// of it soon. Correct mixes of both never do.

#include <gtest/gtest.h>

#include <array>
#include <string>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

/// By then the steered side has been told of, on a loaded machine, too.
constexpr const char* kLongMs = "1000";

enum class Way { Shm, Direct, Tcp };

void choose(Job& job, Way way) {
  if (way == Way::Direct) job.oneNode();
  if (way == Way::Tcp) job.env("HOCCL_TRANSPORT", "tcp").env("HOCCL_SOCKET_IFNAME", "=lo");
}

class Threshold : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, Threshold, ::testing::Values(Way::Shm, Way::Direct, Way::Tcp),
                         [](const auto& param) {
                           return std::string(param.param == Way::Shm      ? "Shm"
                                              : param.param == Way::Direct ? "Direct"
                                                                           : "Tcp");
                         });

/// Runs the mismatch and checks what both ranks say of it. `delayMs`: how long after the first side
/// the second one comes.
void expectNamed(Way way, bool sendIsLarge, bool sendFirst, bool grouped, bool mixed,
                 const char* delayMs) {
  SCOPED_TRACE(std::string(sendIsLarge ? "large send" : "large receive") +
               (sendFirst ? ", send first" : ", receive first") + (grouped ? ", grouped" : "") +
               (mixed ? ", after a mix" : "") + ", " + delayMs + " ms apart");
  Job job("threshold", 2);
  choose(job, way);
  job.argument("sent", sendIsLarge ? "300001" : "1007");
  job.argument("wanted", sendIsLarge ? "1007" : "300001");
  job.argument("first", sendFirst ? "0" : "1").argument("delayMs", delayMs);
  job.argument("grouped", grouped ? "1" : "0").argument("mixed", mixed ? "1" : "0");
  job.finish();
  for (int rank : {0, 1}) {
    const std::string error = job.said(rank, "error");
    EXPECT_EQ(job.said(rank, "result"), "4") << error;  // ncclInvalidArgument
    EXPECT_NE(error.find("300001 bytes"), std::string::npos) << error;
    EXPECT_NE(error.find("rank " + std::to_string(1 - rank)), std::string::npos) << error;
    const std::string number = mixed ? "send/receive 3 of" : "send/receive 0 of";
    EXPECT_NE(error.find(number), std::string::npos) << error;
  }
  // The steered side has been told of, so a small call that comes later is not even made.
  const bool largeFirst = sendIsLarge == sendFirst;
  const int smallSide = sendIsLarge ? 1 : 0;
  if (largeFirst && std::string(delayMs) == kLongMs) {
    EXPECT_EQ(job.said(smallSide, "refused"), "1");
    for (int rank : {0, 1}) {
      EXPECT_NE(job.said(rank, "error").find("1007 bytes"), std::string::npos)
          << job.said(rank, "error");
    }
  } else if (!largeFirst) {
    for (int rank : {0, 1}) {
      EXPECT_NE(job.said(rank, "error").find("HOCCL_MIN_BYTES"), std::string::npos)
          << job.said(rank, "error");
    }
  }
}

TEST_P(Threshold, BothRanksNameBothSides) {
  for (bool sendIsLarge : {true, false}) {
    for (bool sendFirst : {true, false}) {
      for (bool grouped : {false, true}) {
        expectNamed(GetParam(), sendIsLarge, sendFirst, grouped, false,
                    sendIsLarge == sendFirst ? kLongMs : "100");
      }
    }
  }
}

/// What holds the steered side's stream up may be what waits for the peer.
TEST_P(Threshold, BeforeTheStreamHasComeToIt) {
  for (bool sendIsLarge : {true, false}) {
    for (const char* first : {"0", "1"}) {
      Job job("threshold", 2);
      choose(job, GetParam());
      job.argument("sent", sendIsLarge ? "300001" : "1007");
      job.argument("wanted", sendIsLarge ? "1007" : "300001");
      job.argument("first", first).argument("held", "1");
      job.finish();
      for (int rank : {0, 1}) {
        EXPECT_EQ(job.said(rank, "result"), "4") << job.said(rank, "error");
      }
    }
  }
}

/// The one that waits dies when that has been told: the other is not kept waiting for it.
TEST_P(Threshold, WhoeverToldMayBeGone) {
  Job job("threshold", 2);
  choose(job, GetParam());
  job.argument("sent", "1007").argument("wanted", "300001").argument("first", "1");
  job.argument("delayMs", "2000").argument("dies", "1");
  job.expectDeath(1);
  job.finish();
  EXPECT_EQ(job.said(0, "result"), "4");
  EXPECT_EQ(job.said(0, "refused"), "1");
  const std::string error = job.said(0, "error");
  EXPECT_NE(error.find("send of 1007 bytes to rank 1 (host"), std::string::npos) << error;
}

TEST_P(Threshold, AfterACorrectMix) {
  for (bool sendIsLarge : {true, false}) {
    for (const char* delayMs : std::array{"0", kLongMs}) {
      expectNamed(GetParam(), sendIsLarge, true, sendIsLarge, true, delayMs);
    }
  }
}

TEST_P(Threshold, CorrectMixesGoOn) {
  for (const char* seed : {"1", "2"}) {
    Job job("mixedSizes", 2);
    choose(job, GetParam());
    job.argument("seed", seed).finish(60);
  }
}

TEST_P(Threshold, CapturedAndFailedCallsDoNotCount) {
  Job job("notCounted", 2);
  choose(job, GetParam());
  job.finish();
}

}  // namespace
}  // namespace e2e
