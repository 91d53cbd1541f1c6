// The agreement of all ranks whether to steer: DESIGN.md "Agreement", rules 7, 9 and 10. Ranks are
// threads, or members polled by one thread; the root listens on loopback.
#include "plugin-tuner/agreement.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

namespace hoccl {
namespace {

using Clock = Agreement::Clock;
using State = Agreement::State;
using std::chrono::milliseconds;

/// An id as NCCL fills it: a u64, then the loopback address.
void fillFront(char id[kUniqueIdBytes]) {
  std::memset(id, 0, kUniqueIdBytes);
  std::memset(id, 0x5a, 8);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(4242);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::memcpy(id + 8, &address, sizeof address);
}

class AgreementTest : public ::testing::Test {
 protected:
  void startRoot(std::uint64_t agreeTimeoutMs = 5000, std::uint64_t timeoutMs = 2000,
                 std::size_t maxVerdicts = 4096) {
    agreeTimeoutMs_ = agreeTimeoutMs;
    timeoutMs_ = timeoutMs;
    ASSERT_TRUE(root_.start({agreeTimeoutMs, timeoutMs, maxVerdicts}));
    char id[kUniqueIdBytes];
    fillFront(id);
    ASSERT_TRUE(root_.newCommunicator(id, &tail_));
  }
  Agreement::Options options(std::uint32_t rank, std::uint32_t nranks) const {
    Agreement::Options options;
    options.root = tail_;
    options.key = {tail_.nonce, 0, 0};
    options.rank = rank;
    options.nranks = nranks;
    options.policyDigest = 7;
    options.policyText = "HOCCL_MIN_BYTES=65536";
    options.host = "node" + std::to_string(rank / 8);
    options.agreeTimeoutMs = agreeTimeoutMs_;
    options.timeoutMs = timeoutMs_;
    return options;
  }
  /// Members of ranks [0, count) of a communicator of nranks.
  std::vector<std::unique_ptr<Agreement>> members(std::uint32_t count, std::uint32_t nranks) const {
    std::vector<std::unique_ptr<Agreement>> made;
    for (std::uint32_t rank = 0; rank < count; ++rank) {
      made.push_back(std::make_unique<Agreement>(options(rank, nranks)));
    }
    return made;
  }
  static bool waitAll(const std::vector<std::unique_ptr<Agreement>>& members) {
    std::vector<Agreement*> plain;
    for (const auto& each : members) plain.push_back(each.get());
    return Agreement::waitAll(plain, Clock::now() + milliseconds(10000));
  }
  static void expectAllRefused(const std::vector<std::unique_ptr<Agreement>>& members,
                               const std::string& part) {
    for (const auto& each : members) {
      ASSERT_EQ(each->state(), State::Done) << each->status().message();
      EXPECT_FALSE(each->verdict().steer);
      EXPECT_NE(each->verdict().reason.find(part), std::string::npos) << each->verdict().reason;
      EXPECT_EQ(each->verdict().reason, members.front()->verdict().reason);
      EXPECT_TRUE(each->verdict().payloads.empty());
    }
  }
  int connectRaw() const {
    sockaddr_storage address;
    const socklen_t length = toSocketAddress(tail_, &address);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
    const timeval bound{5, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &bound, sizeof bound);
    return fd;
  }
  /// What the root sends before it closes the connection; fails when it stays open for 5 s.
  static std::string readToEnd(int fd) {
    std::string all;
    char buffer[4096];
    ssize_t n = 0;
    while ((n = recv(fd, buffer, sizeof buffer, 0)) > 0) all.append(buffer, n);
    const bool closed = n == 0 || errno == ECONNRESET;
    EXPECT_TRUE(closed) << "still open: " << std::strerror(errno);
    return all;
  }

