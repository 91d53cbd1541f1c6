// Traffic: random sizes, orders, delays, groups and polls, several connections and threads; the
// limits of what may be under way. Every byte is checked, and none beyond.

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "test/conformance/session.h"

namespace conformance {
namespace {

constexpr int kGroup = hoccl::nccl_abi::kMaxGroupedReceives;
constexpr int kRequests = hoccl::nccl_abi::kMaxRequests;

class Traffic : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Versions, Traffic, testing::ValuesIn(kVersions),
                         [](const auto& info) { return "v" + std::to_string(info.param); });

struct Message {
  int tag;
  std::size_t bytes;
  std::size_t room;  ///< of its receive
  std::uint64_t seed;
};

// Both sides make the same plan from the same seed.
std::vector<Message> makePlan(std::uint64_t seed, std::size_t count, int tags) {
  std::mt19937_64 random(seed);
  std::vector<Message> plan;
  for (std::size_t i = 0; i < count; ++i) {
    Message message;
    message.tag = static_cast<int>(random() % static_cast<unsigned>(tags)) * 1000 - 3;
    switch (random() % 8) {
      case 0:
        message.bytes = 0;
        break;
      case 1:
      case 2:
        message.bytes = random() % 64;
        break;
      case 3:
      case 4:
        message.bytes = random() % 20000;
        break;
      case 5:  // around the size from which messages go over the data sockets
        message.bytes = (16 << 10) - 2 + random() % 5;
        break;
      default:
        message.bytes = random() % 700000;
    }
    message.room = message.bytes + (random() % 3 == 0 ? random() % 100000 : 0);
    message.seed = seed * 1000003 + i;
    plan.push_back(message);
  }
  return plan;
}

// The plan in an order that keeps that of each tag and otherwise strays by a few places, so that
// the two sides never wait for each other with full windows.
std::vector<std::size_t> strayOrder(const std::vector<Message>& plan, std::mt19937_64& random) {
  std::vector<std::size_t> order(plan.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (std::size_t i = 0; i + 1 < order.size(); ++i) {
    const std::size_t j = i + 1 + random() % 3;
    if (j >= order.size()) continue;
    bool free = true;  // nothing of the tag of either between them
    for (std::size_t k = i; k < j; ++k) free = free && plan[order[k]].tag != plan[order[j]].tag;
    if (free)
      std::rotate(order.begin() + static_cast<long>(i), order.begin() + static_cast<long>(j),
                  order.begin() + static_cast<long>(j) + 1);
  }
  return order;
}

void maybePause(std::mt19937_64& random) {
  if (random() % 16 == 0) ::usleep(static_cast<useconds_t>(random() % 300));
}

struct OpenSend {
  void* request;
  std::vector<unsigned char> data;
};

void runSender(Net& net, void* comm, std::uint64_t seed, std::size_t count, int tags) {
  const std::vector<Message> plan = makePlan(seed, count, tags);
  std::mt19937_64 random(seed ^ 0x5e4d);
  const std::vector<std::size_t> order = strayOrder(plan, random);
  std::vector<OpenSend> open;
  std::size_t next = 0;
  const double start = now();
  while (next < order.size() || !open.empty()) {
    REQUIRE_SAYING(now() - start < 25 * patience(), "sender stuck at " + std::to_string(next));
    maybePause(random);
    if (next < order.size() && open.size() < kRequests && random() % 4 != 0) {
      const Message& message = plan[order[next]];
      OpenSend send{nullptr, std::vector<unsigned char>(message.bytes)};
      fill(send.data.data(), message.bytes, message.seed);
      REQUIRE_OK(net.send(comm, send.data.data(), message.bytes, message.tag, &send.request));
      if (send.request != nullptr) {
        ++next;
        open.push_back(std::move(send));
      }
    }
    if (open.empty()) continue;
    const std::size_t which = random() % open.size();
    int done = 0, size = -1;
    REQUIRE_OK(net.test(open[which].request, &done, &size));
    if (done == 0) {
      ::sched_yield();
      continue;
    }
    REQUIRE(size == static_cast<int>(open[which].data.size()));
    // Done means the memory is the caller's again.
    std::fill(open[which].data.begin(), open[which].data.end(), 0x77);
    open.erase(open.begin() + static_cast<long>(which));
  }
}

struct OpenReceive {
  void* request = nullptr;
  std::vector<std::size_t> messages;
  std::vector<std::vector<unsigned char>> data;
};

void runReceiver(Net& net, void* comm, std::uint64_t seed, std::size_t count, int tags) {
  constexpr std::size_t kFence = 32;
  const std::vector<Message> plan = makePlan(seed, count, tags);
  std::mt19937_64 random(seed ^ 0x4ec);
  const std::vector<std::size_t> order = strayOrder(plan, random);
  std::vector<OpenReceive> open;
  std::size_t next = 0;
  const double start = now();
  while (next < order.size() || !open.empty()) {
    REQUIRE_SAYING(now() - start < 25 * patience(), "receiver stuck at " + std::to_string(next));
    maybePause(random);
    if (next < order.size() && open.size() < kRequests && random() % 4 != 0) {
      OpenReceive receive;
      const std::size_t group = std::min<std::size_t>(1 + random() % kGroup, order.size() - next);
      std::vector<void*> places;
      std::vector<std::size_t> rooms;
      std::vector<int> tagsOf;
      for (std::size_t i = 0; i < group; ++i) {
        const Message& message = plan[order[next + i]];
        receive.messages.push_back(order[next + i]);
        receive.data.emplace_back(message.room + kFence, 0xcd);
        places.push_back(receive.data.back().data());
        rooms.push_back(message.room);
        tagsOf.push_back(message.tag);
      }
      receive.request = reinterpret_cast<void*>(1);  // NCCL's hint that it need not be told
      REQUIRE_OK(net.receive(comm, static_cast<int>(group), places.data(), rooms.data(),
                             tagsOf.data(), &receive.request));
      if (receive.request != nullptr) {
        next += group;
        open.push_back(std::move(receive));
      }
    }
    if (open.empty()) continue;
    OpenReceive& tested = open[random() % open.size()];
    int done = 0;
    int sizes[kGroup] = {-1, -1, -1, -1, -1, -1, -1, -1};
    REQUIRE_OK(net.test(tested.request, &done, sizes));
    if (done == 0) {
      ::sched_yield();
      continue;
    }
    for (std::size_t i = 0; i < tested.messages.size(); ++i) {
      const Message& message = plan[tested.messages[i]];
      REQUIRE(sizes[i] == static_cast<int>(message.bytes));
      REQUIRE(matches(tested.data[i].data(), message.bytes, message.seed));
      REQUIRE(allBytes(tested.data[i].data() + message.bytes, tested.data[i].size() - message.bytes,
                       0xcd));
    }
    open.erase(open.begin() + (&tested - open.data()));
  }
}

// Some versions with large messages over the control socket, some over the data sockets.
void chooseSockets() {
  if (Traffic::GetParam() % 2 == 0) ::setenv("HOCCL_NET_INLINE_BYTES", "512KiB", 1);
}

TEST_P(Traffic, RandomBothWays) {
  const Outcome outcome = runPair([](const Side& side) {
    chooseSockets();
    Session session(GetParam());
    Net& net = session.net();
    void* const out = session.connectPair(side, 0);
    void* const back = session.connectPair(side, 1);
    void* const sends = side.rank() == 0 ? out : back;
    void* const receives = side.rank() == 0 ? back : out;
    const auto seed = static_cast<std::uint64_t>(GetParam()) * 10;
    const auto rank = static_cast<std::uint64_t>(side.rank());
    std::thread sender([&] { runSender(net, sends, seed + rank, 250, 5); });
    runReceiver(net, receives, seed + 1 - rank, 250, 5);
    sender.join();
    side.meet();
    REQUIRE_OK(net.closeSend(sends));
    REQUIRE_OK(net.closeReceive(receives));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST_P(Traffic, SeveralConnectionsAndThreads) {
  constexpr int kConnections = 6;
  const Outcome outcome = runPair([](const Side& side) {
    chooseSockets();
    Session session(GetParam());
    Net& net = session.net();
    std::vector<void*> comms;
    for (int i = 0; i < kConnections; ++i) comms.push_back(session.connectPair(side, i % 2));
    std::vector<std::thread> threads;
    for (int i = 0; i < kConnections; ++i) {
      threads.emplace_back([&, i] {
        const auto seed = static_cast<std::uint64_t>(GetParam()) * 100 + static_cast<unsigned>(i);
        if (side.rank() == i % 2) {
          runSender(net, comms[static_cast<std::size_t>(i)], seed, 60, 3);
        } else {
          runReceiver(net, comms[static_cast<std::size_t>(i)], seed, 60, 3);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    side.meet();
    for (int i = 0; i < kConnections; ++i) {
      void* const comm = comms[static_cast<std::size_t>(i)];
      REQUIRE_OK(side.rank() == i % 2 ? net.closeSend(comm) : net.closeReceive(comm));
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// One process, one thread: what NCCL does to find out about GPUDirect.
TEST_P(Traffic, SelfConnect) {
  const Outcome outcome = runAlone([] {
    Session session(GetParam());
    Net& net = session.net();
    Handle handle;
    void* const listener = session.listen(&handle);
    void *sends = nullptr, *receives = nullptr;
    const double start = now();
    while (sends == nullptr || receives == nullptr) {
      if (sends == nullptr) REQUIRE_OK(net.connect(session.context(), 0, handle.data(), &sends));
      if (receives == nullptr) REQUIRE_OK(net.accept(listener, &receives));
      REQUIRE(now() - start < 5 * patience());
    }
    void* mr = nullptr;
    std::vector<unsigned char> from(2 << 20), to(2 << 20, 0);
    REQUIRE_OK(net.registerMemory(sends, from.data(), from.size(), 1, &mr));
    REQUIRE_OK(net.deregisterMemory(sends, mr));
    takeLog();
    REQUIRE(net.registerMemory(sends, from.data(), from.size(), 2, &mr) != ncclSuccess);
    REQUIRE(onlyWarning().find("not host memory") != std::string::npos);
    fill(from.data(), from.size(), 1);
    void* receive = startReceive(net, receives, to.data(), to.size(), 0);
    void* send = startSend(net, sends, from.data(), from.size(), 0);
    bool sent = false, received = false;
    while (!sent || !received) {
      int done = 0, size = 0;
      if (!sent) {
        REQUIRE_OK(net.test(send, &done, &size));
        sent = done != 0;
      }
      if (!received) {
        REQUIRE_OK(net.test(receive, &done, &size));
        received = done != 0;
        if (received) REQUIRE(size == static_cast<int>(to.size()));
      }
      REQUIRE(now() - start < 5 * patience());
    }
    REQUIRE(matches(to.data(), to.size(), 1));
    void* flush = &flush;
    REQUIRE_OK(net.flush(receives, to.data(), 16, &flush));
    if (flush != nullptr) finish(net, flush);
    REQUIRE_OK(net.closeSend(sends));
    REQUIRE_OK(net.closeReceive(receives));
    REQUIRE_OK(net.closeListen(listener));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// All that may be open at once: 32 requests of 8 receives. The sends come in another order.
TEST_P(Traffic, AllRequestsOutstanding) {
  for (const std::size_t bytes : {std::size_t{40}, std::size_t{40000}}) {
    const Outcome outcome = runPair([bytes](const Side& side) {
      chooseSockets();
      Session session(GetParam());
      Net& net = session.net();
      void* const comm = session.connectPair(side, 0);
      std::vector<std::vector<unsigned char>> data(kRequests * kGroup,
                                                   std::vector<unsigned char>(bytes, 0xcd));
      std::vector<void*> requests;
      if (side.rank() == 1) {
        for (int r = 0; r < kRequests; ++r) {
          void* places[kGroup];
          std::size_t rooms[kGroup];
          int tags[kGroup];
          for (int i = 0; i < kGroup; ++i) {
            places[i] = data[static_cast<std::size_t>(r * kGroup + i)].data();
            rooms[i] = bytes;
            tags[i] = i;
          }
          void* request = nullptr;
          REQUIRE_OK(net.receive(comm, kGroup, places, rooms, tags, &request));
          REQUIRE(request != nullptr);
          requests.push_back(request);
        }
        side.meet();
        for (std::size_t r = requests.size(); r-- > 0;) {
          int sizes[kGroup] = {};
          finish(net, requests[r], sizes);
          for (int i = 0; i < kGroup; ++i) {
            const std::size_t at = r * kGroup + static_cast<std::size_t>(i);
            REQUIRE(sizes[i] == static_cast<int>(bytes));
            REQUIRE(matches(data[at].data(), bytes, at));
          }
        }
      } else {
        side.meet();
        // By tag, backwards: the receives of one request are filled by sends far apart.
        for (int i = kGroup; i-- > 0;) {
          for (int r = 0; r < kRequests; ++r) {
            const auto at = static_cast<std::size_t>(r * kGroup + i);
            fill(data[at].data(), bytes, at);
            requests.push_back(startSend(net, comm, data[at].data(), bytes, i));
          }
        }
        for (void* request : requests) finish(net, request);
      }
      side.meet();
      REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
    });
    EXPECT_TRUE(outcome.ok()) << bytes << " bytes: " << outcome.text();
  }
}

// A sender far ahead of its receiver: later, or kept; nothing is lost, nothing grows without bound.
TEST_P(Traffic, SenderAhead) {
  constexpr int kMessages = 400;
  const Outcome outcome = runPair([](const Side& side) {
    Session session(GetParam());
    Net& net = session.net();
    void* const comm = session.connectPair(side, 0);
    if (side.rank() == 0) {
      std::vector<std::vector<unsigned char>> data(kMessages, std::vector<unsigned char>(9000));
      std::deque<void*> open;
      int sent = 0;
      bool told = false;
      const double start = now();
      while (sent < kMessages || !open.empty()) {
        REQUIRE(now() - start < 20 * patience());
        void* request = nullptr;
        if (sent < kMessages && open.size() < kRequests) {
          fill(data[static_cast<std::size_t>(sent)].data(), 9000, static_cast<unsigned>(sent));
          REQUIRE_OK(
              net.send(comm, data[static_cast<std::size_t>(sent)].data(), 9000, 1, &request));
          if (request != nullptr) {
            ++sent;
            open.push_back(request);
          }
        }
        if (!open.empty()) {
          int done = 0;
          REQUIRE_OK(net.test(open.front(), &done, nullptr));
          if (done != 0) open.pop_front();
        }
        if (!told && now() - start > 0.2) {
          REQUIRE(sent < kMessages);  // the receiver has not begun
          told = true;
          side.meet();
        }
      }
      if (!told) side.meet();
    } else {
      side.meet();
      for (int i = 0; i < kMessages; ++i) {
        std::vector<unsigned char> data(9000);
        REQUIRE(finish(net, startReceive(net, comm, data.data(), data.size(), 1)) == 9000);
        REQUIRE(matches(data.data(), 9000, static_cast<unsigned>(i)));
      }
    }
    side.meet();
    REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// What was sent arrives although the sender closes at once and the receiver reads late.
TEST_P(Traffic, ClosedRightAfterSending) {
  const Outcome outcome = runPair([](const Side& side) {
    chooseSockets();
    Session session(GetParam());
    Net& net = session.net();
    for (const std::size_t bytes : {std::size_t{8}, std::size_t{16000}, std::size_t{2000000}}) {
      void* const comm = session.connectPair(side, 0);
      std::vector<unsigned char> data(bytes);
      if (side.rank() == 0) {
        fill(data.data(), bytes, bytes);
        side.meet();
        for (int i = 0; i < 20; ++i) finish(net, startSend(net, comm, data.data(), bytes, 0));
        REQUIRE_OK(net.closeSend(comm));
      } else {
        std::vector<void*> requests;
        std::vector<std::vector<unsigned char>> places(20, std::vector<unsigned char>(bytes));
        for (auto& place : places) {
          requests.push_back(startReceive(net, comm, place.data(), bytes, 0));
        }
        side.meet();
        ::usleep(50000);
        for (int i = 0; i < 20; ++i) {
          finish(net, requests[static_cast<std::size_t>(i)]);
          REQUIRE(matches(places[static_cast<std::size_t>(i)].data(), bytes, bytes));
        }
        REQUIRE_OK(net.closeReceive(comm));
      }
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Mapped again and again over a small piece of memory, so that the size costs no memory.
std::byte* repeated(std::size_t bytes, std::size_t block) {
  const int file = ::memfd_create("conformance", MFD_CLOEXEC);
  REQUIRE(file >= 0 && ::ftruncate(file, static_cast<off_t>(block)) == 0);
  auto* const base = static_cast<std::byte*>(::mmap(
      nullptr, bytes + block, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  REQUIRE(base != MAP_FAILED);
  for (std::size_t at = 0; at < bytes + block; at += block) {
    REQUIRE(::mmap(base + at, block, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) !=
            MAP_FAILED);
  }
  ::close(file);
  return base;
}

// Beyond 4 GiB in one message, where sizes are size_t. Sent from and received into 4 MiB that lie
// again and again in a larger range: each block must arrive whole and in its place, or its pattern,
// which the one before left, is broken by the next that is not. The last block is of its own.
TEST(LargeMessage, Beyond4GiB) {
  constexpr std::size_t kBlock = 4 << 20, kBytes = (std::size_t{4} << 30) + kBlock + 77;
  const Outcome outcome = runPair(
      [](const Side& side) {
        Session session(12);
        Net& net = session.net();
        void* const comm = session.connectPair(side, 0);
        constexpr std::size_t kWhole = kBytes / kBlock * kBlock;
        std::byte* const data = repeated(kWhole, kBlock);
        // The end of the message lies in memory of its own.
        std::byte* const tail =
            static_cast<std::byte*>(::mmap(data + kWhole, kBlock, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
        REQUIRE(tail == data + kWhole);
        if (side.rank() == 0) {
          fill(data, kBlock, 1);
          fill(tail, kBytes - kWhole, 2);
          finish(net, startSend(net, comm, data, kBytes, 0), nullptr, 50);
        } else {
          // The size does not fit the int that NCCL takes.
          REQUIRE(finish(net, startReceive(net, comm, data, kBytes, 0), nullptr, 50) ==
                  std::numeric_limits<int>::max());
          REQUIRE(matches(data, kBlock, 1));
          REQUIRE(matches(tail, kBytes - kWhole, 2));
          REQUIRE(allBytes(tail + (kBytes - kWhole), 4096, 0));
        }
        side.meet();
        REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
      },
      55);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
