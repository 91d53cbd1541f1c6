// Peers that know the nonce and speak nonsense: seeded random messages, close to right ones. The
// plugin gives an error with one line, writes nothing outside of what was posted, and lives.

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <random>

#include "common/net/tcp/bundle_setup.h"
#include "plugin-net/handle.h"
#include "plugin-net/wire.h"
#include "test/conformance/hostile_peer.h"
#include "test/conformance/session.h"

namespace conformance {
namespace {

using namespace hoccl;
using namespace hoccl::net_plugin;

constexpr int kConnections = 25;
constexpr std::size_t kRoom = 60000, kFence = 4096, kLargest = 1 << 20;

// Takes whatever comes and forgets it; remembers places the plugin names.
class Swallow final : public FrameSink {
 public:
  std::byte* place(const FrameHeader& header, Status*) override {
    memory_.resize(header.bytes);
    return memory_.data();
  }
  void arrived(const FrameHeader& header) override {
    if (header.kind != static_cast<std::uint16_t>(Kind::Posted)) return;
    place_ = controlOf(header).place;
    any_ = true;
  }
  [[nodiscard]] Place named() const { return place_; }
  [[nodiscard]] bool any() const { return any_; }

 private:
  std::vector<std::byte> memory_;
  Place place_{0, 1};
  bool any_ = false;
};

// A number that is small, at a border, or anything.
std::uint64_t oddNumber(std::mt19937_64& random) {
  switch (random() % 6) {
    case 0:
      return 0;
    case 1:
      return random() % 4;
    case 2:
      return random() % 300;
    case 3:
      return ~std::uint64_t{0} - random() % 3;
    case 4:
      return (std::uint64_t{1} << (random() % 64)) - 1 + random() % 3;
    default:
      return random();
  }
}

// One connection's worth of nonsense. `next`: what the plugin expects next of tag 0, so that some
// of it gets further than the first check.
void talkNonsense(Bundle& bundle, Swallow& control, std::mt19937_64& random, bool asSender) {
  std::vector<std::byte> payload(kLargest);
  std::atomic<std::uint64_t> moved{0};
  std::uint64_t next = 0;
  if (asSender && random() % 4 != 0) {  // as a right sender begins, so that a place is known
    Control ask;
    ask.bytes = kRoom;
    ask.index = next++;
    REQUIRE(bundle.sendControl(static_cast<std::uint16_t>(Kind::Announce), pack(ask), nullptr, 0));
    const double start = now();
    while (!control.any() && now() - start < 2) (void)bundle.receiveControl(control);
    REQUIRE(control.any());
    if (random() % 2 == 0) {  // more than it takes, or more than the message is said to have
      const std::size_t sizes[] = {kRoom / 2,      kRoom,     kRoom + 1,
                                   kRoom + kFence, 2 * kRoom, kLargest};
      PieceBody body;
      body.place = control.named();
      body.total = sizes[random() % 6];
      Transfer transfer;
      transfer.kind = static_cast<std::uint16_t>(Kind::Data);
      transfer.user = std::bit_cast<std::array<std::byte, sizeof(PieceBody)>>(body);
      transfer.data = payload.data();
      transfer.bytes = sizes[random() % 6];
      transfer.done = &moved;
      REQUIRE(bundle.post(transfer));
      const double start = now();
      while (moved.load() < transfer.bytes && !bundle.gone() && now() - start < 1) ::usleep(200);
      if (random() % 2 == 0) {  // and the same message once more, as a small one
        ask.bytes = 100;
        (void)bundle.sendControl(static_cast<std::uint16_t>(Kind::Message), pack(ask),
                                 payload.data(), 100);
      }
    }
  }
  const int messages = 1 + static_cast<int>(random() % 60);
  for (int i = 0; i < messages && !bundle.gone(); ++i) {
    (void)bundle.receiveControl(control);
    if (random() % 5 == 0) {
      PieceBody body;
      body.place = random() % 2 == 0 ? control.named()
                                     : Place{static_cast<std::uint32_t>(oddNumber(random)),
                                             static_cast<std::uint32_t>(oddNumber(random))};
      body.total = random() % 2 == 0 ? kRoom + random() % 3 * kFence : oddNumber(random);
      Transfer transfer;
      transfer.kind = random() % 8 == 0 ? static_cast<std::uint16_t>(random())
                                        : static_cast<std::uint16_t>(Kind::Data);
      transfer.user = std::bit_cast<std::array<std::byte, sizeof(PieceBody)>>(body);
      if (random() % 3 == 0) {
        AheadBody ahead;
        ahead.tag = random() % 4 == 0 ? static_cast<int>(oddNumber(random)) : 0;
        ahead.index = random() % 4 == 0 ? oddNumber(random) : random() % 12;
        ahead.total = body.total;
        transfer.kind = static_cast<std::uint16_t>(Kind::Ahead);
        transfer.user = std::bit_cast<std::array<std::byte, sizeof(AheadBody)>>(ahead);
      }
      transfer.data = payload.data();
      transfer.bytes = 1 + random() % Bundle::kMaxControlPayload;
      transfer.done = &moved;
      (void)bundle.post(transfer);
      continue;
    }
    Control message;
    message.tag = random() % 4 == 0 ? static_cast<int>(oddNumber(random)) : 0;
    message.index = random() % 4 == 0 ? oddNumber(random) : next++;
    message.ahead = random() % 2;
    message.place = {static_cast<std::uint32_t>(oddNumber(random)),
                     static_cast<std::uint32_t>(oddNumber(random))};
    std::size_t bytes = 0;
    auto kind =
        static_cast<std::uint16_t>(random() % 10 == 0 ? oddNumber(random) : 1 + random() % 6);
    if (random() % 3 == 0)
      kind = static_cast<std::uint16_t>(asSender ? Kind::Message : Kind::Posted);
    if (kind == static_cast<std::uint16_t>(Kind::Message) || random() % 10 == 0) {
      bytes = random() % (random() % 4 == 0 ? Bundle::kMaxControlPayload : 3000);
    }
    message.bytes = random() % 5 == 0 ? oddNumber(random) : bytes;
    if (!bundle.sendControl(kind, pack(message), payload.data(), bytes)) ::usleep(100);
  }
  const double start = now();
  while (!bundle.drained() && now() - start < 0.05) ::usleep(200);
}

class Hostile : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, Hostile, testing::Range(1, 5));

TEST_P(Hostile, SenderToAReceivingPlugin) {
  const Outcome outcome = runPair([](const Side& side) {
    std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()));
    if (side.rank() == 0) {
      for (int round = 0; round < kConnections; ++round) {
        Handle handle;
        side.take(handle.data(), handle.size());
        ListenerAddress to;
        REQUIRE(unpackHandle(handle.data(), &to).ok());
        std::unique_ptr<BundleSetup> setup;
        REQUIRE(connectBundle(to.address, to.nonce, to.address, makeHello(), {}, &setup).ok());
        Swallow data, control;
        const std::unique_ptr<Bundle> bundle = finishSetup(*setup, data);
        talkNonsense(*bundle, control, random, true);
      }
      return;
    }
    Session session(11);
    Net& net = session.net();
    for (int round = 0; round < kConnections; ++round) {
      Handle handle;
      void* const listener = session.listen(&handle);
      side.give(handle.data(), handle.size());
      void* const comm = session.accept(listener);
      REQUIRE_OK(net.closeListen(listener));
      takeLog();
      // Receives with a fence on both sides of each.
      constexpr std::size_t kReceives = 8, kStep = kRoom + kFence;
      std::vector<unsigned char> memory(kFence + kReceives * kStep, 0xcd);
      std::vector<void*> requests;
      for (std::size_t i = 0; i < kReceives; ++i) {
        void* place = memory.data() + kFence + i * kStep;
        const std::size_t bytes = kRoom;
        const int tag = 0;
        void* request = nullptr;
        if (net.receive(comm, 1, &place, &bytes, &tag, &request) != ncclSuccess) break;
        requests.push_back(request);
      }
      // Until the peer has closed, if not before.
      const double start = now();
      ncclResult_t result = ncclSuccess;
      while (result == ncclSuccess) {
        REQUIRE_SAYING(now() - start < 5, "no end in time");
        for (std::size_t i = 0; i < requests.size() && result == ncclSuccess; ++i) {
          if (requests[i] == nullptr) continue;
          int done = 0, size = 0;
          result = net.test(requests[i], &done, &size);
          if (done != 0) requests[i] = nullptr;
        }
        void* place = memory.data() + kFence;
        const std::size_t bytes = 0;
        const int tag = 77;
        void* request = nullptr;
        if (result == ncclSuccess && requests.size() < 200) {
          result = net.receive(comm, 1, &place, &bytes, &tag, &request);
          if (request != nullptr) requests.push_back(request);
        }
        ::sched_yield();
      }
      (void)onlyWarning();
      REQUIRE_OK(net.closeReceive(comm));
      REQUIRE(allBytes(memory.data(), kFence, 0xcd));
      for (std::size_t i = 0; i < kReceives; ++i) {
        REQUIRE(allBytes(memory.data() + kFence + i * kStep + kRoom, kFence, 0xcd));
      }
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST_P(Hostile, ReceiverOfASendingPlugin) {
  const Outcome outcome = runPair([](const Side& side) {
    std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()) + 1000);
    if (side.rank() == 0) {
      for (int round = 0; round < kConnections; ++round) {
        SocketAddress local;
        REQUIRE(SocketAddress::parse("127.0.0.1", &local).ok());
        std::unique_ptr<BundleListener> listener;
        REQUIRE(BundleListener::open(local, {}, &listener).ok());
        Handle handle;
        packHandle({listener->address(), listener->nonce()}, handle.data());
        side.give(handle.data(), handle.size());
        std::unique_ptr<BundleSetup> setup;
        while (!setup) setup = listener->accept();
        BundleHello reply = makeHello();
        const bool badReply = random() % 8 == 0;
        if (badReply) reply[random() % 8] ^= std::byte{1};
        setup->accept(reply);
        Swallow data, control;
        const std::unique_ptr<Bundle> bundle = finishSetup(*setup, data);
        talkNonsense(*bundle, control, random, false);
      }
      return;
    }
    Session session(11);
    Net& net = session.net();
    for (int round = 0; round < kConnections; ++round) {
      Handle handle;
      side.take(handle.data(), handle.size());
      takeLog();
      void* comm = nullptr;
      ncclResult_t result = ncclSuccess;
      const double start = now();
      while (comm == nullptr && result == ncclSuccess) {
        REQUIRE(now() - start < 5);
        result = net.connect(session.context(), 0, handle.data(), &comm);
        ::sched_yield();
      }
      std::vector<unsigned char> memory(200000);
      std::vector<void*> requests;
      for (int i = 0; result == ncclSuccess; ++i) {
        REQUIRE_SAYING(now() - start < 5, "no end in time");
        void* request = nullptr;
        if (requests.size() < 32) {
          result = net.send(comm, memory.data(), i % 3 == 0 ? memory.size() : 50, 0, &request);
          if (request != nullptr) requests.push_back(request);
        }
        for (std::size_t r = 0; r < requests.size() && result == ncclSuccess;) {
          int done = 0;
          result = net.test(requests[r], &done, nullptr);
          if (done != 0) {
            requests.erase(requests.begin() + static_cast<long>(r));
          } else {
            ++r;
          }
        }
        ::sched_yield();
      }
      (void)onlyWarning();
      REQUIRE_OK(net.closeSend(comm));
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// The same message twice, small and ahead of its receive: the receive takes the small one, nothing
// is written behind it, and the pieces end the connection.
TEST(HostileAhead, AMessageThatIsThereAlready) {
  const Outcome outcome = runPair([](const Side& side) {
    if (side.rank() == 0) {
      HostilePeer peer = HostilePeer::sender(side);
      AheadBody body;
      body.index = 1;
      body.total = kRoom;
      peer.sendAhead(body, kRoom);
      Control small;
      small.bytes = 100;
      for (small.index = 0; small.index < 2; ++small.index) {
        peer.say(Kind::Message, small, small.bytes);
      }
      side.meet();
      side.meet();
      return;
    }
    Session session(11);
    Net& net = session.net();
    void* const comm = HostilePeer::acceptFor(side, session);
    std::vector<unsigned char> memory(kRoom, 0xcd), other(100);
    side.meet();
    ::usleep(100'000);
    finish(net, startReceive(net, comm, other.data(), other.size(), 0));  // hears of both
    void* const first = startReceive(net, comm, memory.data(), memory.size(), 0);
    void* const never = startReceive(net, comm, other.data(), other.size(), 1);
    int size = 0;
    finish(net, first, &size);
    REQUIRE(size == 100);
    REQUIRE(failureOf(net, never) == ncclRemoteError);
    REQUIRE(allBytes(memory.data(), 100, 0x11));
    REQUIRE(allBytes(memory.data() + 100, kRoom - 100, 0xcd));
    side.meet();
    REQUIRE_OK(net.closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
