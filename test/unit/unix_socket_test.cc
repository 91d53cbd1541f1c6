#include "common/base/unix_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>
#include <thread>
#include <vector>

#include "common/base/random.h"
#include "common/base/time.h"

namespace hoccl {
namespace {

std::string freshName() {
  std::uint64_t bits = 0;
  EXPECT_TRUE(random64(&bits));
  return "hoccl-test-" + std::to_string(bits);
}

class SocketPairTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(makeSocketPair(&one_, &other_)); }

  UniqueFd one_, other_;
  std::array<char, 64> buffer_{};
  std::size_t bytes_ = 0;
  std::vector<UniqueFd> fds_;
  ReceiveState state_ = ReceiveState::WouldBlock;
};

TEST_F(SocketPairTest, KeepsMessageBoundaries) {
  for (const std::string text : {"first", "second message"}) {
    ASSERT_TRUE(sendWithFdsWithin(one_.get(), text.data(), text.size(), {}, 100));
  }
  for (const std::string text : {"first", "second message"}) {
    ASSERT_TRUE(
        recvWithFdsWithin(other_.get(), buffer_.data(), buffer_.size(), &bytes_, &fds_, 100));
    EXPECT_EQ(std::string(buffer_.data(), bytes_), text);
    EXPECT_TRUE(fds_.empty());
  }
}

TEST_F(SocketPairTest, CarriesDescriptorsCloseOnExec) {
  int pipeEnds[2];
  ASSERT_EQ(::pipe(pipeEnds), 0);
  UniqueFd readEnd(pipeEnds[0]), writeEnd(pipeEnds[1]);
  const std::vector<int> sent(kMaxMessageFds, writeEnd.get());
  ASSERT_TRUE(sendWithFdsWithin(one_.get(), "x", 1, sent, 100));
  ASSERT_TRUE(recvWithFdsWithin(other_.get(), buffer_.data(), buffer_.size(), &bytes_, &fds_, 100));
  ASSERT_EQ(fds_.size(), kMaxMessageFds);
  for (std::size_t i = 0; i < fds_.size(); ++i) {
    EXPECT_NE(fds_[i].get(), writeEnd.get());
    EXPECT_TRUE(::fcntl(fds_[i].get(), F_GETFD) & FD_CLOEXEC);
    const char byte = static_cast<char>('a' + i);
    ASSERT_EQ(::write(fds_[i].get(), &byte, 1), 1);
    char got = 0;
    ASSERT_EQ(::read(readEnd.get(), &got, 1), 1);
    EXPECT_EQ(got, byte);
  }
}

TEST_F(SocketPairTest, NothingThereDoesNotBlock) {
  ASSERT_TRUE(recvWithFds(other_.get(), buffer_.data(), buffer_.size(), &bytes_, &fds_, &state_));
  EXPECT_EQ(state_, ReceiveState::WouldBlock);
  const std::uint64_t begin = monotonicNs();
  const Status status =
      recvWithFdsWithin(other_.get(), buffer_.data(), buffer_.size(), &bytes_, &fds_, 30);
  EXPECT_EQ(status.code(), Code::Timeout);
  EXPECT_GE(monotonicNs() - begin, 30u * 1000000);
}

TEST_F(SocketPairTest, FullBufferDoesNotBlock) {
  const std::vector<char> message(4096);
  bool sent = true;
  int count = 0;
  while (sent && count < 100000) {
    ASSERT_TRUE(sendWithFds(one_.get(), message.data(), message.size(), {}, &sent));
    count += sent ? 1 : 0;
  }
  EXPECT_FALSE(sent);
  EXPECT_GT(count, 0);
  EXPECT_EQ(sendWithFdsWithin(one_.get(), message.data(), message.size(), {}, 20).code(),
            Code::Timeout);
  // Room appears while it waits.
  std::thread reader([&] {
    std::vector<char> buffer(4096);
    std::size_t bytes = 0;
    std::vector<UniqueFd> fds;
    for (int i = 0; i < count; ++i) {
      EXPECT_TRUE(
          recvWithFdsWithin(other_.get(), buffer.data(), buffer.size(), &bytes, &fds, 5000));
    }
  });
  EXPECT_TRUE(sendWithFdsWithin(one_.get(), message.data(), message.size(), {}, 5000));
  reader.join();
}