  AgreementRoot root_;
  Tail tail_;
  std::uint64_t agreeTimeoutMs_ = 0, timeoutMs_ = 0;
};

TEST(UniqueIdTail, RoundTripLeavesTheFrontAlone) {
  char id[kUniqueIdBytes], before[kUniqueIdBytes];
  for (std::size_t i = 0; i < kUniqueIdBytes; ++i) id[i] = static_cast<char>(i * 3);
  std::memcpy(before, id, sizeof id);
  Tail tail{1, 2, 6, 4711, {}, 3, 0x0123456789abcdef};
  for (std::size_t i = 0; i < 16; ++i) tail.address[i] = static_cast<std::uint8_t>(0xf0 + i);
  writeTail(id, tail);
  EXPECT_EQ(std::memcmp(id, before, kTailOffset), 0);
  Tail read;
  ASSERT_TRUE(readTail(id, &read));
  EXPECT_EQ(read, tail);
}

TEST(UniqueIdTail, EveryDamagedByteIsFound) {
  char id[kUniqueIdBytes] = {};
  Tail read{9, 9, 9, 9, {}, 9, 9};
  const Tail untouched = read;
  EXPECT_FALSE(readTail(id, &read));  // of a process without HOCCL
  writeTail(id, Tail{1, 0, 4, 80, {127, 0, 0, 1}, 0, 42});
  for (std::size_t i = kTailOffset; i < kTailOffset + 43; ++i) {
    id[i] = static_cast<char>(id[i] ^ 0x10);
    EXPECT_FALSE(readTail(id, &read)) << "byte " << i;
    id[i] = static_cast<char>(id[i] ^ 0x10);
  }
  EXPECT_EQ(read, untouched);
  EXPECT_TRUE(readTail(id, &read));
}

TEST(UniqueIdTail, AddressComesFromNcclsOwn) {
  char id[kUniqueIdBytes];
  fillFront(id);
  Tail tail;
  ASSERT_TRUE(readBootstrapAddress(id, &tail));
  tail.port = 99;
  EXPECT_EQ(addressText(tail), "127.0.0.1:99");

  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_scope_id = 2;
  inet_pton(AF_INET6, "fe80::1", &v6.sin6_addr);
  std::memcpy(id + 8, &v6, sizeof v6);
  ASSERT_TRUE(readBootstrapAddress(id, &tail));
  EXPECT_EQ(addressText(tail), "[fe80::1%2]:99");
  sockaddr_storage address;
  ASSERT_EQ(toSocketAddress(tail, &address), sizeof(sockaddr_in6));
  EXPECT_EQ(reinterpret_cast<sockaddr_in6*>(&address)->sin6_scope_id, 2u);

  std::memset(id, 0, sizeof id);
  EXPECT_FALSE(readBootstrapAddress(id, &tail));
  readInterfaceAddress(&tail);
  EXPECT_TRUE(tail.family == 4 || tail.family == 6);
}

TEST_F(AgreementTest, AllComeInThreadsOverTwoPhases) {
  startRoot();
  constexpr std::uint32_t kRanks = 4;
  std::vector<std::string> seen[kRanks];
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Agreement member(options(rank, kRanks));
      ASSERT_TRUE(member.start(1, "can" + std::to_string(rank)));
      ASSERT_EQ(member.wait(), State::Done) << member.status().message();
      ASSERT_TRUE(member.verdict().steer) << member.verdict().reason;
      seen[rank] = member.verdict().payloads;
      // Payloads are opaque: zero bytes, empty ones and the largest size go through.
      const std::string payload = rank == 0   ? std::string()
                                  : rank == 1 ? std::string(3, '\0')
                                              : std::string(wire::kMaxPayload, 'x');
      ASSERT_TRUE(member.start(2, payload));
      ASSERT_EQ(member.wait(), State::Done) << member.status().message();
      ASSERT_TRUE(member.verdict().steer) << member.verdict().reason;
      ASSERT_EQ(member.verdict().payloads.size(), kRanks);
      EXPECT_EQ(member.verdict().payloads[rank], payload);
      EXPECT_EQ(member.verdict().payloads[1], std::string(3, '\0'));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::vector<std::string> all{"can0", "can1", "can2", "can3"};
  for (const auto& each : seen) EXPECT_EQ(each, all);
}

TEST_F(AgreementTest, SixtyFourRanksOfOneThread) {
  startRoot();
  auto all = members(64, 64);
  for (std::uint32_t phase : {1u, 2u}) {
    for (std::size_t rank = 0; rank < 64; ++rank) {
      ASSERT_TRUE(all[rank]->start(phase, std::to_string(phase * 1000 + rank)));
    }
    ASSERT_TRUE(waitAll(all));
    for (const auto& each : all) {
      ASSERT_EQ(each->state(), State::Done) << each->status().message();
      ASSERT_TRUE(each->verdict().steer);
      for (std::size_t rank = 0; rank < 64; ++rank) {
        EXPECT_EQ(each->verdict().payloads[rank], std::to_string(phase * 1000 + rank));
      }
    }
  }
}

TEST_F(AgreementTest, SilentRankMeansNoForAllAndForTheLatecomer) {
  startRoot(300);
  auto all = members(7, 8);
  all.erase(all.begin() + 3);  // rank 3 is silent
  const auto begin = Clock::now();
  for (auto& each : all) ASSERT_TRUE(each->start(1, "x"));
  ASSERT_TRUE(waitAll(all));
  EXPECT_GE(Clock::now() - begin, milliseconds(300));
  EXPECT_LT(Clock::now() - begin, milliseconds(2000));
  expectAllRefused(all, "ranks 3, 7 of 8 did not join within 300 ms: is HOCCL preloaded there?");

  const auto lateBegin = Clock::now();
  all.push_back(std::make_unique<Agreement>(options(3, 8)));
  ASSERT_TRUE(all.back()->start(1, "late"));
  ASSERT_TRUE(waitAll(all));
  expectAllRefused(all, "ranks 3, 7 of 8");
  EXPECT_LT(Clock::now() - lateBegin, milliseconds(250)) << "a stored verdict needs no timeout";
}

TEST_F(AgreementTest, SilentInTheSecondPhase) {
  startRoot(300);
  auto all = members(3, 3);
  for (auto& each : all) ASSERT_TRUE(each->start(1, "x"));
  ASSERT_TRUE(waitAll(all));
  auto silent = std::move(all.back());
  all.pop_back();
  for (auto& each : all) ASSERT_TRUE(each->start(2, "ready"));
  ASSERT_TRUE(waitAll(all));
  expectAllRefused(all, "rank 2 (host node0) of 3 joined, but did not answer in phase 2");
  ASSERT_TRUE(silent->start(2, "too late"));
  ASSERT_EQ(silent->wait(), State::Done) << silent->status().message();
  EXPECT_EQ(silent->verdict().reason, all[0]->verdict().reason);
}

TEST_F(AgreementTest, VetoInEitherPhase) {
  for (const std::uint32_t phase : {1u, 2u}) {
    root_.stop();
    startRoot();
    auto all = members(4, 4);
    if (phase == 2) {
      for (auto& each : all) ASSERT_TRUE(each->start(1, "x"));
      ASSERT_TRUE(waitAll(all));
    }
    for (std::size_t rank = 0; rank < 4; ++rank) {
      ASSERT_TRUE(all[rank]->start(phase, "x", rank == 2 ? "HOCCL_SLOTS=none is no number" : ""));
    }
    ASSERT_TRUE(waitAll(all));
    expectAllRefused(all, "rank 2 on host node0: HOCCL_SLOTS=none is no number");
  }
}

TEST_F(AgreementTest, DifferentPoliciesAreNamed) {
  startRoot();
  std::vector<std::unique_ptr<Agreement>> all;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    auto each = options(rank, 3);
    if (rank == 1) {
      each.policyDigest = 8;
      each.policyText = "HOCCL_MIN_BYTES=1048576";
    }
    all.push_back(std::make_unique<Agreement>(each));
    ASSERT_TRUE(all.back()->start(1, "x"));
  }
  ASSERT_TRUE(waitAll(all));
  expectAllRefused(all, "rank 1 on host node0: [HOCCL_MIN_BYTES=1048576]");
  EXPECT_NE(all[0]->verdict().reason.find("[HOCCL_MIN_BYTES=65536]"), std::string::npos);
}

TEST_F(AgreementTest, DifferentSizesAndDoubleRanks) {
  startRoot();
  std::vector<std::unique_ptr<Agreement>> sizes;
  sizes.push_back(std::make_unique<Agreement>(options(0, 4)));
  sizes.push_back(std::make_unique<Agreement>(options(5, 8)));
  for (auto& each : sizes) ASSERT_TRUE(each->start(1, "x"));
  ASSERT_TRUE(waitAll(sizes));
  // Whoever comes first is the reference: both texts name both ranks and values.
  expectAllRefused(sizes, "rank 5 on host node0");
  expectAllRefused(sizes, "rank 0 on host node0");
  const std::string& reason = sizes[0]->verdict().reason;
  EXPECT_NE(reason.find("8"), std::string::npos);
  EXPECT_NE(reason.find("4"), std::string::npos);

  std::vector<std::unique_ptr<Agreement>> twins;
  for (int i = 0; i < 2; ++i) {
    auto each = options(1, 4);
    each.key.splitSequence = 1;
    twins.push_back(std::make_unique<Agreement>(each));
    ASSERT_TRUE(twins.back()->start(1, "x"));
  }
  ASSERT_TRUE(waitAll(twins));
  expectAllRefused(twins, "say they are rank 1");
}

TEST_F(AgreementTest, AnotherProtocolVersionIsNamedToBoth) {
  startRoot();
  auto all = members(1, 2);
  ASSERT_TRUE(all[0]->start(1, "x"));
  // The other rank's message arrives while this one waits.
  EXPECT_EQ(all[0]->wait(Clock::now() + milliseconds(50)), State::Pending);
  wire::Hello hello;
  hello.rootNonce = tail_.nonce;
  hello.key = {tail_.nonce, 0, 0};
  hello.rank = 1;
  hello.nranks = 2;
  hello.phase = 1;
  hello.host = "other";
  const std::string message = wire::encode(hello, 2);
  const int fd = connectRaw();
  ASSERT_EQ(send(fd, message.data(), message.size(), 0), static_cast<ssize_t>(message.size()));
  ASSERT_TRUE(waitAll(all));
  expectAllRefused(all,
                   "rank 1 on host other speaks agreement protocol 2, rank 0 on host node0 "
                   "speaks 1");
  std::string answer(wire::kHeaderBytes * 2 + 4, 0);  // Welcome, then the verdict's header
  ASSERT_EQ(recv(fd, answer.data(), answer.size(), MSG_WAITALL), ssize_t(answer.size()));
  wire::Header header;
  ASSERT_TRUE(wire::decodeHeader(answer.substr(wire::kHeaderBytes + 4), &header));
  EXPECT_EQ(header.type, wire::Type::Verdict);
  close(fd);
}

TEST_F(AgreementTest, GarbageTruncationAndStrangersCloseOnlyTheirConnection) {
  startRoot(5000, 400);
  auto all = members(1, 2);
  ASSERT_TRUE(all[0]->start(1, "x"));

  wire::Hello hello;
  hello.rootNonce = tail_.nonce;
  hello.key = {tail_.nonce, 0, 0};
  hello.rank = 1;
  hello.nranks = 2;
  hello.phase = 1;
  const std::string good = wire::encode(hello);
  hello.rootNonce ^= 1;
  const std::string stranger = wire::encode(hello);
  hello.rootNonce ^= 1;
  hello.rank = 2;
  const std::string noSuchRank = wire::encode(hello);
  std::string tooLong = good;
  tooLong[9] = tooLong[10] = '\xff';  // says that 16 MiB follow
  std::string trailing = good + "x";
  ++trailing[8];
  std::string innerLength = good;
  innerLength[wire::kHeaderBytes + 44] = '\x7f';  // the host is longer than the message

  for (const std::string& bad : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(70000, '\0'),
                                 stranger, noSuchRank, tooLong, trailing, innerLength}) {
    const int fd = connectRaw();
    // The root may close while this is still being written.
    ASSERT_GT(send(fd, bad.data(), bad.size(), MSG_NOSIGNAL), 0);
    EXPECT_EQ(readToEnd(fd), "") << "a stranger gets nothing";
    close(fd);
  }
  for (const std::size_t length :
       {std::size_t{0}, std::size_t{5}, wire::kHeaderBytes + 9, good.size() - 1}) {
    const int fd = connectRaw();  // cut short by the sender
    ASSERT_EQ(send(fd, good.data(), length, MSG_NOSIGNAL), static_cast<ssize_t>(length));
    shutdown(fd, SHUT_WR);
    EXPECT_EQ(readToEnd(fd), "");
    close(fd);
  }
  const int quiet = connectRaw();  // says nothing: closed after timeoutMs
  const auto begin = Clock::now();
  EXPECT_EQ(readToEnd(quiet), "");
  EXPECT_LT(Clock::now() - begin, milliseconds(1500));
  close(quiet);

