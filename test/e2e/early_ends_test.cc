// Communicators that end, or split, while others know little of it yet.

#include <gtest/gtest.h>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

class EndsBeforeTheLink : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(By, EndsBeforeTheLink, ::testing::Values("abort", "destroy"));

TEST_P(EndsBeforeTheLink, FailsWhatThePeerBegins) {
  for (const char* transport : {"shm", "tcp"}) {
    for (const char* does : {"send", "receive", "send linked", "receive linked"}) {
      SCOPED_TRACE(std::string(transport) + ", " + does);
      Job job("endsBeforeTheLink", 2);
      const std::string what = does;
      job.argument("by", GetParam()).argument("does", what.substr(0, what.find(' ')));
      job.argument("linked", what.find("linked") == std::string::npos ? "0" : "1");
      job.env("HOCCL_TRANSPORT", transport).finish();
      const std::string error = job.said(1, "error");
      EXPECT_NE(error.find("rank 0"), std::string::npos) << error;
    }
  }
}

/// A roll call of a split needs the ranks without a color as well, which may be in the same thread.
class SplitOfOneThread : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Colored, SplitOfOneThread, ::testing::Values(4, 3, 2));

TEST_P(SplitOfOneThread, IsSteered) {
  Job job("splitOfOneThread", 1);
  job.argument("colored", std::to_string(GetParam())).env("EMUCUDA_DEVICES", "4").finish();
  EXPECT_LT(std::stol("0" + job.said(0, "tookMs")), 5000);
  const nlohmann::json comms = job.communicators(0);
  EXPECT_EQ(comms.size(), 4u + static_cast<std::size_t>(GetParam())) << comms;
  for (const auto& comm : comms) EXPECT_TRUE(comm["steered"]) << comm;
}

TEST(NonBlocking, CommunicatorsOfOneThreadAskedAboutInTurn) {
  Job job("oneThreadAsksInTurn", 1);
  job.env("EMUCUDA_DEVICES", "4").finish();
  EXPECT_LT(std::stol("0" + job.said(0, "tookMs")), 5000);
  const nlohmann::json comms = job.communicators(0);
  EXPECT_EQ(comms.size(), 6u) << comms;
  for (const auto& comm : comms) EXPECT_TRUE(comm["steered"]) << comm;
}

TEST(Split, ARankWithoutAColorMayEndAtOnce) {
  Job job("leavesBehindTheSplit", 3);
  job.finish();
  for (int rank : {0, 2}) {
    const nlohmann::json comms = job.communicators(rank);
    EXPECT_EQ(comms.size(), 2u) << comms;
    for (const auto& comm : comms) EXPECT_TRUE(comm["steered"]) << comm;
  }
}

}  // namespace
}  // namespace e2e
