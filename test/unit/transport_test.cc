// What every transport promises, checked on each of them through the interface alone. What only one
// of them can be fed (a stranger's bytes) is behind TransportKind.

#include "common/net/transport.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/shared_memory.h"
#include "common/base/unix_socket.h"
#include "common/net/shm/shm_transport.h"
#include "common/net/tcp/tcp_transport.h"
#include "common/net/verbs/verbs_transport.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fake_verbs.h"
#include "test/unit/fakes.h"

namespace hoccl {
namespace {

using test::pick;
using test::Rng;
using test::testSeed;
using test::waitUntil;
using State = Handshake::State;
using Decision = Handshake::Decision;

struct TransportKind {
  const char* name;
  Status (*make)(const PeerId& self, const StagingGeometry& geometry,
                 std::unique_ptr<Transport>* out);
  /// A bare connection to a transport's address, and a bare listener; null where strangers do not
  /// get as far as the interface (tcp: tcp_bundle_test).
  Status (*knock)(const std::string& address, UniqueFd* out);
  Status (*listen)(const std::string& address, UniqueFd* out);
  /// Why it cannot be tried on this machine; null or empty: it can.
  std::string (*missing)() = nullptr;
  friend void PrintTo(const TransportKind& kind, std::ostream* out) { *out << kind.name; }
};

const TransportKind kShm{
    "shm", makeShmTransport,
    [](const std::string& address, UniqueFd* out) { return connectUnix(address, 1000, out); },
    [](const std::string& address, UniqueFd* out) { return listenUnix(address, out); }};

template <int kFamily>
Status makeTcp(const PeerId& self, const StagingGeometry& geometry,
               std::unique_ptr<Transport>* out) {
  SocketAddress local;
  if (Status s = SocketAddress::parse(kFamily == AF_INET ? "127.0.0.1" : "::1", &local); !s) {
    return s;
  }
  return makeTcpTransport(self, geometry, local, {.threads = 2, .socketsPerThread = 2}, out);
}
const TransportKind kTcp4{"tcp", makeTcp<AF_INET>, nullptr, nullptr};
const TransportKind kTcp6{"tcp", makeTcp<AF_INET6>, nullptr, nullptr};

constexpr StagingGeometry kGeometry{4, 128 << 10};
constexpr PeerId kA{1, 10}, kB{1, 20}, kC{1, 30};

Status makeVerbs(const VerbsLibrary& library, const PeerId& self, const StagingGeometry& geometry,
                 std::unique_ptr<Transport>* out) {
  SocketAddress local;
  VerbsSettings settings;
  if (Status s = SocketAddress::parse("127.0.0.1", &local); !s) return s;
  if (Status s = VerbsSettings::fromEnvironment(Config::defaults(), &settings); !s) return s;
  return makeVerbsTransport(self, geometry, library, settings, local, {}, out);
}
/// Between two hosts of the fake library, with two NICs each.
const TransportKind kVerbsFake{
    "verbs",
    [](const PeerId& self, const StagingGeometry& geometry, std::unique_ptr<Transport>* out) {
      test::FakeFabric& fabric = test::FakeFabric::get();
      if (fabric.hosts[0].empty()) {
        for (int host : {0, 1}) {
          fabric.add(host, "fake_0", fmt::format("10.0.0.{}", host + 1));
          fabric.add(host, "fake_1", fmt::format("10.0.1.{}", host + 1));
        }
      }
      return makeVerbs(fabric.library(self == kB ? 1 : 0), self, geometry, out);
    },
    nullptr, nullptr};
/// Over the devices of this machine, to itself.
const TransportKind kVerbs{
    "verbs",
    [](const PeerId& self, const StagingGeometry& geometry, std::unique_ptr<Transport>* out) {
      const VerbsLibrary* library = nullptr;
      if (Status s = VerbsLibrary::load(&library); !s) return s;
      return makeVerbs(*library, self, geometry, out);
    },
    nullptr, nullptr,
    []() -> std::string {
      const VerbsLibrary* library = nullptr;
      Nics nics;
      Status status = VerbsLibrary::load(&library);
      if (status) status = openNics(*library, {}, &nics);
      return status.message();
    }};

struct Ends {
  std::unique_ptr<Connection> a, b;
};

class TransportTest : public ::testing::TestWithParam<TransportKind> {
 protected:
  void SetUp() override {
    const std::string why = GetParam().missing ? GetParam().missing() : std::string();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  std::unique_ptr<Transport> open(const PeerId& self, const StagingGeometry& geometry = kGeometry) {
    std::unique_ptr<Transport> transport;
    const Status status = GetParam().make(self, geometry, &transport);
    EXPECT_TRUE(status) << status.message();
    return transport;
  }
  std::unique_ptr<Handshake> knock(Transport& from, const PeerId& peer, const Transport& to) {
    std::unique_ptr<Handshake> handshake;
    const Status status = from.connect(peer, to.address(), &handshake);
    EXPECT_TRUE(status) << status.message();
    return handshake;
  }
  std::unique_ptr<Handshake> taken(Transport& by) {
    std::unique_ptr<Handshake> handshake;
    EXPECT_TRUE(waitUntil([&] { return (handshake = by.accept()) != nullptr; }));
    return handshake;
  }
  /// Advances until it knows its peer or is over.
  State greeted(Handshake& handshake) {
    State state = State::Pending;
    EXPECT_TRUE(waitUntil([&] {
      state = handshake.advance();
      return state != State::Pending || handshake.peer() != nullptr;
    }));
    return state;
  }
  /// Until it is over. `other`: the other side, where that has to take part.
  State settled(Handshake& handshake, Handshake* other = nullptr) {
    State state = State::Pending;
    EXPECT_TRUE(waitUntil([&] {
      if ((state = handshake.advance()) != State::Pending) return true;
      if (other) other->advance();
      return false;
    }));
    return state;
  }
  Ends join(Transport& a, Transport& b, const PeerId& idOfB) {
    Ends ends;
    auto asking = knock(a, idOfB, b);
    auto answering = taken(b);
    if (!asking || !answering) return ends;
    EXPECT_EQ(greeted(*answering), State::Pending);
    answering->decide(Decision::Accept, "");
    EXPECT_EQ(settled(*answering, asking.get()), State::Done);
    EXPECT_EQ(settled(*asking), State::Done);
    ends.a = asking->take();
    ends.b = answering->take();
    return ends;
  }
  Ends joinFresh() {
    a_ = open(kA);
    b_ = open(kB);
    return join(*a_, *b_, kB);
  }
  std::unique_ptr<Transport> a_, b_;
};

Message numbered(std::uint64_t n) {
  Message m{};
  m.type = MessageType::Chunk;
  m.slot = static_cast<std::uint32_t>(n % 7);
  m.communicator = ~n;
  m.source = 1;
  m.destination = 2;
  m.pairSequence = n;
  m.bytes = 3 * n;
  m.offset = 5 * n;
  m.length = 7 * n;
  m.turn = n + 1;
  return m;
}
bool isNumbered(const Message& m, std::uint64_t n) {
  const Message expected = numbered(n);
  return std::memcmp(&m, &expected, sizeof m) == 0;
}

TEST_P(TransportTest, AddressIsShortAndNobodyElses) {
  auto a = open(kA), b = open(kB);
  EXPECT_LE(a->address().size(), 64u);
  EXPECT_FALSE(a->address().empty());
  EXPECT_NE(a->address(), b->address());
  EXPECT_STREQ(a->name(), GetParam().name);
  EXPECT_EQ(a->accept(), nullptr);
}

TEST_P(TransportTest, ConnectingAndAcceptingSideLearnWhoTheOtherIs) {
  auto a = open(kA), b = open(kB);
  auto asking = knock(*a, kB, *b);
  ASSERT_NE(asking, nullptr);
  EXPECT_FALSE(asking->accepting());
  ASSERT_NE(asking->peer(), nullptr);
  EXPECT_EQ(*asking->peer(), kB);
  EXPECT_EQ(asking->advance(), State::Pending) << "nobody has answered yet";
  pollfd listener{b->listenFd(), POLLIN, 0};
  EXPECT_EQ(::poll(&listener, 1, 20'000), 1);
  auto answering = taken(*b);
  ASSERT_NE(answering, nullptr);
  EXPECT_TRUE(answering->accepting());
  EXPECT_EQ(greeted(*answering), State::Pending);
  ASSERT_NE(answering->peer(), nullptr);
  EXPECT_EQ(*answering->peer(), kA);
  answering->decide(Decision::Accept, "");
  // From then on each is asked only when its descriptor says so.
  State asker = State::Pending, answerer = answering->advance();
  EXPECT_TRUE(waitUntil([&] {
    pollfd fds[] = {{asking->watchFd(), POLLIN, 0}, {answering->watchFd(), POLLIN, 0}};
    if (::poll(fds, 2, 20'000) <= 0) return true;
    if (fds[0].revents && asker == State::Pending) asker = asking->advance();
    if (fds[1].revents && answerer == State::Pending) answerer = answering->advance();
    return asker != State::Pending && answerer != State::Pending;
  }));
  EXPECT_EQ(asker, State::Done);
  EXPECT_EQ(answerer, State::Done);
  auto atA = asking->take(), atB = answering->take();
  ASSERT_TRUE(atA && atB);
  EXPECT_EQ(atA->peer(), kB);
  EXPECT_EQ(atB->peer(), kA);
  EXPECT_STREQ(atA->transport(), GetParam().name);
  EXPECT_FALSE(atA->peerGone());
  EXPECT_FALSE(atB->peerGone());
}

TEST_P(TransportTest, NobodyListening) {
  auto a = open(kA), b = open(kB);
  const std::string address = b->address();
  b.reset();
  std::unique_ptr<Handshake> handshake;
  const Status status = a->connect(kB, address, &handshake);
  // At once, or as soon as the transport knows.
  if (status) {
    ASSERT_NE(handshake, nullptr);
    EXPECT_EQ(settled(*handshake), State::Failed);
    EXPECT_FALSE(handshake->status());
  } else {
    EXPECT_FALSE(status.message().empty());
  }
}

TEST_P(TransportTest, ARefusalCarriesItsReason) {
  auto a = open(kA), b = open(kB);
  auto asking = knock(*a, kB, *b);
  auto answering = taken(*b);
  ASSERT_TRUE(asking && answering);
  EXPECT_EQ(greeted(*answering), State::Pending);
  answering->decide(Decision::Refuse, "a connection from this mover stands");
  EXPECT_EQ(settled(*answering), State::Failed);
  EXPECT_EQ(settled(*asking), State::Failed);
  EXPECT_NE(asking->status().message().find("a connection from this mover stands"),
            std::string::npos)
      << asking->status().message();
}

TEST_P(TransportTest, Rule10DifferingGeometryIsRefusedAndNamedOnBothSides) {
  for (const StagingGeometry& other :
       {StagingGeometry{5, 128 << 10}, StagingGeometry{4, 256 << 10}}) {
    auto a = open(kA), b = open(kB, other);
    auto asking = knock(*a, kB, *b);
    auto answering = taken(*b);
    ASSERT_TRUE(asking && answering);
    EXPECT_EQ(settled(*answering), State::Failed);
    EXPECT_EQ(settled(*asking), State::Failed);
    for (const Handshake* side : {asking.get(), answering.get()}) {
      const std::string text = side->status().message();
      for (const StagingGeometry& g : {kGeometry, other}) {
        EXPECT_NE(text.find(fmt::format("HOCCL_SLOTS={}", g.slots)), std::string::npos) << text;
        EXPECT_NE(text.find(fmt::format("HOCCL_SLOT_BYTES={}", g.slotBytes)), std::string::npos)
            << text;
      }
    }
  }
}

TEST_P(TransportTest, Rule10AGreetingMeantForAnotherMoverIsRefused) {
  auto a = open(kA), b = open(kB);
  auto asking = knock(*a, kC, *b);  // an address that a new process has taken over
  auto answering = taken(*b);
  ASSERT_TRUE(asking && answering);
  EXPECT_EQ(settled(*answering), State::Failed);
  EXPECT_EQ(answering->peer(), nullptr);
  EXPECT_EQ(settled(*asking), State::Failed);
  EXPECT_NE(asking->status().message().find("another mover"), std::string::npos)
      << asking->status().message();
}

TEST_P(TransportTest, Rule10GarbageInsteadOfAGreeting) {
  if (!GetParam().knock) GTEST_SKIP() << "strangers are dropped below: tcp_bundle_test";
  auto a = open(kA), b = open(kB);
  Rng rng(testSeed());
  for (std::size_t bytes : {1u, 8u, 56u, 57u, 400u}) {
    UniqueFd stranger;
    ASSERT_TRUE(GetParam().knock(b->address(), &stranger));
    std::vector<std::uint8_t> garbage(bytes);
    for (auto& byte : garbage) byte = static_cast<std::uint8_t>(rng());
    UniqueFd null(::open("/dev/null", O_RDWR));
    const std::vector<int> fds(bytes % 2 ? 0 : 2, null.get());
    ASSERT_TRUE(sendWithFdsWithin(stranger.get(), garbage.data(), bytes, fds, 1000));
    auto answering = taken(*b);
    ASSERT_NE(answering, nullptr);
    EXPECT_EQ(settled(*answering), State::Failed) << bytes;
    EXPECT_FALSE(answering->status().message().empty());
    EXPECT_EQ(answering->peer(), nullptr);
  }
  {  // one that knocks and goes
    UniqueFd stranger;
    ASSERT_TRUE(GetParam().knock(b->address(), &stranger));
  }
  auto gone = taken(*b);
  ASSERT_NE(gone, nullptr);
  EXPECT_EQ(settled(*gone), State::Failed);
  EXPECT_FALSE(gone->status().message().empty());
  // one that knocks and says nothing holds nobody up
  UniqueFd silent;
  ASSERT_TRUE(GetParam().knock(b->address(), &silent));
  auto mute = taken(*b);
  ASSERT_NE(mute, nullptr);
  EXPECT_EQ(mute->advance(), State::Pending);
  Ends ends = join(*a, *b, kB);
  EXPECT_TRUE(ends.a && ends.b);
  EXPECT_EQ(mute->advance(), State::Pending);
}

TEST_P(TransportTest, Rule10GarbageInsteadOfAnAnswer) {
  if (!GetParam().listen) GTEST_SKIP() << "answers are read below: tcp_bundle_test";
  auto a = open(kA);
  for (std::size_t bytes : {0u, 3u, 240u, 241u}) {  // 0: closes without a word
    const std::string address = fmt::format("hoccl-test-{}-{}", ::getpid(), bytes);
    UniqueFd listener, socket;
    ASSERT_TRUE(GetParam().listen(address, &listener));
    std::unique_ptr<Handshake> asking;
    ASSERT_TRUE(a->connect(kB, address, &asking));
    ASSERT_TRUE(acceptUnixWithin(listener.get(), 20'000, &socket));
    if (bytes > 0) {
      const std::vector<std::uint8_t> garbage(bytes, 0x5a);
      ASSERT_TRUE(sendWithFdsWithin(socket.get(), garbage.data(), bytes, {}, 1000));
    } else {
      socket.reset();
    }
    EXPECT_EQ(settled(*asking), State::Failed) << bytes;
    EXPECT_FALSE(asking->status().message().empty());
    EXPECT_EQ(asking->take(), nullptr);
  }
}

TEST_P(TransportTest, Rule10AGreetingThatSomebodyChangedOnTheWay) {
  if (!GetParam().listen) GTEST_SKIP() << "greetings are read below: tcp_bundle_test";
  // Between a and b: takes a's greeting and passes it on with one byte changed, or with other
  // memory.
  auto a = open(kA), b = open(kB);
  const std::string address = fmt::format("hoccl-test-{}-between", ::getpid());
  UniqueFd listener;
  ASSERT_TRUE(GetParam().listen(address, &listener));
  enum Change { Magic, Protocol, NoMemory, NullDevice, SmallMemory, kChanges };
  for (int change = 0; change < kChanges; ++change) {
    std::unique_ptr<Handshake> asking;
    ASSERT_TRUE(a->connect(kB, address, &asking));
    UniqueFd fromA, toB;
    ASSERT_TRUE(acceptUnixWithin(listener.get(), 20'000, &fromA));
    alignas(8) std::byte greeting[512];
    std::size_t bytes = 0;
    std::vector<UniqueFd> fds;
    ASSERT_TRUE(recvWithFdsWithin(fromA.get(), greeting, sizeof greeting, &bytes, &fds, 20'000));
    ASSERT_EQ(fds.size(), 1u);
    SharedMemory small;
    ASSERT_TRUE(SharedMemory::create("small", 4096, &small));
    UniqueFd null(::open("/dev/null", O_RDWR));
    std::vector<int> passed{fds[0].get()};
    if (change == Magic) greeting[0] ^= std::byte{1};
    if (change == Protocol) greeting[8] ^= std::byte{1};
    if (change == NoMemory) passed.clear();
    if (change == NullDevice) passed[0] = null.get();
    if (change == SmallMemory) passed[0] = small.fd();
    ASSERT_TRUE(GetParam().knock(b->address(), &toB));
    ASSERT_TRUE(sendWithFdsWithin(toB.get(), greeting, bytes, passed, 1000));
    auto answering = taken(*b);
    ASSERT_NE(answering, nullptr);
    if (greeted(*answering) == State::Pending) answering->decide(Decision::Accept, "");
    EXPECT_EQ(settled(*answering), State::Failed) << "change " << change;
    EXPECT_FALSE(answering->status().message().empty());
  }
}

TEST_P(TransportTest, CrossingConnectionsLeaveOne) {
  auto a = open(kA), b = open(kB);
  auto aAsks = knock(*a, kB, *b), bAsks = knock(*b, kA, *a);
  auto atB = taken(*b), atA = taken(*a);
  ASSERT_TRUE(aAsks && bAsks && atA && atB);
  EXPECT_EQ(greeted(*atA), State::Pending);
  EXPECT_EQ(greeted(*atB), State::Pending);
  // The smaller id gives way: a's attempt is the one that b declines.
  atB->decide(Decision::Crossed, "crossed");
  EXPECT_EQ(settled(*atB), State::Crossed);
  EXPECT_EQ(settled(*aAsks), State::Crossed);
  atA->decide(Decision::Accept, "");
  EXPECT_EQ(settled(*atA, bAsks.get()), State::Done);
  EXPECT_EQ(settled(*bAsks), State::Done);
  auto endA = atA->take(), endB = bAsks->take();
  ASSERT_TRUE(endA && endB);
  ASSERT_TRUE(endA->trySend(numbered(4)));
  Message m{};
  ASSERT_TRUE(waitUntil([&] { return endB->tryReceive(&m); }));
  EXPECT_TRUE(isNumbered(m, 4));
}

TEST_P(TransportTest, MessagesArriveInOrderBothWays) {
  Ends ends = joinFresh();
  ASSERT_TRUE(ends.a && ends.b);
  constexpr std::uint64_t kMessages = 20'000;
  // Seconds of work for the RDMA lab's emulated processor when it has a core to itself.
  const Deadline deadline = Deadline::afterMs(3 * test::kPatienceMs);
  auto talk = [&](Connection& connection, bool* ordered) {
    std::uint64_t sent = 0, received = 0;
    *ordered = true;
    while ((sent < kMessages || received < kMessages) && *ordered && !deadline.passed()) {
      bool moved = false;
      if (sent < kMessages && connection.trySend(numbered(sent))) moved = ++sent;
      for (Message m; connection.tryReceive(&m); moved = true) {
        *ordered = *ordered && isNumbered(m, received++);
      }
      if (!moved) std::this_thread::yield();
    }
    *ordered = *ordered && sent == kMessages && received == kMessages;
  };
  bool fine = false, otherFine = false;
  std::thread other([&] { talk(*ends.b, &otherFine); });
  talk(*ends.a, &fine);
  other.join();
  EXPECT_TRUE(fine);
  EXPECT_TRUE(otherFine);
}

TEST_P(TransportTest, AFullRingTakesNoMoreAndGoesOnOnceDrained) {
  Ends ends = joinFresh();
  ASSERT_TRUE(ends.a && ends.b);
  std::uint64_t sent = 0, received = 0;
  Message m{};
  for (int round = 0; round < 3; ++round) {
    // A transport, and a kernel that had no CPU until now, may carry messages on by themselves, so
    // full is what stays full.
    for (int full = 0; full < 30 && sent - received < 1'000'000; ++full) {
      while (sent - received < 1'000'000 && ends.a->trySend(numbered(sent))) {
        ++sent;
        full = 0;
      }
      ::usleep(1000);
    }
    ASSERT_LT(sent - received, 1'000'000u) << "there is no bound";
    EXPECT_TRUE(ends.b->trySend(numbered(7))) << "the other direction is not full";
    ASSERT_TRUE(waitUntil([&] { return ends.a->tryReceive(&m); }));
    EXPECT_TRUE(isNumbered(m, 7));
    while (received < sent) {
      ASSERT_TRUE(waitUntil([&] {
        Message none;
        (void)ends.a->tryReceive(&none);  // sends on what it has kept
        return ends.b->tryReceive(&m);
      }));
      ASSERT_TRUE(isNumbered(m, received)) << received;
      ++received;
    }
    EXPECT_FALSE(ends.b->tryReceive(&m));
  }
  EXPECT_GE(received, 3u);
}

TEST_P(TransportTest, SlotsLieApartInsideTheStaging) {
  Ends ends = joinFresh();
  ASSERT_TRUE(ends.a && ends.b);
  for (Connection* end : {ends.a.get(), ends.b.get()}) {
    const Staging& staging = end->staging();
    EXPECT_EQ(staging.slotBytes, kGeometry.slotBytes);
    ASSERT_EQ(staging.out.size(), kGeometry.slots);
    ASSERT_EQ(staging.in.size(), kGeometry.slots);
    std::vector<std::pair<std::byte*, std::byte*>> ranges;
    for (const auto* slots : {&staging.out, &staging.in}) {
      for (const Slot& slot : *slots) {
        ranges.emplace_back(slot.data, slot.data + staging.slotBytes);
        std::vector<Flag*> flags{slot.ready, slot.credit};
        if (slots == &staging.out) flags.push_back(slot.mirrored);
        for (Flag* flag : flags) {
          ranges.emplace_back(reinterpret_cast<std::byte*>(flag),
                              reinterpret_cast<std::byte*>(flag + 1));
          EXPECT_EQ(flag->value.load(), 0u);
        }
      }
    }
    std::sort(ranges.begin(), ranges.end());
    EXPECT_GE(ranges.front().first, staging.base);
    EXPECT_LE(ranges.back().second, staging.base + staging.bytes);
    for (std::size_t i = 1; i < ranges.size(); ++i) {
      EXPECT_LE(ranges[i - 1].second, ranges[i].first) << i;
    }
  }
}

TEST_P(TransportTest, WhatFillsAnOutSlotArrivesInTheSameInSlot) {
  Ends ends = joinFresh();
  ASSERT_TRUE(ends.a && ends.b);
  const std::uint64_t bytes = kGeometry.slotBytes - 3;
  for (std::uint64_t turn = 1; turn <= 3; ++turn) {
    for (int direction = 0; direction < 2; ++direction) {
      Connection& from = direction ? *ends.b : *ends.a;
      Connection& to = direction ? *ends.a : *ends.b;
      for (std::uint32_t i = 0; i < kGeometry.slots; ++i) {
        const std::uint64_t key = turn * 100 + i * 2 + static_cast<std::uint64_t>(direction);
        const Slot& out = from.staging().out[i];
        const Slot& in = to.staging().in[i];
        ASSERT_FALSE(in.ready->reached(turn));
        test::writePattern(out.data, key, 0, bytes);
        out.ready->set(turn);
        if (!from.sharedSlots()) {
          ASSERT_TRUE(waitUntil([&] { return from.tryWrite(i, bytes, turn); }));
        }
        ASSERT_TRUE(waitUntil([&] {
          Message none;
          EXPECT_FALSE(to.tryReceive(&none));
          return in.ready->reached(turn);
        }));
        ASSERT_EQ(std::memcmp(in.data, out.data, bytes), 0);
        ASSERT_EQ(in.data[bytes - 1], test::patternAt(key, bytes - 1));
        ASSERT_FALSE(out.credit->reached(turn));
        in.credit->set(turn);
        // A credit may travel with what its side's thread does anyhow.
        ASSERT_TRUE(waitUntil([&] {
          Message none;
          EXPECT_FALSE(to.tryReceive(&none));
          EXPECT_FALSE(from.tryReceive(&none));
          return out.credit->reached(turn);
        }));
      }
    }
  }
}

TEST_P(TransportTest, SharedSlotsAreTheSameMemory) {
  Ends ends = joinFresh();
  ASSERT_TRUE(ends.a && ends.b);
  EXPECT_EQ(ends.a->sharedSlots(), ends.b->sharedSlots());
  if (!ends.a->sharedSlots()) GTEST_SKIP() << "this transport moves the bytes";
  for (std::uint32_t i = 0; i < kGeometry.slots; ++i) {
    const Slot &out = ends.a->staging().out[i], &in = ends.b->staging().in[i];
    // Written on either side, seen on the other, at both ends of the slot.
    out.data[0] = std::byte{1};
    in.data[kGeometry.slotBytes - 1] = std::byte{2};
    EXPECT_EQ(in.data[0], std::byte{1});
    EXPECT_EQ(out.data[kGeometry.slotBytes - 1], std::byte{2});
  }
}

TEST_P(TransportTest, Rule9ThePeersEndIsNoticedAndWhatItSentBeforeStillComes) {
  Ends ends = joinFresh();
  ASSERT_TRUE(ends.a && ends.b);
  ends.b->watch();
  ends.a->watch();
  EXPECT_FALSE(ends.a->peerGone());
  EXPECT_FALSE(ends.b->peerGone());
  ASSERT_TRUE(ends.a->trySend(numbered(0)));
  ASSERT_TRUE(ends.a->trySend(numbered(1)));
  ends.a.reset();
  pollfd watched{ends.b->watchFd(), POLLIN, 0};
  ASSERT_EQ(::poll(&watched, 1, 20'000), 1);
  ASSERT_TRUE(waitUntil([&] {
    ends.b->watch();
    return ends.b->peerGone();
  }));
  Message m{};
  for (std::uint64_t n : {0u, 1u}) {
    ASSERT_TRUE(ends.b->tryReceive(&m));
    EXPECT_TRUE(isNumbered(m, n));
  }
  EXPECT_FALSE(ends.b->tryReceive(&m));
  (void)ends.b->trySend(numbered(2));  // nobody reads it, and nothing happens
}

TEST_P(TransportTest, ConnectionsOutliveTheTransportThatMadeThem) {
  Ends ends = joinFresh();
  ASSERT_TRUE(ends.a && ends.b);
  a_.reset();
  b_.reset();
  ASSERT_TRUE(ends.a->trySend(numbered(1)));
  Message m{};
  ASSERT_TRUE(waitUntil([&] { return ends.b->tryReceive(&m); }));
  ends.b->watch();
  EXPECT_FALSE(ends.b->peerGone());
}

std::string nameOf(const ::testing::TestParamInfo<TransportKind>& info) {
  constexpr const char* kNames[] = {"shm", "tcp", "tcp_IPv6", "verbs_fake", "verbs"};
  return kNames[info.index];
}
INSTANTIATE_TEST_SUITE_P(All, TransportTest,
                         ::testing::Values(kShm, kTcp4, kTcp6, kVerbsFake, kVerbs), nameOf);

}  // namespace
}  // namespace hoccl