TEST_F(SocketPairTest, PeersEndIsAStateOrAnError) {
  one_.reset();
  ASSERT_TRUE(recvWithFds(other_.get(), buffer_.data(), buffer_.size(), &bytes_, &fds_, &state_));
  EXPECT_EQ(state_, ReceiveState::Closed);
  EXPECT_EQ(
      recvWithFdsWithin(other_.get(), buffer_.data(), buffer_.size(), &bytes_, &fds_, 100).code(),
      Code::Remote);
  EXPECT_EQ(sendWithFdsWithin(other_.get(), "x", 1, {}, 100).code(), Code::Remote)
      << "and no SIGPIPE";
}

TEST_F(SocketPairTest, MessagesBeforeTheEndStillArrive) {
  ASSERT_TRUE(sendWithFdsWithin(one_.get(), "bye", 3, {}, 100));
  one_.reset();
  ASSERT_TRUE(recvWithFds(other_.get(), buffer_.data(), buffer_.size(), &bytes_, &fds_, &state_));
  EXPECT_EQ(state_, ReceiveState::Message);
  EXPECT_EQ(bytes_, 3u);
}

TEST_F(SocketPairTest, BadMessagesAreRefusedBeforeSending) {
  bool sent = true;
  EXPECT_EQ(sendWithFds(one_.get(), "x", 0, {}, &sent).code(), Code::InvalidArgument);
  EXPECT_FALSE(sent);
  const std::vector<int> tooMany(kMaxMessageFds + 1, one_.get());
  EXPECT_EQ(sendWithFds(one_.get(), "x", 1, tooMany, &sent).code(), Code::InvalidArgument);
  const std::vector<char> huge(64u << 20);
  EXPECT_EQ(sendWithFds(one_.get(), huge.data(), huge.size(), {}, &sent).code(),
            Code::InvalidArgument);
  const int closed[] = {-1};
  EXPECT_EQ(sendWithFds(one_.get(), "x", 1, closed, &sent).code(), Code::System);
}

int openDescriptors() {
  int count = 0;
  for (int fd = 0; fd < 256; ++fd) count += ::fcntl(fd, F_GETFD) != -1 ? 1 : 0;
  return count;
}

TEST_F(SocketPairTest, TooLongAMessageIsAnErrorAndLeaksNothing) {
  const int before = openDescriptors();
  const int passed[] = {one_.get()};
  const std::vector<char> message(100);
  ASSERT_TRUE(sendWithFdsWithin(one_.get(), message.data(), message.size(), passed, 100));
  const Status status =
      recvWithFds(other_.get(), buffer_.data(), buffer_.size(), &bytes_, &fds_, &state_);
  EXPECT_EQ(status.code(), Code::Remote);
  EXPECT_EQ(state_, ReceiveState::Message) << "the socket stands";
  EXPECT_TRUE(fds_.empty());
  EXPECT_EQ(openDescriptors(), before);
}

TEST_F(SocketPairTest, MoreDescriptorsThanAllowedIsAnErrorAndLeaksNothing) {
  // Sent by hand: a peer that does not keep to the limit.
  const int before = openDescriptors();
  constexpr std::size_t kSent = kMaxMessageFds + 4;
  std::array<int, kSent> passed;
  passed.fill(one_.get());
  char byte = 'x';
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof passed)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof passed);
  std::copy_n(reinterpret_cast<const char*>(passed.data()), sizeof passed,
              reinterpret_cast<char*>(CMSG_DATA(header)));
  ASSERT_EQ(::sendmsg(one_.get(), &message, 0), 1);
  const Status status =
      recvWithFds(other_.get(), buffer_.data(), buffer_.size(), &bytes_, &fds_, &state_);
  EXPECT_EQ(status.code(), Code::System);
  EXPECT_EQ(state_, ReceiveState::Message) << "the socket stands";
  EXPECT_NE(status.message().find("ulimit -n"), std::string::npos);
  EXPECT_EQ(openDescriptors(), before);
}