  EXPECT_EQ(all[0]->poll(), State::Pending);
  all.push_back(std::make_unique<Agreement>(options(1, 2)));
  ASSERT_TRUE(all[1]->start(1, "y"));
  ASSERT_TRUE(waitAll(all));
  for (const auto& each : all) EXPECT_TRUE(each->verdict().steer) << each->verdict().reason;
}

TEST_F(AgreementTest, StrangerFailsWithAReason) {
  startRoot();
  auto wrong = options(1, 2);
  wrong.root.nonce ^= 1;
  Agreement member(wrong);
  ASSERT_TRUE(member.start(1, "x"));
  ASSERT_EQ(member.wait(), State::Failed);
  EXPECT_EQ(member.status().code(), Code::Remote);
  EXPECT_NE(member.status().message().find("rank 1 of 2"), std::string::npos);
  EXPECT_NE(member.status().message().find(addressText(tail_)), std::string::npos);
}

TEST_F(AgreementTest, RootThatDiesMidWayFailsTheMembers) {
  startRoot();
  auto all = members(2, 3);
  for (auto& each : all) ASSERT_TRUE(each->start(1, "x"));
  EXPECT_EQ(all[0]->wait(Clock::now() + milliseconds(50)), State::Pending);
  EXPECT_EQ(all[1]->wait(Clock::now() + milliseconds(50)), State::Pending);
  root_.stop();
  ASSERT_TRUE(waitAll(all));
  for (const auto& each : all) {
    EXPECT_EQ(each->state(), State::Failed);
    EXPECT_EQ(each->status().code(), Code::Remote);
    EXPECT_NE(each->status().message().find(addressText(tail_)), std::string::npos);
  }
}

