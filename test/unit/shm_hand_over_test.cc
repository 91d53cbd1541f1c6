// Descriptors between two movers of a node, beside the nudges on the same socket.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/unix_socket.h"
#include "common/net/shm/shm_connection.h"

namespace hoccl {
namespace {

constexpr StagingGeometry kGeometry{2, 4096};

class ShmHandOver : public ::testing::Test {
 protected:
  void SetUp() override {
    UniqueFd one, other;
    ASSERT_TRUE(makeSocketPair(&one, &other));
    a_ = make(std::move(one), ShmConnection::Side::Connecting);
    b_ = make(std::move(other), ShmConnection::Side::Accepting);
  }
  static std::unique_ptr<ShmConnection> make(UniqueFd socket, ShmConnection::Side side) {
    SharedMemory region;
    EXPECT_TRUE(SharedMemory::create("test", ShmConnection::regionBytes(kGeometry), &region));
    return std::make_unique<ShmConnection>(std::move(region), std::move(socket), kGeometry, side,
                                           PeerId{1, 2});
  }
  /// One end of a pipe: who has it can be told from the other end.
  static UniqueFd readable(char text) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    EXPECT_EQ(::write(ends[1], &text, 1), 1);
    ::close(ends[1]);
    return UniqueFd(ends[0]);
  }
  static char textOf(const UniqueFd& fd) {
    char text = 0;
    EXPECT_EQ(::read(fd.get(), &text, 1), 1);
    return text;
  }
  std::unique_ptr<ShmConnection> a_, b_;
};

TEST_F(ShmHandOver, MessagesComeInOrderWithTheirDescriptorsAmongNudges) {
  const UniqueFd x = readable('x'), y = readable('y'), z = readable('z');
  const std::uint64_t first[2] = {1, 2}, second[3] = {3, 4, 5};
  a_->nudge();
  const int two[] = {x.get(), y.get()}, one[] = {z.get()};
  ASSERT_TRUE(a_->handOver(first, sizeof first, two, 1000));
  a_->nudge();
  ASSERT_TRUE(a_->handOver(second, sizeof second, one, 1000));
  HandedOver got;
  EXPECT_FALSE(b_->takeHandedOver(&got)) << "nobody has looked yet";
  b_->watch();
  ASSERT_TRUE(b_->takeHandedOver(&got));
  EXPECT_EQ(got.data.size(), sizeof first);
  ASSERT_EQ(got.fds.size(), 2u);
  EXPECT_EQ(textOf(got.fds[0]), 'x');
  EXPECT_EQ(textOf(got.fds[1]), 'y');
  ASSERT_TRUE(b_->takeHandedOver(&got));
  EXPECT_EQ(got.data.size(), sizeof second);
  ASSERT_EQ(got.fds.size(), 1u);
  EXPECT_EQ(textOf(got.fds[0]), 'z');
  EXPECT_FALSE(b_->takeHandedOver(&got));
  EXPECT_FALSE(b_->peerGone());
}

TEST_F(ShmHandOver, AMessageThatCannotBeTakenInIsLostAlone) {
  const std::vector<std::byte> long_(8192);
  const std::uint64_t word[2] = {1, 2};
  ASSERT_TRUE(a_->handOver(long_.data(), long_.size(), {}, 1000));
  ASSERT_TRUE(a_->handOver(word, sizeof word, {}, 1000));
  b_->watch();
  HandedOver got;
  ASSERT_TRUE(b_->takeHandedOver(&got));
  EXPECT_EQ(got.data.size(), sizeof word);
  EXPECT_FALSE(b_->peerGone());
}

TEST_F(ShmHandOver, WithoutAFreeDescriptorItIsLostAndTheConnectionStands) {
  const UniqueFd x = readable('x');
  const int one[] = {x.get()};
  const std::uint64_t word[2] = {1, 2};
  ASSERT_TRUE(a_->handOver(word, sizeof word, one, 1000));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{0, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  b_->watch();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  HandedOver got;
  EXPECT_FALSE(b_->takeHandedOver(&got));
  EXPECT_FALSE(b_->peerGone());
  ASSERT_TRUE(a_->handOver(word, sizeof word, one, 1000));
  b_->watch();
  ASSERT_TRUE(b_->takeHandedOver(&got));
  EXPECT_EQ(textOf(got.fds.at(0)), 'x');
}

TEST_F(ShmHandOver, APeerThatDoesNotLookIsWaitedForNoLongerThanSaid) {
  const std::uint64_t word[2] = {1, 2};
  Status status;
  for (int n = 0; status && n < 100'000; ++n) status = a_->handOver(word, sizeof word, {}, 20);
  EXPECT_FALSE(status);
}

TEST_F(ShmHandOver, WhatWasHandedOverBeforeTheEndStillComes) {
  const UniqueFd x = readable('x');
  const int one[] = {x.get()};
  const std::uint64_t word[2] = {1, 2};
  ASSERT_TRUE(a_->handOver(word, sizeof word, one, 1000));
  a_.reset();
  b_->watch();
  EXPECT_TRUE(b_->peerGone());
  HandedOver got;
  ASSERT_TRUE(b_->takeHandedOver(&got));
  EXPECT_EQ(textOf(got.fds.at(0)), 'x');
  EXPECT_FALSE(b_->handOver(word, sizeof word, one, 1000)) << "nobody is there";
}

}  // namespace
}  // namespace hoccl
