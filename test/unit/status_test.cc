#include "common/base/status.h"

#include <gtest/gtest.h>

#include <cerrno>

namespace hoccl {
namespace {

TEST(StatusTest, IsSuccessByDefault) {
  const Status status;
  EXPECT_TRUE(status);
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), Code::Ok);
  EXPECT_EQ(status.withOrigin(), "ok");
}

TEST(StatusTest, ErrorKeepsCodeMessageAndPlace) {
  const Status status = Status::error(Code::Timeout, "rank 3 is silent");
  EXPECT_FALSE(status);
  EXPECT_EQ(status.code(), Code::Timeout);
  EXPECT_EQ(status.message(), "rank 3 is silent");
  EXPECT_NE(status.withOrigin().find("rank 3 is silent [status_test.cc:"), std::string::npos);
}

TEST(StatusTest, ErrnoIsSpelledOut) {
  const Status status = Status::fromErrno("open /x", ENOENT);
  EXPECT_EQ(status.code(), Code::System);
  EXPECT_EQ(status.message(), "open /x: No such file or directory (errno 2)");
}

TEST(StatusTest, ContextGoesInFrontAndKeepsTheRest) {
  const Status inner = Status::error(Code::Cuda, "out of memory");
  const Status outer = inner.inContext("rank 1");
  EXPECT_EQ(outer.message(), "rank 1: out of memory");
  EXPECT_EQ(outer.code(), Code::Cuda);
  EXPECT_EQ(inner.message(), "out of memory");
  EXPECT_TRUE(Status().inContext("rank 1"));
}

TEST(StatusTest, EveryCodeHasAName) {
  for (int code = 0; code <= static_cast<int>(Code::Internal); ++code) {
    EXPECT_STRNE(codeName(static_cast<Code>(code)), "unknown") << code;
  }
}

}  // namespace
}  // namespace hoccl
