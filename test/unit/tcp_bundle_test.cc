// Bundles of TCP sockets over loopback, IPv4 and IPv6: set-up in any order of arrival, strangers,
// messages, transfers, ends.

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/random.h"
#include "common/net/tcp/bundle.h"
#include "common/net/tcp/bundle_setup.h"
#include "common/net/tcp/bundle_wire.h"
#include "test/unit/fakes.h"

namespace hoccl {
namespace {

using test::pick;
using test::Rng;
using test::testSeed;
using test::waitUntil;
using State = BundleSetup::State;

BundleHello helloOf(std::string_view text) {
  BundleHello hello{};
  std::memcpy(hello.data(), text.data(), text.size());
  return hello;
}
bool says(const BundleHello& hello, std::string_view text) {
  return std::memcmp(hello.data(), text.data(), text.size()) == 0;
}

SocketAddress localhost(int family) {
  SocketAddress address;
  const Status status = SocketAddress::parse(family == AF_INET ? "127.0.0.1" : "::1", &address);
  EXPECT_TRUE(status) << status.message();
  return address;
}

/// Places every payload in one buffer, at the offset its piece says; counts.
struct Landing final : FrameSink {
  explicit Landing(std::size_t bytes) : memory(bytes) {}
  std::byte* place(const FrameHeader& header, Status* bad) override {
    if (closed.load()) return nullptr;
    PieceHeader piece;
    std::memcpy(&piece, header.user.data(), sizeof piece);
    if (piece.offset > memory.size() || header.bytes > memory.size() - piece.offset) {
      *bad = Status::error(Code::Remote, "a piece beyond the buffer");
      return nullptr;
    }
    return memory.data() + piece.offset;
  }
  void arrived(const FrameHeader& header) override { bytes.fetch_add(header.bytes); }
  std::vector<std::byte> memory;
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<bool> closed{false};
};

/// Keeps messages as strings.
struct Mailbox final : FrameSink {
  std::byte* place(const FrameHeader& header, Status*) override {
    text.resize(header.bytes);
    return reinterpret_cast<std::byte*>(text.data());
  }
  void arrived(const FrameHeader& header) override {
    if (header.bytes == 0) text.clear();
    got.emplace_back(header.kind, text);
  }
  std::string text;
  std::deque<std::pair<std::uint16_t, std::string>> got;
};

struct Ends {
  std::unique_ptr<Bundle> a, b;
};

class TcpBundleTest : public ::testing::TestWithParam<int> {
 protected:
  std::unique_ptr<BundleListener> listen(const BundleOptions& options = {}) {
    std::unique_ptr<BundleListener> listener;
    const Status status = BundleListener::open(localhost(GetParam()), options, &listener);
    EXPECT_TRUE(status) << status.message();
    return listener;
  }
  std::unique_ptr<BundleSetup> connect(const BundleListener& to, std::string_view hello = "a",
                                       const BundleOptions& options = {}) {
    std::unique_ptr<BundleSetup> setup;
    const Status status = connectBundle(to.address(), to.nonce(), localhost(GetParam()),
                                        helloOf(hello), options, &setup);
    EXPECT_TRUE(status) << status.message();
    return setup;
  }
  /// The accepting side of the next peer, while `asking` goes on.
  std::unique_ptr<BundleSetup> taken(BundleListener& by, BundleSetup* asking) {
    std::unique_ptr<BundleSetup> setup;
    EXPECT_TRUE(waitUntil([&] {
      if (asking) asking->advance();
      return (setup = by.accept()) != nullptr;
    }));
    return setup;
  }
  bool bothDone(BundleSetup& a, BundleSetup& b) {
    return waitUntil([&] {
             const State first = a.advance(), second = b.advance();
             return first != State::Pending && second != State::Pending;
           }) &&
           a.advance() == State::Done && b.advance() == State::Done;
  }
  Ends join(FrameSink* atA, FrameSink* atB, const BundleOptions& options = {}) {
    auto listener = listen(options);
    auto asking = connect(*listener, "a", options);
    auto answering = taken(*listener, asking.get());
    Ends ends;
    if (!answering) return ends;
    answering->accept(helloOf("b"));
    EXPECT_TRUE(bothDone(*asking, *answering))
        << asking->status().message() << " / " << answering->status().message();
    EXPECT_TRUE(asking->take(atA, &ends.a));
    EXPECT_TRUE(answering->take(atB, &ends.b));
    return ends;
  }
  UniqueFd stranger(const BundleListener& to) {
    sockaddr_storage address;
    const socklen_t length = to.address().toSockaddr(&address);
    UniqueFd fd(::socket(GetParam(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    return fd;
  }
  /// True once the other end has closed it.
  bool dropped(const UniqueFd& fd, BundleListener& by) {
    return waitUntil([&] {
      EXPECT_EQ(by.accept(), nullptr);
      char byte;
      const ssize_t got = ::recv(fd.get(), &byte, 1, MSG_DONTWAIT);
      return got == 0 || (got < 0 && errno == ECONNRESET);
    });
  }
};

TEST_P(TcpBundleTest, HelloAndReplyTravelAndBothSidesAreDone) {
  auto listener = listen();
  auto asking = connect(*listener, "who I am");
  EXPECT_EQ(asking->advance(), State::Pending);
  auto answering = taken(*listener, asking.get());
  ASSERT_NE(answering, nullptr);
  EXPECT_TRUE(says(answering->hello(), "who I am"));
  EXPECT_EQ(answering->advance(), State::Pending);
  answering->accept(helloOf("and I"));
  ASSERT_TRUE(bothDone(*asking, *answering));
  EXPECT_TRUE(says(asking->hello(), "and I"));
  EXPECT_EQ(listener->accept(), nullptr);
}

TEST_P(TcpBundleTest, SeveralPeersAtOnceInAnyOrder) {
  auto listener = listen();
  constexpr int kPeers = 9;
  std::vector<std::unique_ptr<BundleSetup>> asking, answering;
  for (int i = 0; i < kPeers; ++i) asking.push_back(connect(*listener, fmt::format("peer {}", i)));
  Rng rng(testSeed());
  ASSERT_TRUE(waitUntil([&] {
    asking[pick(rng, 0, kPeers - 1)]->advance();
    if (auto setup = listener->accept()) {
      setup->accept(setup->hello());
      answering.push_back(std::move(setup));
    }
    return answering.size() == kPeers;
  }));
  ASSERT_TRUE(waitUntil([&] {
    int pending = 0;
    for (auto* setups : {&asking, &answering}) {
      for (auto& setup : *setups) pending += setup->advance() == State::Pending;
    }
    return pending == 0;
  }));
  for (int i = 0; i < kPeers; ++i) {
    EXPECT_EQ(asking[i]->advance(), State::Done) << asking[i]->status().message();
    EXPECT_TRUE(says(asking[i]->hello(), fmt::format("peer {}", i)));
  }
}

/// The setup of one peer looks at the listener, too, and may be the one that finds another.
TEST_P(TcpBundleTest, APeerThatASetupHasFoundIsTold) {
  auto listener = listen();
  auto first = connect(*listener, "first");
  auto answering = taken(*listener, first.get());
  ASSERT_TRUE(answering);
  auto second = connect(*listener, "second");
  // All that the second sends has come before anybody looks.
  for (int i = 0; i < 50; ++i) {
    second->advance();
    ::usleep(1000);
  }
  answering->advance();
  pollfd watched{listener->watchFd(), POLLIN, 0};
  EXPECT_EQ(::poll(&watched, 1, 0), 1) << "nobody would ask the listener";
  auto other = listener->accept();
  ASSERT_TRUE(other);
  EXPECT_TRUE(says(other->hello(), "second"));
  EXPECT_FALSE(listener->accept());
  EXPECT_EQ(::poll(&watched, 1, 0), 0) << "it would be asked for ever";
}

TEST_P(TcpBundleTest, ARefusalCarriesCodeAndReason) {
  auto listener = listen();
  auto asking = connect(*listener);
  auto answering = taken(*listener, asking.get());
  ASSERT_NE(answering, nullptr);
  answering->refuse(7, "there is no room");
  EXPECT_EQ(answering->advance(), State::Failed);
  answering.reset();
  ASSERT_TRUE(waitUntil([&] { return asking->advance() != State::Pending; }));
  EXPECT_EQ(asking->advance(), State::Failed);
  EXPECT_EQ(asking->refusal(), 7u);
  EXPECT_NE(asking->status().message().find("there is no room"), std::string::npos)
      << asking->status().message();
}

TEST_P(TcpBundleTest, NobodyListens) {
  auto listener = listen();
  const SocketAddress address = listener->address();
  const BundleNonce nonce = listener->nonce();
  listener.reset();
  std::unique_ptr<BundleSetup> asking;
  Status status = connectBundle(address, nonce, address, {}, {}, &asking);
  if (status) {
    ASSERT_TRUE(waitUntil([&] { return asking->advance() != State::Pending; }));
    status = asking->status();
  }
  ASSERT_FALSE(status);
  EXPECT_NE(status.message().find("nobody listens"), std::string::npos) << status.message();
}

TEST_P(TcpBundleTest, Rule10StrangersAreDroppedAndDisturbNobody) {
  BundleOptions options;
  options.timeoutMs = 400;
  auto listener = listen(options);
  Rng rng(testSeed());
  UniqueFd silent = stranger(*listener);
  for (std::size_t bytes : {1u, 7u, 8u, 64u, 127u, 128u, 129u, 4000u}) {
    UniqueFd fd = stranger(*listener);
    std::vector<std::uint8_t> garbage(bytes);
    for (auto& byte : garbage) byte = static_cast<std::uint8_t>(rng());
    ASSERT_EQ(::send(fd.get(), garbage.data(), bytes, MSG_NOSIGNAL), static_cast<ssize_t>(bytes));
    EXPECT_TRUE(dropped(fd, *listener)) << bytes;
  }
  {  // the right words with a guess at the nonce
    UniqueFd fd = stranger(*listener);
    bundle_wire::Greeting greeting;
    greeting.dataSockets = 1;
    greeting.nonce = listener->nonce();
    greeting.nonce[15] ^= 1;
    ASSERT_EQ(::send(fd.get(), &greeting, sizeof greeting, 0), ssize_t{sizeof greeting});
    EXPECT_TRUE(dropped(fd, *listener));
  }
  UniqueFd mute = stranger(*listener);
  auto asking = connect(*listener);
  auto answering = taken(*listener, asking.get());
  ASSERT_NE(answering, nullptr);
  answering->accept({});
  EXPECT_TRUE(bothDone(*asking, *answering));
  EXPECT_TRUE(dropped(silent, *listener));
  EXPECT_TRUE(dropped(mute, *listener));
}

TEST_P(TcpBundleTest, Rule10FuzzedGreetingsByOneWhoKnowsTheNonce) {
  BundleOptions options;
  options.timeoutMs = 300;
  auto listener = listen(options);
  Rng rng(testSeed());
  std::vector<std::unique_ptr<BundleSetup>> taken;
  for (int round = 0; round < 400; ++round) {
    UniqueFd fd = stranger(*listener);
    bundle_wire::Greeting greeting;
    greeting.nonce = listener->nonce();
    greeting.role = static_cast<bundle_wire::Role>(pick(rng, 0, 3));
    greeting.index = static_cast<std::uint16_t>(pick(rng, 0, 70));
    greeting.dataSockets = static_cast<std::uint16_t>(pick(rng, 0, 70));
    greeting.bundle[0] = static_cast<std::uint8_t>(pick(rng, 0, 5));  // several meet
    if (pick(rng, 0, 9) == 0) greeting.version = static_cast<std::uint16_t>(rng());
    std::string bytes(reinterpret_cast<char*>(&greeting), sizeof greeting);
    if (pick(rng, 0, 4) == 0) bytes[pick(rng, 0, bytes.size() - 1)] = static_cast<char>(rng());
    if (pick(rng, 0, 4) == 0) bytes.resize(pick(rng, 0, bytes.size()));
    if (pick(rng, 0, 4) == 0) bytes.append(pick(rng, 1, 300), 'x');
    (void)::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (pick(rng, 0, 1) == 0) fd.reset();
    if (auto setup = listener->accept()) {
      if (pick(rng, 0, 1) == 0) setup->accept({});
      taken.push_back(std::move(setup));
    }
    for (auto& setup : taken) setup->advance();
    if (pick(rng, 0, 20) == 0) taken.clear();
  }
  taken.clear();
  auto asking = connect(*listener, "the real one");
  std::unique_ptr<BundleSetup> answering;
  ASSERT_TRUE(waitUntil([&] {
    asking->advance();
    answering = listener->accept();
    return answering && says(answering->hello(), "the real one");
  }));
  answering->accept({});
  EXPECT_TRUE(bothDone(*asking, *answering));
}

TEST_P(TcpBundleTest, Rule10NonsenseOnADataSocketEndsTheBundleWithOneLine) {
  auto listener = listen();
  // A peer that knows the nonce and does the set-up right, then sends garbage.
  bundle_wire::Greeting greeting;
  greeting.nonce = listener->nonce();
  greeting.dataSockets = 1;
  UniqueFd sockets[3];
  for (int role = 0; role < 3; ++role) {
    sockets[role] = stranger(*listener);
    greeting.role = static_cast<bundle_wire::Role>(role);
    ASSERT_EQ(::send(sockets[role].get(), &greeting, sizeof greeting, 0), ssize_t{sizeof greeting});
  }
  auto answering = taken(*listener, nullptr);
  ASSERT_NE(answering, nullptr);
  answering->accept({});
  ASSERT_TRUE(waitUntil([&] { return answering->advance() == State::Done; }));
  Landing sink(1000);
  std::unique_ptr<Bundle> bundle;
  ASSERT_TRUE(answering->take(&sink, &bundle));
  FrameHeader beyond;
  beyond.bytes = 5000;  // allowed as a frame, but the sink has no place for it
  ASSERT_EQ(::send(sockets[2].get(), &beyond, sizeof beyond, 0), ssize_t{sizeof beyond});
  EXPECT_TRUE(waitUntil([&] { return bundle->gone(); }, 900)) << "at once";
  EXPECT_NE(bundle->status().message().find("beyond the buffer"), std::string::npos)
      << bundle->status().message();
}

TEST_P(TcpBundleTest, Rule10AnotherVersionIsNamed) {
  auto listener = listen();
  UniqueFd fd = stranger(*listener);
  bundle_wire::Greeting greeting;
  greeting.version = bundle_wire::kVersion + 1;
  greeting.dataSockets = 1;
  greeting.nonce = listener->nonce();
  ASSERT_EQ(::send(fd.get(), &greeting, sizeof greeting, 0), ssize_t{sizeof greeting});
  bundle_wire::Answer answer;
  ASSERT_TRUE(waitUntil([&] {
    EXPECT_EQ(listener->accept(), nullptr);
    return ::recv(fd.get(), &answer, sizeof answer, MSG_DONTWAIT | MSG_PEEK) ==
           ssize_t{sizeof answer};
  }));
  ASSERT_EQ(::recv(fd.get(), &answer, sizeof answer, 0), ssize_t{sizeof answer});
  EXPECT_EQ(answer.code, bundle_wire::kVersionDiffers);
  EXPECT_NE(std::string(answer.reason.data()).find("two builds"), std::string::npos);
}

TEST_P(TcpBundleTest, Rule10AnAnswerThatIsNot) {
  for (std::size_t bytes : {0u, 3u, 255u, 256u, 300u}) {
    UniqueFd listener(::socket(GetParam(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_storage address;
    socklen_t length = localhost(GetParam()).toSockaddr(&address);
    ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
    ASSERT_EQ(::listen(listener.get(), 16), 0);
    length = sizeof address;
    ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
    SocketAddress to;
    ASSERT_TRUE(SocketAddress::fromSockaddr(reinterpret_cast<sockaddr*>(&address), length, &to));
    std::unique_ptr<BundleSetup> asking;
    ASSERT_TRUE(connectBundle(to, {}, to, {}, {}, &asking));
    std::vector<UniqueFd> sockets;
    for (int i = 0; i < 3; ++i) {
      sockets.emplace_back(::accept(listener.get(), nullptr, nullptr));
      const std::vector<std::uint8_t> garbage(bytes, 0x5a);
      (void)::send(sockets.back().get(), garbage.data(), bytes, MSG_NOSIGNAL);
      if (bytes < 256) sockets.back().reset();
    }
    ASSERT_TRUE(waitUntil([&] { return asking->advance() != State::Pending; })) << bytes;
    EXPECT_EQ(asking->advance(), State::Failed);
    EXPECT_FALSE(asking->status().message().empty());
  }
}

TEST_P(TcpBundleTest, Rule9APeerThatSaysNothingEndsTheSetUpInTime) {
  BundleOptions options;
  options.timeoutMs = 300;
  auto listener = listen(options);
  auto asking = connect(*listener, "a", options);
  const std::uint64_t begin = monotonicNs();
  ASSERT_TRUE(waitUntil([&] { return asking->advance() != State::Pending; }));
  EXPECT_EQ(asking->advance(), State::Failed);
  EXPECT_LT(monotonicNs() - begin, 3'000'000'000u);
  EXPECT_NE(asking->status().message().find("HOCCL_TIMEOUT_MS"), std::string::npos)
      << asking->status().message();
}

TEST_P(TcpBundleTest, Rule9ThePeerGoesDuringTheSetUp) {
  auto listener = listen();
  auto asking = connect(*listener);
  auto answering = taken(*listener, asking.get());
  ASSERT_NE(answering, nullptr);
  asking.reset();
  answering->accept({});
  ASSERT_TRUE(waitUntil([&] { return answering->advance() != State::Pending; }));
  // All of its sockets may have come before it went; then its end shows on the bundle.
  if (answering->advance() == State::Done) {
    Landing sink(1);
    std::unique_ptr<Bundle> bundle;
    ASSERT_TRUE(answering->take(&sink, &bundle));
    EXPECT_TRUE(waitUntil([&] { return bundle->gone(); }));
  }
}

TEST_P(TcpBundleTest, ControlMessagesInOrderBothWays) {
  Landing none(0);
  Ends ends = join(&none, &none);
  ASSERT_TRUE(ends.a && ends.b);
  Mailbox atA, atB;
  Rng rng(testSeed());
  std::deque<std::string> toA, toB;
  std::size_t checkedA = 0, checkedB = 0;
  const std::array<std::byte, kFrameUserBytes> user{};
  for (int i = 0; i < 3000 || checkedA < toA.size() || checkedB < toB.size(); ++i) {
    ASSERT_LT(i, 1'000'000);
    if (i < 3000) {
      std::string text(pick(rng, 0, 5) == 0 ? pick(rng, 0, 65536) : pick(rng, 0, 100),
                       static_cast<char>('a' + i % 26));
      if (i % 2 == 0 && ends.a->sendControl(3, user, text.data(), text.size())) toB.push_back(text);
      if (i % 2 == 1 && ends.b->sendControl(4, user, text.data(), text.size())) toA.push_back(text);
    }
    if (i >= 3000 || pick(rng, 0, 3) == 0) ends.a->receiveControl(atA);
    if (i >= 3000 || pick(rng, 0, 3) == 0) ends.b->receiveControl(atB);
    for (; !atA.got.empty(); atA.got.pop_front(), ++checkedA) {
      ASSERT_EQ(atA.got.front().first, 4);
      ASSERT_EQ(atA.got.front().second, toA.at(checkedA));
    }
    for (; !atB.got.empty(); atB.got.pop_front(), ++checkedB) {
      ASSERT_EQ(atB.got.front().first, 3);
      ASSERT_EQ(atB.got.front().second, toB.at(checkedB));
    }
  }
  EXPECT_GT(toA.size(), 0u);
  EXPECT_GT(toB.size(), 0u);
}

TEST_P(TcpBundleTest, TransfersArriveWhole) {
  for (const auto& [threads, sockets] : {std::pair{1u, 1u}, {1u, 3u}, {2u, 2u}, {4u, 1u}}) {
    BundleOptions options;
    options.threads = threads;
    options.socketsPerThread = sockets;
    Rng rng(testSeed());
    for (std::size_t bytes : {std::size_t{1}, std::size_t{65'536}, std::size_t{65'537},
                              std::size_t{5'000'001}, std::size_t{48'000'000}}) {
      Landing atA(1), atB(bytes);
      Ends ends = join(&atA, &atB, options);
      ASSERT_TRUE(ends.a && ends.b);
      EXPECT_EQ(ends.b->dataSockets(), threads * sockets);
      std::vector<std::byte> data(bytes);
      for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 31 + i / 4099);
      std::atomic<std::uint64_t> done{0};
      ASSERT_TRUE(ends.a->post({.data = data.data(), .bytes = bytes, .done = &done}));
      ASSERT_TRUE(waitUntil([&] { return done.load() == bytes; }));
      ASSERT_TRUE(waitUntil([&] { return atB.bytes.load() == bytes; }));
      EXPECT_EQ(std::memcmp(atB.memory.data(), data.data(), bytes), 0);
      EXPECT_TRUE(waitUntil([&] { return ends.a->drained(); }));
    }
  }
}

TEST_P(TcpBundleTest, ManySmallTransfersFillTheRingAndAllArrive) {
  static constexpr std::size_t kEach = 3000, kCount = 5000;
  BundleOptions options;
  options.threads = 2;
  /// Two threads receive at once, each into a place of its own.
  struct Counting final : FrameSink {
    std::byte* place(const FrameHeader& header, Status*) override {
      thread_local std::vector<std::byte> memory(kEach);
      EXPECT_EQ(header.bytes, kEach);
      return memory.data();
    }
    void arrived(const FrameHeader& header) override { bytes.fetch_add(header.bytes); }
    std::atomic<std::uint64_t> bytes{0};
  } atB;
  Landing atA(1);
  Ends ends = join(&atA, &atB, options);
  ASSERT_TRUE(ends.a && ends.b);
  std::vector<std::byte> data(kEach, std::byte{5});
  std::atomic<std::uint64_t> done{0};
  std::size_t refused = 0;
  for (std::size_t i = 0; i < kCount;) {
    if (ends.a->post({.data = data.data(), .bytes = kEach, .done = &done})) {
      ++i;
    } else {
      ++refused;
      std::this_thread::yield();
    }
  }
  EXPECT_GT(refused, 0u);
  EXPECT_TRUE(waitUntil([&] { return atB.bytes.load() == kEach * kCount; }));
  EXPECT_EQ(done.load(), kEach * kCount);
}

TEST_P(TcpBundleTest, ASinkThatSaysNotNowIsAskedAgainAfterResume) {
  constexpr std::size_t kBytes = 64'000'000;  // more than the sockets hold
  Landing atA(1), atB(kBytes);
  atB.closed = true;
  Ends ends = join(&atA, &atB);
  ASSERT_TRUE(ends.a && ends.b);
  std::vector<std::byte> data(kBytes, std::byte{9});
  std::atomic<std::uint64_t> done{0};
  ASSERT_TRUE(ends.a->post({.data = data.data(), .bytes = kBytes, .done = &done}));
  ::usleep(100'000);
  EXPECT_EQ(atB.bytes.load(), 0u);
  EXPECT_LT(done.load(), kBytes) << "the network holds so much?";
  EXPECT_FALSE(ends.a->drained());
  atB.closed = false;
  ends.b->resumeData();
  EXPECT_TRUE(waitUntil([&] { return atB.bytes.load() == kBytes; }));
}

TEST_P(TcpBundleTest, ANudgeRingsThePeersWatch) {
  Landing none(0);
  Ends ends = join(&none, &none);
  ASSERT_TRUE(ends.a && ends.b);
  pollfd watched{ends.b->watchFd(), POLLIN, 0};
  EXPECT_EQ(::poll(&watched, 1, 50), 0);
  ends.a->nudge();
  EXPECT_EQ(::poll(&watched, 1, 20'000), 1);
  EXPECT_FALSE(ends.b->gone());
}

TEST_P(TcpBundleTest, Rule9WhatWasSentBeforeTheEndStillComes) {
  constexpr std::size_t kBytes = 3'000'000;
  Landing atA(1), atB(kBytes);
  Ends ends = join(&atA, &atB);
  ASSERT_TRUE(ends.a && ends.b);
  std::vector<std::byte> data(kBytes, std::byte{9});
  std::atomic<std::uint64_t> done{0};
  ASSERT_TRUE(ends.a->post({.data = data.data(), .bytes = kBytes, .done = &done}));
  ASSERT_TRUE(ends.a->sendControl(1, {}, "bye", 3));
  ASSERT_TRUE(waitUntil([&] { return done.load() == kBytes; }));
  ends.a.reset();
  pollfd watched{ends.b->watchFd(), POLLIN, 0};
  EXPECT_EQ(::poll(&watched, 1, 20'000), 1);
  EXPECT_TRUE(waitUntil([&] { return ends.b->gone(); }));
  EXPECT_EQ(atB.bytes.load(), kBytes);
  Mailbox mail;
  EXPECT_TRUE(waitUntil([&] { return ends.b->receiveControl(mail); }));
  EXPECT_EQ(mail.got.front().second, "bye");
  EXPECT_NE(ends.b->status().message().find("closed the connection"), std::string::npos)
      << ends.b->status().message();
  EXPECT_FALSE(ends.b->post({.data = data.data(), .bytes = 1, .done = &done}));
}

TEST_P(TcpBundleTest, Rule9AKilledPeerShowsAtOnce) {
  auto listener = listen();
  const pid_t child = ::fork();
  if (child == 0) {
    std::unique_ptr<BundleSetup> setup;
    if (!connectBundle(listener->address(), listener->nonce(), listener->address(), {}, {},
                       &setup)) {
      ::_exit(1);
    }
    while (setup->advance() == State::Pending) ::usleep(1000);
    Landing sink(1);
    std::unique_ptr<Bundle> bundle;
    if (setup->advance() != State::Done || !setup->take(&sink, &bundle)) ::_exit(2);
    std::vector<std::byte> data(64'000'000);
    std::atomic<std::uint64_t> done{0};
    (void)bundle->post({.data = data.data(), .bytes = data.size(), .done = &done});
    for (;;) ::pause();
  }
  auto answering = taken(*listener, nullptr);
  ASSERT_NE(answering, nullptr);
  answering->accept({});
  ASSERT_TRUE(waitUntil([&] { return answering->advance() != State::Pending; }));
  ASSERT_EQ(answering->advance(), State::Done) << answering->status().message();
  Landing sink(64'000'000);
  sink.closed = true;  // in the middle of a transfer that nobody takes
  std::unique_ptr<Bundle> bundle;
  ASSERT_TRUE(answering->take(&sink, &bundle));
  ::usleep(50'000);
  EXPECT_FALSE(bundle->gone());
  ::kill(child, SIGKILL);
  const std::uint64_t begin = monotonicNs();
  EXPECT_TRUE(waitUntil([&] { return bundle->gone(); }));
  EXPECT_LT(monotonicNs() - begin, 5'000'000'000u);
  int state = 0;
  ::waitpid(child, &state, 0);
  EXPECT_TRUE(WIFSIGNALED(state));
}

TEST_P(TcpBundleTest, Rule9AStoppedPeerIsWaitedFor) {
  BundleOptions options;
  options.timeoutMs = 1000;
  constexpr std::size_t kBytes = 32'000'000;
  Landing atA(1), atB(kBytes);
  atB.closed = true;  // as if its process were stopped
  Ends ends = join(&atA, &atB, options);
  ASSERT_TRUE(ends.a && ends.b);
  std::vector<std::byte> data(kBytes, std::byte{3});
  std::atomic<std::uint64_t> done{0};
  ASSERT_TRUE(ends.a->post({.data = data.data(), .bytes = kBytes, .done = &done}));
  ::usleep(2'500'000);
  EXPECT_FALSE(ends.a->gone()) << ends.a->status().message();
  atB.closed = false;
  ends.b->resumeData();
  EXPECT_TRUE(waitUntil([&] { return atB.bytes.load() == kBytes; }));
}

INSTANTIATE_TEST_SUITE_P(Families, TcpBundleTest, ::testing::Values(AF_INET, AF_INET6),
                         [](const ::testing::TestParamInfo<int>& info) {
                           return std::string(info.param == AF_INET ? "IPv4" : "IPv6");
                         });

}  // namespace
}  // namespace hoccl
