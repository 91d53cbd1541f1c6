// Large messages sent before their receives are opened: they wait in the sockets.

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "test/conformance/session.h"

namespace conformance {
namespace {

constexpr std::size_t kBytes = 60'000;

using Buffer = std::vector<unsigned char>;

Buffer filled(std::size_t bytes, std::uint64_t seed) {
  Buffer data(bytes);
  fill(data.data(), bytes, seed);
  return data;
}

void receiveAndCheck(Net& net, void* comm, std::size_t bytes, int tag, std::uint64_t seed) {
  Buffer data(bytes + 64, 0xcd);
  int size = 0;
  finish(net, startReceive(net, comm, data.data(), bytes, tag), &size);
  REQUIRE(size == static_cast<int>(bytes));
  REQUIRE(matches(data.data(), bytes, seed));
  REQUIRE(allBytes(data.data() + bytes, 64, 0xcd));
}

/// A connection over which a large message of the tag has gone, as any connection's second has.
void* usedConnection(const Side& side, Session& session, int tag) {
  void* const comm = session.connectPair(side, 0);
  for (std::uint64_t i = 0; i < 2; ++i) {
    if (side.rank() == 0) {
      const Buffer data = filled(kBytes, i);
      finish(session.net(), startSend(session.net(), comm, data.data(), kBytes, tag));
    } else {
      receiveAndCheck(session.net(), comm, kBytes, tag, i);
    }
    side.meet();
  }
  return comm;
}

TEST(Ahead, SendsAreDoneBeforeTheirReceives) {
  const Outcome outcome = runPair([](const Side& side) {
    Session session(11);
    void* const comm = usedConnection(side, session, 5);
    for (std::uint64_t round = 0; round < 20; ++round) {
      if (side.rank() == 0) {
        for (std::uint64_t i = 0; i < 3; ++i) {
          Buffer data = filled(kBytes + i, 10 * round + i);
          finish(session.net(), startSend(session.net(), comm, data.data(), data.size(), 5));
          std::fill(data.begin(), data.end(), 0x77);
        }
        side.meet();
      } else {
        side.meet();
        for (std::uint64_t i = 0; i < 3; ++i) {
          receiveAndCheck(session.net(), comm, kBytes + i, 5, 10 * round + i);
        }
      }
    }
    side.meet();
    REQUIRE_OK(side.rank() == 0 ? session.net().closeSend(comm) : session.net().closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// More than the sockets hold of one tag, and the receiver wants the other one first.
TEST(Ahead, HoldsUpNoOtherTag) {
  const Outcome outcome = runPair([](const Side& side) {
    constexpr std::size_t kLarge = 12'000'000;
    constexpr std::uint64_t kMessages = 4;
    Session session(11);
    Net& net = session.net();
    void* const comm = usedConnection(side, session, 5);
    for (std::uint64_t round = 0; round < 3; ++round) {
      if (side.rank() == 0) {
        std::vector<Buffer> data;
        std::vector<void*> requests;
        for (std::uint64_t i = 0; i < kMessages; ++i) {
          data.push_back(filled(kLarge, 100 + i));
          requests.push_back(startSend(net, comm, data.back().data(), kLarge, 5));
        }
        const Buffer other = filled(kLarge, 7);
        finish(net, startSend(net, comm, other.data(), kLarge, -2));
        for (void* request : requests) finish(net, request);
      } else {
        receiveAndCheck(net, comm, kLarge, -2, 7);
        for (std::uint64_t i = 0; i < kMessages; ++i)
          receiveAndCheck(net, comm, kLarge, 5, 100 + i);
      }
      side.meet();
    }
    REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Messages that find the queue of the data sockets full are not overtaken by later ones: the
// receiver takes one at a time, and what it does not take yet must not lie before what it wants.
TEST(Ahead, IsNotOvertaken) {
  const Outcome outcome = runPair([](const Side& side) {
    constexpr std::size_t kLarge = 150'000;
    constexpr std::uint64_t kFirst = 220, kTaken = 60, kAll = 250;
    Session session(11);
    Net& net = session.net();
    void* const comm = usedConnection(side, session, 5);
    if (side.rank() == 0) {
      std::vector<Buffer> data;
      std::vector<void*> requests;
      const auto startUpTo = [&](std::uint64_t end) {
        while (requests.size() < end) {
          data.push_back(filled(kLarge, requests.size()));
          requests.push_back(startSend(net, comm, data.back().data(), kLarge, 5));
        }
      };
      startUpTo(kFirst);
      side.meet();
      startUpTo(kAll);
      for (void* request : requests) finish(net, request);
    } else {
      for (std::uint64_t i = 0; i < kAll; ++i) {
        receiveAndCheck(net, comm, kLarge, 5, i);
        if (i + 1 == kTaken) side.meet();
      }
    }
    side.meet();
    REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Small ones go another way, and the counting of the two is one.
TEST(Ahead, AmongSmallOnes) {
  const Outcome outcome = runPair([](const Side& side) {
    Session session(11);
    void* const comm = usedConnection(side, session, 5);
    const auto bytesOf = [](std::uint64_t i) {
      return i % 40 < 20 ? std::size_t{8} : kBytes;  // enough for receives not to be named
    };
    constexpr std::uint64_t kMessages = 400;
    if (side.rank() == 0) {
      for (std::uint64_t i = 0; i < kMessages; ++i) {
        const Buffer data = filled(bytesOf(i), i);
        finish(session.net(), startSend(session.net(), comm, data.data(), data.size(), 5));
      }
    } else {
      for (std::uint64_t i = 0; i < kMessages; ++i) {
        if (i % 10 == 0) ::usleep(3000);
        Buffer data(kBytes);
        int size = 0;
        finish(session.net(), startReceive(session.net(), comm, data.data(), kBytes, 5), &size);
        REQUIRE(size == static_cast<int>(bytesOf(i)));
        REQUIRE(matches(data.data(), bytesOf(i), i));
      }
    }
    side.meet();
    REQUIRE_OK(side.rank() == 0 ? session.net().closeSend(comm) : session.net().closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Sender and process are gone for longer than what is under way is waited for.
TEST(Ahead, OutlivesItsSender) {
  const Outcome outcome = runPair([](const Side& side) {
    Session session(11);
    Net& net = session.net();
    void* const comm = usedConnection(side, session, 5);
    if (side.rank() == 0) {
      for (std::uint64_t i = 0; i < 3; ++i) {
        const Buffer data = filled(kBytes, i);
        finish(net, startSend(net, comm, data.data(), kBytes, 5));
      }
      REQUIRE_OK(net.closeSend(comm));
      return;
    }
    ::usleep(2'500'000);
    for (std::uint64_t i = 0; i < 3; ++i) receiveAndCheck(net, comm, kBytes, 5, i);
    takeLog();
    Buffer data(kBytes);
    REQUIRE(failureOfReceive(net, comm, data.data(), kBytes, 5) == ncclRemoteError);
    (void)onlyWarning();
    REQUIRE_OK(net.closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Killed with much of it not sent; also one who waits for another tag is told.
TEST(Ahead, OfAKilledSenderFails) {
  for (const int wanted : {5, -2}) {
    const Outcome outcome = runPair([&](const Side& side) {
      constexpr std::size_t kLarge = 40'000'000;
      Session session(11);
      Net& net = session.net();
      void* const comm = usedConnection(side, session, 5);
      if (side.rank() == 0) {
        const Buffer data = filled(kLarge, 1);
        for (int i = 0; i < 3; ++i) (void)startSend(net, comm, data.data(), kLarge, 5);
        ::usleep(200'000);
        side.meet();
        ::raise(SIGKILL);
      }
      side.meet();
      ::usleep(100'000);
      takeLog();
      Buffer data(kLarge);
      REQUIRE(failureOfReceive(net, comm, data.data(), kLarge, wanted) == ncclRemoteError);
      (void)onlyWarning();
      REQUIRE_OK(net.closeReceive(comm));
    });
    ASSERT_EQ(outcome.statuses.size(), 2u);
    EXPECT_EQ(outcome.statuses[1], 0) << "tag " << wanted << ": " << outcome.text();
  }
}

}  // namespace
}  // namespace conformance