TEST_F(AgreementTest, UnreachableRootFailsInBoundedTime) {
  startRoot();
  root_.stop();  // nobody listens at the address any more
  auto late = options(1, 2);
  late.timeoutMs = 300;
  Agreement member(late);
  const auto begin = Clock::now();
  ASSERT_TRUE(member.start(1, "x"));
  ASSERT_EQ(member.wait(), State::Failed);
  EXPECT_LT(Clock::now() - begin, milliseconds(1500));
  EXPECT_EQ(member.status().code(), Code::Timeout);
  EXPECT_NE(member.status().message().find("refused"), std::string::npos)
      << member.status().message();
}

TEST_F(AgreementTest, MuteRootFailsInBoundedTime) {
  // Something accepts, and never answers: a stopped process looks like that.
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  agreeTimeoutMs_ = 200;
  timeoutMs_ = 200;
  tail_.family = 4;
  tail_.address = {127, 0, 0, 1};
  tail_.port = ntohs(address.sin_port);
  Agreement member(options(0, 2));
  const auto begin = Clock::now();
  ASSERT_TRUE(member.start(1, "x"));
  ASSERT_EQ(member.wait(), State::Failed);
  EXPECT_GE(Clock::now() - begin, milliseconds(400));
  EXPECT_LT(Clock::now() - begin, milliseconds(1500));
  EXPECT_EQ(member.status().code(), Code::Timeout);
  close(fd);
}

