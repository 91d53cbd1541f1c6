// Peers that die, stop, close or misbehave, at every stage: an error in bounded time, one line that
// says why, and closing never waits.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "test/conformance/session.h"

namespace conformance {
namespace {

/// No warning may hide behind another: the log of a failure has one, and it names the peer.
void expectOneLineAboutPeer() {
  const std::string line = onlyWarning();
  REQUIRE_SAYING(line.find("process ") != std::string::npos, line);
}

enum class Stage { Connected, ReceivePosted, LargeUnderWay, ManyUnderWay };
const char* nameOf(Stage stage) {
  switch (stage) {
    case Stage::Connected:
      return "Connected";
    case Stage::ReceivePosted:
      return "ReceivePosted";
    case Stage::LargeUnderWay:
      return "LargeUnderWay";
    case Stage::ManyUnderWay:
      return "ManyUnderWay";
  }
  return "";
}

/// Both sides bring a connection from rank 0 to that stage; what is open on this side.
std::vector<void*> bringTo(Stage stage, const Side& side, Net& net, void* comm,
                           std::vector<std::byte>* memory) {
  std::vector<void*> open;
  memory->resize(8 << 20);
  switch (stage) {
    case Stage::Connected:
      break;
    case Stage::ReceivePosted:
      if (side.rank() == 1) open.push_back(startReceive(net, comm, memory->data(), 100, 0));
      break;
    case Stage::LargeUnderWay:  // the sender has more than the sockets hold; one side waits
      open.push_back(side.rank() == 0 ? startSend(net, comm, memory->data(), memory->size(), 0)
                                      : startReceive(net, comm, memory->data(), memory->size(), 0));
      break;
    case Stage::ManyUnderWay:
      for (int i = 0; i < 16; ++i) {
        open.push_back(side.rank() == 0
                           ? startSend(net, comm, memory->data() + (i << 18), 1 << 18, i % 3)
                           : startReceive(net, comm, memory->data() + (i << 18), 1 << 18, i % 3));
      }
      break;
  }
  return open;
}

class PeerKilled : public testing::TestWithParam<std::tuple<Stage, int>> {};
INSTANTIATE_TEST_SUITE_P(Stages, PeerKilled,
                         testing::Combine(testing::Values(Stage::Connected, Stage::ReceivePosted,
                                                          Stage::LargeUnderWay,
                                                          Stage::ManyUnderWay),
                                          testing::Values(0, 1)),
                         [](const auto& info) {
                           return std::string(nameOf(std::get<0>(info.param))) + "_" +
                                  (std::get<1>(info.param) == 0 ? "sender" : "receiver");
                         });

TEST_P(PeerKilled, TheOtherSideHasAnErrorInTime) {
  const auto [stage, victim] = GetParam();
  const Outcome outcome = runPair([stage = stage, victim = victim](const Side& side) {
    Session session(11);
    Net& net = session.net();
    void* const comm = session.connectPair(side, 0);
    std::vector<std::byte> memory;
    takeLog();
    std::vector<void*> open = bringTo(stage, side, net, comm, &memory);
    side.meet();
    if (side.rank() == victim) ::kill(::getpid(), SIGKILL);
    // What the survivor then asks for fails, too, if it has nothing under way that must.
    const double start = now();
    ncclResult_t result = ncclSuccess;
    while (result == ncclSuccess) {
      REQUIRE_SAYING(now() - start < 5, "no error in time");
      for (std::size_t i = 0; i < open.size() && result == ncclSuccess;) {
        int done = 0;
        int sizes[8] = {};
        result = net.test(open[i], &done, sizes);
        if (done != 0) {
          open.erase(open.begin() + static_cast<long>(i));
        } else {
          ++i;
        }
      }
      if (result == ncclSuccess && open.size() < 20) {
        void* request = nullptr;
        void* place = memory.data();
        const std::size_t bytes = 1 << 18;
        const int tag = 9;
        result = side.rank() == 0 ? net.send(comm, place, bytes, tag, &request)
                                  : net.receive(comm, 1, &place, &bytes, &tag, &request);
        if (request != nullptr) open.push_back(request);
      }
      ::usleep(500);
    }
    REQUIRE(result == ncclRemoteError);
    expectOneLineAboutPeer();
    const double closing = now();
    REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
    REQUIRE(now() - closing < 1);
  });
  // The victim's status is its signal.
  EXPECT_FALSE(outcome.timedOut) << outcome.text();
  const int survivor = outcome.statuses[static_cast<std::size_t>(1 - victim)];
  EXPECT_TRUE(WIFEXITED(survivor) && WEXITSTATUS(survivor) == 0) << outcome.text();
  EXPECT_TRUE(WIFSIGNALED(outcome.statuses[static_cast<std::size_t>(victim)]));
}

// Killed while the connection is being made, at a random moment of it.
TEST(PeerKilledInSetUp, TheOtherSideHasAnErrorOrNothing) {
  for (int round = 0; round < 12; ++round) {
    const int victim = round % 2;
    const Outcome outcome = runPair([=](const Side& side) {
      Session session(11);
      Net& net = session.net();
      Handle handle;
      void* comm = nullptr;
      void* listener = nullptr;
      if (side.rank() == 0) {
        side.take(handle.data(), handle.size());
      } else {
        listener = session.listen(&handle);
        side.give(handle.data(), handle.size());
      }
      takeLog();
      int calls = 0;
      ncclResult_t result = ncclSuccess;
      const double start = now();
      // The accepting side may never hear of a peer that has not begun; NCCL's bootstrap tells it.
      while (result == ncclSuccess && comm == nullptr && now() - start < 1.5) {
        if (side.rank() == victim && calls++ == round / 2) ::kill(::getpid(), SIGKILL);
        result = side.rank() == 0 ? net.connect(session.context(), 0, handle.data(), &comm)
                                  : net.accept(listener, &comm);
        ::usleep(300);
      }
      if (side.rank() == victim) ::kill(::getpid(), SIGKILL);
      if (side.rank() == 0) REQUIRE(result != ncclSuccess || comm != nullptr);
      if (result != ncclSuccess) {
        REQUIRE(result == ncclRemoteError || result == ncclSystemError);
        (void)onlyWarning();
      } else if (comm != nullptr) {
        std::vector<std::byte> memory(1 << 20);
        const ncclResult_t failure =
            side.rank() == 0 ? failureOfSend(net, comm, memory.data(), memory.size(), 0)
                             : failureOfReceive(net, comm, memory.data(), memory.size(), 0);
        REQUIRE(failure == ncclRemoteError);
      }
    });
    EXPECT_FALSE(outcome.timedOut) << round << ": " << outcome.text();
    const int survivor = outcome.statuses[static_cast<std::size_t>(1 - victim)];
    EXPECT_TRUE(WIFEXITED(survivor) && WEXITSTATUS(survivor) == 0)
        << round << ": " << outcome.text();
  }
}

// A peer that is stopped is waited for, but not in close; nor is one that never reads.
TEST(CloseNeverWaits, ForAStoppedPeer) {
  for (const int closing : {0, 1}) {
    const Outcome outcome = runPair([=](const Side& side) {
      Session session(11);
      Net& net = session.net();
      void* const comm = session.connectPair(side, 0);
      std::vector<std::byte> memory;
      pid_t other = ::getpid();
      side.give(&other, sizeof other);
      side.take(&other, sizeof other);
      const std::vector<void*> open = bringTo(Stage::ManyUnderWay, side, net, comm, &memory);
      side.meet();
      if (side.rank() != closing) {
        char end;
        while (::recv(side.fd(), &end, 1, 0) < 0) {
        }
        return;
      }
      ::kill(other, SIGSTOP);
      const double start = now();
      REQUIRE_OK(closing == 0 ? net.closeSend(comm) : net.closeReceive(comm));
      REQUIRE_SAYING(now() - start < 0.5, std::to_string(now() - start) + " s");
      session.end();
      ::kill(other, SIGCONT);
      side.give("", 1);
    });
    EXPECT_TRUE(outcome.ok()) << outcome.text();
  }
}

// A peer that closes in order: what was sent is there, then an error.
TEST(PeerCloses, LaterReceivesFail) {
  const Outcome outcome = runPair([](const Side& side) {
    Session session(11);
    Net& net = session.net();
    void* const comm = session.connectPair(side, 0);
    if (side.rank() == 0) {
      for (const std::uint64_t value : {41, 42}) {
        finish(net, startSend(net, comm, &value, sizeof value, 0));
      }
      REQUIRE_OK(net.closeSend(comm));
      side.meet();
      return;
    }
    std::uint64_t first = 0, got = 0, never = 0;
    void* const one = startReceive(net, comm, &first, sizeof first, 0);
    void* const two = startReceive(net, comm, &got, sizeof got, 0);
    side.meet();
    takeLog();
    REQUIRE(failureOfReceive(net, comm, &never, sizeof never, 0) == ncclRemoteError);
    expectOneLineAboutPeer();
    finish(net, two);
    finish(net, one);
    REQUIRE(first == 41 && got == 42 && never == 0);
    // The error stays.
    void* request = nullptr;
    void* place = &got;
    const std::size_t bytes = sizeof got;
    const int tag = 0;
    REQUIRE(net.receive(comm, 1, &place, &bytes, &tag, &request) == ncclRemoteError);
    REQUIRE(takeLog().empty());
    REQUIRE_OK(net.closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

class TooSmall : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Sizes, TooSmall, testing::Values(100, 500000));

// A message larger than its receive is an error on both sides, and nothing is written.
TEST_P(TooSmall, ReceiveOfAShorterMessage) {
  const std::size_t bytes = GetParam();
  const Outcome outcome = runPair([bytes](const Side& side) {
    Session session(11);
    Net& net = session.net();
    void* const comm = session.connectPair(side, 0);
    std::vector<unsigned char> memory(bytes, 0xcd);
    takeLog();
    if (side.rank() == 0) {
      if (bytes > 16384) {
        REQUIRE(failureOfSend(net, comm, memory.data(), bytes, 3) == ncclInvalidArgument);
        REQUIRE(onlyWarning().find("takes " + std::to_string(bytes - 1)) != std::string::npos);
      } else {
        finish(net, startSend(net, comm, memory.data(), bytes, 3));
        // The receiver has closed.
        REQUIRE(failureOfSend(net, comm, memory.data(), std::size_t{1} << 20, 3) ==
                ncclRemoteError);
      }
    } else {
      const ncclResult_t result = failureOfReceive(net, comm, memory.data(), bytes - 1, 3);
      REQUIRE(result == (bytes > 16384 ? ncclRemoteError : ncclInvalidArgument));
      const std::string line = onlyWarning();
      if (bytes <= 16384) {
        REQUIRE_SAYING(line.find("100 bytes") != std::string::npos, line);
        REQUIRE_SAYING(line.find("99") != std::string::npos, line);
      }
      REQUIRE(allBytes(memory.data(), memory.size(), 0xcd));
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST(BadArguments, AreRefused) {
  const Outcome outcome = runAlone([] {
    Session session(11);
    Net& net = session.net();
    Handle handle;
    void* out = nullptr;
    takeLog();
    REQUIRE(net.listen(session.context(), 99, handle.data(), &out) == ncclInvalidArgument);
    (void)onlyWarning();
    REQUIRE(net.listen(session.context(), 0, nullptr, &out) == ncclInvalidArgument);
    (void)onlyWarning();
    REQUIRE(net.connect(session.context(), -1, handle.data(), &out) == ncclInvalidArgument);
    (void)onlyWarning();
    int done = 0;
    REQUIRE(net.test(nullptr, &done, nullptr) == ncclInvalidArgument);
    (void)onlyWarning();
    REQUIRE(net.devices(nullptr) == ncclInvalidArgument);
    (void)onlyWarning();
    REQUIRE_OK(net.closeSend(nullptr));
    void* const listener = session.listen(&handle);
    REQUIRE_OK(net.closeListen(listener));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

ncclResult_t connectUntilError(Session& session, Handle handle, double seconds) {
  void* comm = nullptr;
  const double start = now();
  for (;;) {
    const ncclResult_t result = session.net().connect(session.context(), 0, handle.data(), &comm);
    if (result != ncclSuccess) return result;
    REQUIRE(comm == nullptr);
    REQUIRE_SAYING(now() - start < seconds, "no error in time");
    ::usleep(500);
  }
}

TEST(Connect, ToAHandleThatIsNotOurs) {
  const Outcome outcome = runAlone([] {
    Session session(11);
    Handle good;
    void* const listener = session.listen(&good);
    takeLog();
    Handle zero{};
    REQUIRE(connectUntilError(session, zero, 1) == ncclRemoteError);
    REQUIRE(onlyWarning().find("another net plugin") != std::string::npos);
    Handle foreign;
    fill(foreign.data(), foreign.size(), 7);
    REQUIRE(connectUntilError(session, foreign, 1) == ncclRemoteError);
    REQUIRE(onlyWarning().find("NCCL_NET_PLUGIN") != std::string::npos);
    Handle newer = good;
    newer[4] = std::byte{9};
    REQUIRE(connectUntilError(session, newer, 1) == ncclRemoteError);
    REQUIRE(onlyWarning().find("same version") != std::string::npos);
    for (std::size_t at = 8; at < 47; ++at) {  // nonce and address
      Handle bent = good;
      bent[at] ^= std::byte{0x10};
      REQUIRE(connectUntilError(session, bent, 1) == ncclRemoteError);
      REQUIRE(onlyWarning().find("damaged") != std::string::npos);
    }
    REQUIRE_OK(session.net().closeListen(listener));
    REQUIRE(connectUntilError(session, good, 2) == ncclRemoteError);
    const std::string line = onlyWarning();
    REQUIRE_SAYING(line.find("nobody listens") != std::string::npos, line);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// The port of a handle: bytes 24 to 46 are the packed address, family first, then the port.
std::uint16_t portOf(const Handle& handle) {
  return static_cast<std::uint16_t>(std::to_integer<unsigned>(handle[25]) << 8 |
                                    std::to_integer<unsigned>(handle[26]));
}

int listenOn(const Handle& handle) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(portOf(handle));
  std::memcpy(&address.sin_addr, handle.data() + 31, 4);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int one = 1;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  REQUIRE(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(::listen(fd, 16) == 0);
  return fd;
}

// Another program has taken the port over: one that greets, and one that closes.
TEST(Connect, ToAnotherProgram) {
  const Outcome outcome = runAlone([] {
    ::setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
    for (const std::string_view greeting : {"SSH-2.0-OpenSSH_9.2 and more\r\n", ""}) {
      Session session(11);
      Handle handle;
      REQUIRE_OK(session.net().closeListen(session.listen(&handle)));
      const int other = listenOn(handle);
      takeLog();
      Handle own = handle;
      void* comm = nullptr;
      ncclResult_t result = ncclSuccess;
      const double start = now();
      while (result == ncclSuccess) {
        REQUIRE(now() - start < 5);
        result = session.net().connect(session.context(), 0, own.data(), &comm);
        pollfd knock{other, POLLIN, 0};
        if (::poll(&knock, 1, 1) > 0) {
          const int accepted = ::accept(other, nullptr, nullptr);
          if (!greeting.empty())
            (void)::send(accepted, greeting.data(), greeting.size(), MSG_NOSIGNAL);
          ::close(accepted);
        }
      }
      REQUIRE(result == ncclRemoteError);
      (void)onlyWarning();
      ::close(other);
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Strangers at the listener's port, with garbage, half a greeting or nothing, are nobody's error
// and hold nobody up.
TEST(Accept, AmongStrangers) {
  const Outcome outcome = runPair([](const Side& side) {
    ::setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
    Session session(11);
    Net& net = session.net();
    Handle handle;
    if (side.rank() == 1) {
      void* const listener = session.listen(&handle);
      takeLog();
      side.give(handle.data(), handle.size());
      void* const comm = session.accept(listener);
      std::uint64_t value = 0;
      finish(net, startReceive(net, comm, &value, sizeof value, 0));
      REQUIRE(value == 77);
      for (const LogLine& line : takeLog()) REQUIRE_SAYING(line.level != 2, line.text);
      side.meet();
      return;
    }
    side.take(handle.data(), handle.size());
    std::vector<int> strangers;
    for (int i = 0; i < 24; ++i) {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_port = htons(portOf(handle));
      std::memcpy(&address.sin_addr, handle.data() + 31, 4);
      const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      REQUIRE(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
      char garbage[300];
      fill(garbage, sizeof garbage, static_cast<unsigned>(i));
      if (i % 3 > 0) (void)::send(fd, garbage, i % 3 == 1 ? sizeof garbage : 5, MSG_NOSIGNAL);
      strangers.push_back(fd);
    }
    void* const comm = session.connect(handle);
    const std::uint64_t value = 77;
    finish(net, startSend(net, comm, &value, sizeof value, 0));
    side.meet();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// A peer that accepts late, later than any time-out of ours, is waited for.
TEST(Connect, ToALatePeer) {
  const Outcome outcome = runPair([](const Side& side) {
    ::setenv("HOCCL_TIMEOUT_MS", "300", 1);
    Session session(11);
    Net& net = session.net();
    Handle handle;
    void* comm = nullptr;
    if (side.rank() == 1) {
      void* const listener = session.listen(&handle);
      side.give(handle.data(), handle.size());
      ::usleep(1500000);
      comm = session.accept(listener);
    } else {
      side.take(handle.data(), handle.size());
      comm = session.connect(handle);
    }
    std::uint64_t value = side.rank() == 0 ? 5 : 0;
    finish(net, side.rank() == 0 ? startSend(net, comm, &value, 8, 0)
                                 : startReceive(net, comm, &value, 8, 0));
    REQUIRE(value == 5);
    side.meet();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