TEST(UnixSocketTest, ConnectsByNameAndKnowsThePeer) {
  const std::string name = freshName();
  UniqueFd listener, client, server;
  ASSERT_TRUE(listenUnix(name, &listener));
  ASSERT_TRUE(acceptUnix(listener.get(), &server));
  EXPECT_FALSE(server) << "nobody has connected";
  ASSERT_TRUE(connectUnix(name, 100, &client));
  ASSERT_TRUE(acceptUnixWithin(listener.get(), 1000, &server));
  PeerCredentials peer;
  ASSERT_TRUE(peerCredentials(server.get(), &peer));
  EXPECT_EQ(peer.pid, ::getpid());
  EXPECT_EQ(peer.uid, ::geteuid());
  ASSERT_TRUE(sendWithFdsWithin(client.get(), "hi", 2, {}, 100));
  char buffer[8];
  std::size_t bytes = 0;
  std::vector<UniqueFd> fds;
  ASSERT_TRUE(recvWithFdsWithin(server.get(), buffer, sizeof buffer, &bytes, &fds, 1000));
  EXPECT_EQ(std::string(buffer, bytes), "hi");
}

TEST(UnixSocketTest, NobodyListeningIsToldAtOnce) {
  UniqueFd client;
  const std::uint64_t begin = monotonicNs();
  const Status status = connectUnix(freshName(), 5000, &client);
  EXPECT_EQ(status.code(), Code::Remote);
  EXPECT_LT(monotonicNs() - begin, 1000u * 1000000);
}

TEST(UnixSocketTest, AcceptIsBounded) {
  UniqueFd listener, server;
  ASSERT_TRUE(listenUnix(freshName(), &listener));
  EXPECT_EQ(acceptUnixWithin(listener.get(), 20, &server).code(), Code::Timeout);
}

TEST(UnixSocketTest, ANameIsTakenOnceAndFreedWithItsListener) {
  const std::string name = freshName();
  UniqueFd listener, second;
  ASSERT_TRUE(listenUnix(name, &listener));
  const Status status = listenUnix(name, &second);
  EXPECT_EQ(status.code(), Code::System);
  EXPECT_NE(status.message().find(name), std::string::npos);
  listener.reset();
  EXPECT_TRUE(listenUnix(name, &second));
}

TEST(UnixSocketTest, NamesOfImpossibleLengthAreRefused) {
  UniqueFd fd;
  EXPECT_EQ(listenUnix("", &fd).code(), Code::InvalidArgument);
  EXPECT_EQ(connectUnix(std::string(108, 'x'), 10, &fd).code(), Code::InvalidArgument);
  std::uint64_t bits = 0;
  ASSERT_TRUE(random64(&bits));
  std::string longest = std::to_string(bits);
  longest.resize(107, 'x');
  EXPECT_TRUE(listenUnix(longest, &fd));
}

TEST(UnixSocketTest, AFullBacklogIsWaitedForOnlySoLong) {
  const std::string name = freshName();
  UniqueFd listener;
  ASSERT_TRUE(listenUnix(name, &listener));
  ASSERT_EQ(::listen(listener.get(), 0), 0);  // room for one
  std::vector<UniqueFd> clients;
  Status status;
  while (status && clients.size() < 16) status = connectUnix(name, 20, &clients.emplace_back());
  EXPECT_EQ(status.code(), Code::Timeout);
  EXPECT_NE(status.message().find(name), std::string::npos);
}

TEST(UnixSocketTest, AnotherUserIsRefusedAndTheListenerLives) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const std::string name = freshName();
  UniqueFd listener, server;
  ASSERT_TRUE(listenUnix(name, &listener));
  constexpr uid_t kNobody = 65534;
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setresuid(kNobody, kNobody, kNobody) != 0) ::_exit(2);
    UniqueFd client;
    // The listener runs as root: the client refuses it as well.
    ::_exit(connectUnix(name, 1000, &client).code() == Code::Remote ? 0 : 1);
  }
  const Status status = acceptUnixWithin(listener.get(), 5000, &server);
  int ended = -1;
  ASSERT_EQ(::waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0);
  EXPECT_EQ(status.code(), Code::Remote);
  EXPECT_NE(status.message().find("65534"), std::string::npos) << status.message();
  EXPECT_FALSE(server);
  UniqueFd client;
  ASSERT_TRUE(connectUnix(name, 1000, &client));
  EXPECT_TRUE(acceptUnixWithin(listener.get(), 1000, &server));
}

}  // namespace
}  // namespace hoccl
