// The plugin over queue pairs. Runs where there is an RDMA device, as in the guests of the RDMA lab
// (docs/rdma-lab.md), and is skipped elsewhere; with two guests both sides run it.

#include <arpa/inet.h>
#include <dirent.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "test/conformance/session.h"

namespace conformance {
namespace {

constexpr int kHost = hoccl::nccl_abi::kHostPointer;

bool twoNodes() {
  const char* nodes = std::getenv("NODES");
  return nodes != nullptr && std::string(nodes) == "2";
}

std::vector<std::string> rdmaDevices() {
  std::vector<std::string> names;
  DIR* const folder = ::opendir("/sys/class/infiniband");
  while (const dirent* entry = folder != nullptr ? ::readdir(folder) : nullptr) {
    if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
  }
  if (folder != nullptr) ::closedir(folder);
  return names;
}

/// Packets that the soft-RoCE devices have sent.
std::uint64_t packetsSent() {
  std::uint64_t all = 0;
  for (const std::string& name : rdmaDevices()) {
    std::ifstream file("/sys/class/infiniband/" + name + "/ports/1/hw_counters/sent_pkts");
    std::uint64_t count = 0;
    if (file >> count) all += count;
  }
  return all;
}

class Verbs : public testing::Test {
 protected:
  void TearDown() override {
    if (twoNodes()) {
      EXPECT_EQ(std::system("lab heal all"), 0);
    }
  }
  void SetUp() override {
    if (rdmaDevices().empty()) GTEST_SKIP() << "no RDMA device (docs/rdma-lab.md)";
    ::setenv("HOCCL_TRANSPORT", "verbs", 1);
    ::unsetenv("CONFORMANCE_REGISTER");
    if (std::getenv("HOCCL_IB_TIMEOUT") == nullptr) ::setenv("HOCCL_IB_TIMEOUT", "18", 1);
  }
};

struct Registered {
  Registered(Net& net, void* comm, std::size_t bytes) : net(net), comm(comm), data(bytes, 0xcd) {
    REQUIRE_OK(net.registerMemory(comm, data.data(), bytes, kHost, &handle));
    REQUIRE(handle != nullptr);
  }
  ~Registered() { REQUIRE_OK(net.deregisterMemory(comm, handle)); }
  Net& net;
  void* comm;
  std::vector<unsigned char> data;
  void* handle = nullptr;
};

void* sendFrom(Net& net, void* comm, const void* data, std::size_t bytes, void* handle) {
  const double start = now();
  for (void* request = nullptr;;) {
    REQUIRE_OK(net.send(comm, data, bytes, 1, &request, handle));
    if (request != nullptr) return request;
    REQUIRE(now() - start < 10 * patience());
    ::sched_yield();
  }
}

void* receiveInto(Net& net, void* comm, void* data, std::size_t bytes, void* handle) {
  const int tag = 1;
  const double start = now();
  for (void* request = nullptr;;) {
    REQUIRE_OK(net.receive(comm, 1, &data, &bytes, &tag, &request, &handle));
    if (request != nullptr) return request;
    REQUIRE(now() - start < 10 * patience());
    ::sched_yield();
  }
}

TEST_F(Verbs, DevicesAreThePorts) {
  const Outcome outcome = runAlone([] {
    Session session(12);
    int count = 0;
    REQUIRE_OK(session.net().devices(&count));
    REQUIRE(static_cast<std::size_t>(count) == rdmaDevices().size());
    for (int device = 0; device < count; ++device) {
      Properties p;
      REQUIRE_OK(session.net().properties(device, &p));
      REQUIRE_SAYING(p.name == "rxe" + std::to_string(device), p.name);
      REQUIRE(p.guid != 0 && p.speedMbps > 0 && p.pointerSupport == kHost);
      REQUIRE(p.maxReceives == hoccl::nccl_abi::kMaxGroupedReceives);
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// What is registered on both sides goes over the NIC; what one side has not registered does not,
// and arrives all the same.
TEST_F(Verbs, RegisteredMemoryGoesOverTheNic) {
  const Outcome outcome = runPair([](const Side& side) {
    constexpr std::size_t kBytes = 1500037, kPacket = 4096;
    Session session(12);
    Net& net = session.net();
    void* const comm = session.connectPair(side, 0);
    Registered memory(net, comm, kBytes + 64);
    std::uint64_t seed = 0;
    for (const int unregistered : {-1, 0, 1}) {
      void* const handle = side.rank() == unregistered ? nullptr : memory.handle;
      ++seed;
      side.meet();
      const std::uint64_t before = packetsSent();
      if (side.rank() == 0) {
        fill(memory.data.data(), kBytes, seed);
        REQUIRE(finish(net, sendFrom(net, comm, memory.data.data(), kBytes, handle)) ==
                static_cast<int>(kBytes));
      } else {
        void* const request = receiveInto(net, comm, memory.data.data(), kBytes + 32, handle);
        REQUIRE(finish(net, request) == static_cast<int>(kBytes));
        REQUIRE(matches(memory.data.data(), kBytes, seed));
        REQUIRE(allBytes(memory.data.data() + kBytes, 64, 0xcd));
      }
      side.meet();
      const std::uint64_t packets = packetsSent() - before;
      const bool sees = side.rank() == 0 || !twoNodes();
      const bool all = packets >= kBytes / kPacket, none = packets < kBytes / kPacket / 10;
      REQUIRE_SAYING(!sees || (unregistered < 0 ? all : none), std::to_string(packets));
    }
    side.meet();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// A receive that is open is written by nobody once a small message has filled it, and one in the
// same place later gets its own bytes.
TEST_F(Verbs, SmallAndLargeInTurns) {
  const Outcome outcome = runPair([](const Side& side) {
    constexpr std::size_t kRoom = 200000;
    Session session(11);
    Net& net = session.net();
    void* const comm = session.connectPair(side, 1);
    Registered memory(net, comm, kRoom);
    for (std::size_t i = 0; i < 40; ++i) {
      const std::size_t bytes = i % 3 == 0 ? 100 + i : i % 7 == 0 ? 0 : kRoom - i;
      if (side.rank() == 1) {
        fill(memory.data.data(), bytes, i);
        (void)finish(net, sendFrom(net, comm, memory.data.data(), bytes, memory.handle));
      } else {
        void* const request = receiveInto(net, comm, memory.data.data(), kRoom, memory.handle);
        REQUIRE(finish(net, request) == static_cast<int>(bytes));
        REQUIRE(matches(memory.data.data(), bytes, i));
      }
    }
    side.meet();
    REQUIRE_OK(side.rank() == 1 ? net.closeSend(comm) : net.closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// One device of two NICs, as NCCL makes them of the ports of an adapter.
TEST_F(Verbs, TwoNicsAsOneDevice) {
  if (rdmaDevices().size() < 2) GTEST_SKIP() << "one RDMA device";
  const Outcome outcome = runPair([](const Side& side) {
    constexpr std::size_t kBytes = 1000001;
    Session session(12);
    Net& net = session.net();
    const int both[] = {0, 1}, twice[] = {0, 0};
    int device = -1, again = -1, count = 0;
    REQUIRE(net.makeVirtual(2, twice, &device) != ncclSuccess);
    REQUIRE_OK(net.makeVirtual(2, both, &device));
    REQUIRE_OK(net.makeVirtual(2, both, &again));
    REQUIRE_OK(net.devices(&count));
    REQUIRE(device == count - 1 && again == device);
    Properties p;
    REQUIRE_OK(net.properties(device, &p));
    REQUIRE_SAYING(p.name == "rxe0+rxe1" && p.virtualDevices == 2, p.name);
    void* const comm = session.connectPair(side, 0, device);
    Registered memory(net, comm, kBytes);
    for (std::uint64_t seed = 1; seed < 5; ++seed) {
      if (side.rank() == 0) {
        fill(memory.data.data(), kBytes, seed);
        finish(net, sendFrom(net, comm, memory.data.data(), kBytes, memory.handle));
      } else {
        finish(net, receiveInto(net, comm, memory.data.data(), kBytes, memory.handle));
        REQUIRE(matches(memory.data.data(), kBytes, seed));
      }
      side.meet();
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

/// As if a module for peer memory were loaded: seen by this process only.
void pretendPeerMemory() {
  REQUIRE(::unshare(CLONE_NEWNS) == 0);
  REQUIRE(::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
  REQUIRE(::mount("none", "/sys/module", "tmpfs", 0, nullptr) == 0);
  REQUIRE(::mkdir("/sys/module/nvidia_peermem", 0755) == 0);
}

/// Memory that NICs reach and, while it is locked, the CPU does not: as that of a GPU. Whoever
/// touches it dies.
struct Unreachable {
  Unreachable(Net& net, void* comm, std::size_t size)
      : net(net),
        bytes(size),
        data(static_cast<unsigned char*>(
            ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
        comm(comm) {
    std::memset(data, 0xcd, bytes);
    REQUIRE_OK(net.registerMemory(comm, data, bytes, hoccl::nccl_abi::kDevicePointer, &handle));
    REQUIRE(handle != nullptr);
  }
  ~Unreachable() {
    REQUIRE_OK(net.deregisterMemory(comm, handle));
    ::munmap(data, bytes);
  }
  void lock() const { REQUIRE(::mprotect(data, bytes, PROT_NONE) == 0); }
  void unlock() const { REQUIRE(::mprotect(data, bytes, PROT_READ | PROT_WRITE) == 0); }
  Net& net;
  std::size_t bytes;
  unsigned char* data;
  void* comm;
  void* handle = nullptr;
};

// What the CPU cannot reach goes over the NICs alone, small messages, too, to and from such memory,
// and is flushed.
TEST_F(Verbs, MemoryThatTheCpuDoesNotReach) {
  const Outcome outcome = runPair([](const Side& side) {
    constexpr std::size_t kRoom = 400 << 10;
    pretendPeerMemory();
    Session session(12);
    Net& net = session.net();
    Properties p;
    REQUIRE_OK(net.properties(0, &p));
    REQUIRE(p.pointerSupport == (kHost | hoccl::nccl_abi::kDevicePointer));
    void* const comm = session.connectPair(side, 0);
    Unreachable far(net, comm, kRoom);
    Registered near(net, comm, kRoom);
    std::uint64_t seed = 0;
    for (const bool farSends : {true, false}) {
      for (const bool farReceives : {true, false}) {
        for (const std::size_t bytes : {1u, 0u, 8u, 5000u, 16384u, 16385u, 300001u}) {
          const bool exact = ++seed % 2 == 0;
          if (side.rank() == 0) {
            unsigned char* const data = farSends ? far.data : near.data.data();
            fill(data, bytes, seed);
            if (farSends) far.lock();
            finish(net, sendFrom(net, comm, data, bytes, farSends ? far.handle : near.handle));
            if (farSends) far.unlock();
            continue;
          }
          // A receive that is no larger than the message may be a small one, too.
          const std::size_t room = exact ? std::max<std::size_t>(bytes, 1) : kRoom - 64;
          unsigned char* const data = farReceives ? far.data : near.data.data();
          void* const handle = farReceives ? far.handle : near.handle;
          std::memset(data, 0xcd, kRoom);
          if (farReceives) far.lock();
          const int got = finish(net, receiveInto(net, comm, data, room, handle));
          REQUIRE(got == static_cast<int>(bytes));
          void* flush = nullptr;
          REQUIRE_OK(net.flush(comm, data, got, &flush, handle));
          REQUIRE((flush != nullptr) == (farReceives && bytes > 0));
          if (flush != nullptr) finish(net, flush);
          if (farReceives) far.unlock();
          REQUIRE(matches(data, bytes, seed));
          REQUIRE(allBytes(data + bytes, kRoom - bytes, 0xcd));
        }
      }
    }
    side.meet();
    // What is not registered cannot come from there, nor go there: an error, and no crash.
    takeLog();
    if (side.rank() == 0) {
      std::vector<unsigned char> plain(kRoom);
      REQUIRE(failureOfSend(net, comm, plain.data(), kRoom - 64, 1) != ncclSuccess);
      REQUIRE(onlyWarning().find("device memory") != std::string::npos);
    } else {
      far.lock();
      void* const request = receiveInto(net, comm, far.data, kRoom, far.handle);
      REQUIRE(failureOf(net, request) == ncclRemoteError);
      far.unlock();
    }
    side.meet();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

/// Type of service of a packet that leaves over that interface for soft-RoCE's port; -1: none
/// comes.
int serviceOfNextPacket(int socket) {
  constexpr std::uint16_t kRocePort = 4791;
  const double start = now();
  while (now() - start < 5 * patience()) {
    unsigned char packet[64];
    const ssize_t got = ::recv(socket, packet, sizeof packet, MSG_DONTWAIT | MSG_TRUNC);
    if (got < 28 || packet[0] != 0x45 || packet[9] != IPPROTO_UDP) {
      ::usleep(1000);
      continue;
    }
    if ((packet[22] << 8 | packet[23]) == kRocePort) return packet[1];
  }
  return -1;
}

// ncclConfig.trafficClass: of a connection's packets, those of both ends; a variable is ahead of
// it; one that there is not is an error of init, or where init does not hear of it, of connect.
TEST_F(Verbs, TrafficClassOfACommunicator) {
  for (const int version : {10, 11, 12}) {
    for (const char* variable : {"", "64"}) {
      if (!twoNodes()) break;  // to itself soft-RoCE sends no packets
      ::setenv("NCCL_IB_TC", variable, 1);
      const Outcome outcome = runPair([&](const Side& side) {
        if (side.rank() == 0) trafficClass = 104;
        Session session(version);
        Net& net = session.net();
        const int sniffer = ::socket(AF_PACKET, SOCK_DGRAM | SOCK_CLOEXEC, htons(ETH_P_ALL));
        REQUIRE(sniffer >= 0);
        sockaddr_ll rail{};
        rail.sll_family = AF_PACKET;
        rail.sll_protocol = htons(ETH_P_ALL);
        rail.sll_ifindex = static_cast<int>(::if_nametoindex("rail0"));
        REQUIRE(rail.sll_ifindex > 0);
        void* const comm = session.connectPair(side, 0);
        REQUIRE(::bind(sniffer, reinterpret_cast<sockaddr*>(&rail), sizeof rail) == 0);
        Registered memory(net, comm, 100000);
        side.meet();
        void* const request =
            side.rank() == 0
                ? sendFrom(net, comm, memory.data.data(), memory.data.size(), memory.handle)
                : receiveInto(net, comm, memory.data.data(), memory.data.size(), memory.handle);
        finish(net, request);
        const int is = serviceOfNextPacket(sniffer), wanted = *variable != '\0' ? 64 : 104;
        REQUIRE_SAYING(is == wanted, "type of service " + std::to_string(is));
        side.meet();
      });
      ::unsetenv("NCCL_IB_TC");
      EXPECT_TRUE(outcome.ok()) << outcome.text();
    }
    const Outcome refused = runAlone([&] {
      trafficClass = 300;
      Session session(version, version == 10);
      Net& net = session.net();
      void* context = nullptr;
      if (version == 10) {
        trafficClass = -1;
        Handle handle;
        void* const listener = session.listen(&handle);
        trafficClass = 300;
        void* comm = nullptr;
        takeLog();
        REQUIRE(net.connect(session.context(), 0, handle.data(), &comm) != ncclSuccess);
        REQUIRE_OK(net.closeListen(listener));
      } else {
        REQUIRE(net.init(&context, sessionLogger()) != ncclSuccess);
      }
      const std::string warning = onlyWarning();
      REQUIRE_SAYING(warning.find("ncclConfig.trafficClass=300") != std::string::npos &&
                         warning.find("0 to 255") != std::string::npos,
                     warning);
    });
    EXPECT_TRUE(refused.ok()) << refused.text();
  }
}

/// Root may lock what it likes; this process from now on no more than so much.
void limitLockedMemory(rlim_t bytes) {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2]{};
  REQUIRE(::syscall(SYS_capget, &header, data) == 0);
  for (std::uint32_t* set : {&data[0].effective, &data[0].permitted, &data[0].inheritable}) {
    *set &= ~(1u << CAP_IPC_LOCK);
  }
  REQUIRE(::syscall(SYS_capset, &header, data) == 0);
  const rlimit limit{bytes, bytes};
  REQUIRE(::setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
}

// Each gives one warning that names what to change. With `auto` a variable that makes no sense
// means tcp.
TEST_F(Verbs, Rule10BadInputIsOneLine) {
  const struct {
    const char *variable, *value, *says;
  } cases[] = {{"HOCCL_IB_HCA", "=there_is_none", "there are: rxe0"},
               {"NCCL_IB_HCA", "mlx5", "there are: rxe0"},
               {"HOCCL_IB_GID_INDEX", "99", "rxe0 has no GID of index 99; it has: "},
               {"NCCL_IB_GID_INDEX", "rxe0:42", "rxe0 has no GID of index 42"},
               {"HOCCL_IB_TC", "256", "allowed: 0 to 255"},
               {"NCCL_IB_TC", "high", "allowed: 0 to 255"},
               {"NCCL_IB_SL", "16", "allowed: 0 to 15"},
               {"NCCL_IB_QPS_PER_CONNECTION", "0", "allowed: 1 to "}};
  for (const auto& bad : cases) {
    for (const char* transport : {"verbs", "auto"}) {
      const Outcome outcome = runAlone([&] {
        ::setenv("HOCCL_TRANSPORT", transport, 1);
        ::setenv(bad.variable, bad.value, 1);
        Session session(12, false);
        void* context = nullptr;
        const bool verbs = std::string(transport) == "verbs";
        REQUIRE((session.net().init(&context, sessionLogger()) == ncclSuccess) == !verbs);
        const std::string warning = onlyWarning();
        REQUIRE_SAYING(
            warning.find(std::string(bad.variable) + "='" + bad.value) != std::string::npos &&
                warning.find(bad.says) != std::string::npos,
            warning);
        if (!verbs) REQUIRE_OK(session.net().finalize(context));
      });
      EXPECT_TRUE(outcome.ok()) << bad.variable << " with " << transport << ": " << outcome.text();
    }
  }
  const Outcome limited = runAlone([] {
    Session session(12);
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
    limitLockedMemory(128 << 10);
    std::vector<unsigned char> memory(8 << 20);
    void* mr = nullptr;
    takeLog();
    REQUIRE(net.registerMemory(sends, memory.data(), memory.size(), kHost, &mr) != ncclSuccess);
    const std::string warning = onlyWarning();
    REQUIRE_SAYING(warning.find("rxe0") != std::string::npos &&
                       warning.find("RLIMIT_MEMLOCK is 128 KiB") != std::string::npos &&
                       warning.find("ulimit -l") != std::string::npos,
                   warning);
    REQUIRE_OK(net.closeSend(sends));
    REQUIRE_OK(net.closeReceive(receives));
    REQUIRE_OK(net.closeListen(listener));
  });
  EXPECT_TRUE(limited.ok()) << limited.text();
}

// Both ends have NICs, and nothing gets from one to the other: an error of both in time.
TEST_F(Verbs, Rule10NicsThatDoNotReachEachOther) {
  if (!twoNodes()) GTEST_SKIP() << "needs two nodes";
  ::setenv("HOCCL_SOCKET_IFNAME", "mgmt0", 1);
  ::setenv("HOCCL_IB_RETRY_CNT", "6", 1);  // with 7 soft-RoCE tries for ever
  ::setenv("HOCCL_IB_TIMEOUT", "14", 1);
  const Outcome outcome = runPair([](const Side& side) {
    if (side.rank() == 0) REQUIRE(std::system("lab cut all") == 0);
    side.meet();
    Session session(12);
    Net& net = session.net();
    Handle handle;
    void *comm = nullptr, *listener = nullptr;
    if (side.rank() == 0) {
      side.take(handle.data(), handle.size());
    } else {
      listener = session.listen(&handle);
      side.give(handle.data(), handle.size());
    }
    takeLog();
    const double start = now();
    ncclResult_t result = ncclSuccess;
    while (result == ncclSuccess) {
      result = side.rank() == 0 ? net.connect(session.context(), 0, handle.data(), &comm)
                                : net.accept(listener, &comm);
      REQUIRE(comm == nullptr && now() - start < 20 * patience());
      ::usleep(1000);
    }
    std::string all;
    for (const LogLine& line : takeLog()) {
      if (line.level == hoccl::nccl_abi::kLogWarn) all += line.text + "\n";
    }
    for (const char* part : {"Do these NICs reach each other", "HOCCL_IB_HCA", "HOCCL_IB_GID_INDEX",
                             "HOCCL_TRANSPORT=tcp", "rxe0"}) {
      REQUIRE_SAYING(all.find(part) != std::string::npos, all);
    }
    if (listener != nullptr) REQUIRE_OK(net.closeListen(listener));
    side.meet();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Both NICs are cut off, and one comes back, again and again under traffic: everything arrives.
TEST_F(Verbs, FlapsUnderTraffic) {
  if (!twoNodes() || rdmaDevices().size() < 2) GTEST_SKIP() << "needs two nodes with two NICs";
  ::setenv("HOCCL_SOCKET_IFNAME", "mgmt0", 1);
  ::setenv("HOCCL_IB_RETRY_CNT", "6", 1);  // with 7 soft-RoCE tries for ever
  ::setenv("HOCCL_IB_TIMEOUT", "15", 1);
  ::setenv("HOCCL_TIMEOUT_MS", "60000", 1);
  const Outcome outcome = runPair(
      [](const Side& side) {
        constexpr std::size_t kBytes = 500007, kMessages = 24, kAtOnce = 3;
        Session session(12);
        Net& net = session.net();
        const int both[] = {0, 1};
        int device = -1;
        REQUIRE_OK(net.makeVirtual(2, both, &device));
        void* const comm = session.connectPair(side, 0, device);
        std::vector<std::unique_ptr<Registered>> memory;
        for (std::size_t i = 0; i < kAtOnce; ++i) {
          memory.push_back(std::make_unique<Registered>(net, comm, kBytes));
        }
        // One after the other, behind the test's back.
        const char* const orders[] = {"lab cut all; sleep 2; lab heal 0",
                                      "lab cut 0; lab heal 1; sleep 1; lab cut all; lab heal 0",
                                      "lab heal all; sleep 1; lab cut all; sleep 1; lab heal 1"};
        std::thread flaps;
        for (std::size_t begun = 0; begun < kMessages; begun += kAtOnce) {
          if (side.rank() == 0 && begun % (2 * kAtOnce) == kAtOnce) {
            if (flaps.joinable()) flaps.join();
            const char* const order = orders[begun / (2 * kAtOnce) % std::size(orders)];
            flaps = std::thread([order] { REQUIRE(std::system(order) == 0); });
          }
          void* requests[kAtOnce] = {};
          for (std::size_t i = 0; i < kAtOnce; ++i) {
            unsigned char* const data = memory[i]->data.data();
            if (side.rank() == 0) fill(data, kBytes, begun + i);
            requests[i] = side.rank() == 0
                              ? sendFrom(net, comm, data, kBytes, memory[i]->handle)
                              : receiveInto(net, comm, data, kBytes, memory[i]->handle);
          }
          for (std::size_t i = 0; i < kAtOnce; ++i) {
            finish(net, requests[i], nullptr, 60);
            if (side.rank() == 1) REQUIRE(matches(memory[i]->data.data(), kBytes, begun + i));
          }
        }
        if (flaps.joinable()) flaps.join();
        side.meet();
        if (side.rank() == 0) REQUIRE(std::system("lab heal all") == 0);
        side.meet();
        memory.clear();
        REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
      },
      150);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// A NIC of two is cut off in the middle: everything arrives. Then the other one, too: both ends
// have an error in time.
TEST_F(Verbs, CutsUnderTraffic) {
  if (!twoNodes() || rdmaDevices().size() < 2) GTEST_SKIP() << "needs two nodes with two NICs";
  ::setenv("HOCCL_SOCKET_IFNAME", "mgmt0", 1);
  // Tries for ever with a count of 7.
  ::setenv("HOCCL_IB_RETRY_CNT", "6", 1);
  ::setenv("HOCCL_IB_TIMEOUT", "15", 1);
  ::setenv("HOCCL_TIMEOUT_MS", "8000", 1);  // with both cut, new queue pairs are tried for so long
  const Outcome outcome = runPair(
      [](const Side& side) {
        constexpr std::size_t kBytes = 500007, kMessages = 12;
        Session session(12);
        Net& net = session.net();
        const int both[] = {0, 1};
        int device = -1;
        REQUIRE_OK(net.makeVirtual(2, both, &device));
        void* const comm = session.connectPair(side, 0, device);
        Registered memory(net, comm, kBytes);
        for (std::uint64_t seed = 1; seed <= kMessages; ++seed) {
          void* request = nullptr;
          if (side.rank() == 0) {
            fill(memory.data.data(), kBytes, seed);
            request = sendFrom(net, comm, memory.data.data(), kBytes, memory.handle);
            if (seed == 4) REQUIRE(std::system("lab cut 0") == 0);
          } else {
            request = receiveInto(net, comm, memory.data.data(), kBytes, memory.handle);
          }
          finish(net, request, nullptr, 30);
          if (side.rank() == 1) REQUIRE(matches(memory.data.data(), kBytes, seed));
        }
        side.meet();
        takeLog();
        void* request = nullptr;
        if (side.rank() == 0) {
          REQUIRE(std::system("lab cut 1") == 0);
          request = sendFrom(net, comm, memory.data.data(), kBytes, memory.handle);
        } else {
          request = receiveInto(net, comm, memory.data.data(), kBytes, memory.handle);
        }
        REQUIRE(failureOf(net, request, 20) == ncclRemoteError);
        std::string all;
        for (const LogLine& line : takeLog()) all += line.text + "\n";
        REQUIRE_SAYING(
            all.find("queue pair") != std::string::npos && all.find("rxe1") != std::string::npos,
            all);
        side.meet();
        REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
      },
      60);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