TEST_F(AgreementTest, RankThatLeavesMeansNoAtOnce) {
  startRoot(5000);
  auto all = members(3, 4);
  for (auto& each : all) ASSERT_TRUE(each->start(1, "x"));
  EXPECT_EQ(all[2]->wait(Clock::now() + milliseconds(50)), State::Pending);
  all.pop_back();
  const auto begin = Clock::now();
  ASSERT_TRUE(waitAll(all));
  EXPECT_LT(Clock::now() - begin, milliseconds(1000));
  expectAllRefused(all, "rank 2 on host node0 closed its connection before the verdict");
}

TEST_F(AgreementTest, RankThatLeavesBetweenPhases) {
  startRoot(5000);
  auto all = members(3, 3);
  for (auto& each : all) ASSERT_TRUE(each->start(1, "x"));
  ASSERT_TRUE(waitAll(all));
  all.erase(all.begin());
  for (auto& each : all) ASSERT_TRUE(each->start(2, "y"));
  ASSERT_TRUE(waitAll(all));
  for (const auto& each : all) {
    ASSERT_EQ(each->state(), State::Done) << each->status().message();
    EXPECT_FALSE(each->verdict().steer);
    EXPECT_NE(each->verdict().reason.find("rank 0 on host node0"), std::string::npos);
  }
}

TEST_F(AgreementTest, Rule7SplitsOfSeveralColorsDoNotWaitForEachOther) {
  startRoot(5000);
  // Color 3 never completes; the others, of different sizes, finish meanwhile, in threads.
  auto stuck = options(0, 2);
  stuck.key = {tail_.nonce, 1, 3};
  Agreement pending(stuck);
  ASSERT_TRUE(pending.start(1, "x"));
  std::vector<std::thread> threads;
  for (std::int64_t color : {0, 1, -7}) {
    const std::uint32_t nranks = color == 0 ? 1 : color == 1 ? 3 : 5;
    for (std::uint32_t rank = 0; rank < nranks; ++rank) {
      threads.emplace_back([&, color, rank, nranks] {
        for (std::uint64_t sequence = 1; sequence <= 20; ++sequence) {
          auto mine = options(rank, nranks);
          mine.key = {tail_.nonce, sequence, color};
          Agreement member(mine);
          const std::string payload = std::to_string(color) + "/" + std::to_string(sequence);
          for (std::uint32_t phase : {1u, 2u}) {
            ASSERT_TRUE(member.start(phase, payload));
            ASSERT_EQ(member.wait(), State::Done) << member.status().message();
            ASSERT_TRUE(member.verdict().steer) << member.verdict().reason;
            for (const auto& each : member.verdict().payloads) EXPECT_EQ(each, payload);
          }
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pending.poll(), State::Pending);
}

TEST_F(AgreementTest, OldVerdictsGoFirst) {
  startRoot(5000, 2000, 8);
  const auto refuse = [&](std::uint64_t sequence) {
    auto mine = options(0, 2);
    mine.key.splitSequence = sequence;
    Agreement member(mine);
    ASSERT_TRUE(member.start(1, "x", "no"));
    ASSERT_EQ(member.wait(), State::Done);
    EXPECT_FALSE(member.verdict().steer);
  };
  for (std::uint64_t sequence = 1; sequence <= 40; ++sequence) refuse(sequence);
  auto late = options(1, 2);
  late.key.splitSequence = 40;
  Agreement newest(late);
  ASSERT_TRUE(newest.start(1, "x"));
  ASSERT_EQ(newest.wait(), State::Done);
  EXPECT_FALSE(newest.verdict().steer);
  late.key.splitSequence = 1;
  Agreement oldest(late);
  ASSERT_TRUE(oldest.start(1, "x"));
  EXPECT_EQ(oldest.wait(Clock::now() + milliseconds(100)), State::Pending) << "no longer known";
}

TEST_F(AgreementTest, WrongUseIsRefusedAtOnce) {
  startRoot();
  Agreement noRank(options(2, 2));
  EXPECT_EQ(noRank.start(1, "x").code(), Code::InvalidArgument);
  Agreement member(options(0, 1));
  EXPECT_FALSE(member.start(2, "x"));
  EXPECT_FALSE(member.start(1, std::string(wire::kMaxPayload + 1, 'x')));
  EXPECT_EQ(member.state(), State::Idle);
  ASSERT_TRUE(member.start(1, "x"));
  EXPECT_FALSE(member.start(1, "x"));
  ASSERT_EQ(member.wait(), State::Done);
  EXPECT_TRUE(member.verdict().steer);
  AgreementRoot unused;
  char id[kUniqueIdBytes] = {};
  Tail tail;
  EXPECT_FALSE(unused.newCommunicator(id, &tail));
}

}  // namespace
}  // namespace hoccl
