// Staging beyond plain traffic: little room, registrations, LL128, an application that frees and
// launches, and what dies.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <thread>

#include "test/conformance/emulated_gpu.h"
#include "test/conformance/session.h"

namespace conformance {
namespace {

constexpr int kDevicePointer = hoccl::nccl_abi::kDevicePointer;
constexpr std::size_t kMiB = 1 << 20;

std::string sessionName() { return "staging-ends-" + std::to_string(::getpid()); }

void* registerOn(Net& net, void* comm, void* data, std::size_t bytes) {
  void* handle = nullptr;
  REQUIRE_OK(net.registerMemory(comm, data, bytes, kDevicePointer, &handle));
  REQUIRE(handle != nullptr);
  return handle;
}

void* sendDevice(Net& net, void* comm, void* data, std::size_t bytes, int tag, void* handle) {
  void* request = nullptr;
  REQUIRE_OK(net.send(comm, data, bytes, tag, &request, handle));
  REQUIRE(request != nullptr);
  return request;
}

void* receiveDevice(Net& net, void* comm, void* data, std::size_t bytes, int tag, void* handle) {
  void* request = nullptr;
  REQUIRE_OK(net.receive(comm, 1, &data, &bytes, &tag, &request, &handle));
  REQUIRE(request != nullptr);
  return request;
}

std::string textOfLog() {
  std::string text;
  for (const LogLine& line : takeLog()) text += line.text + "\n";
  return text;
}

/// A kernel on all SMs that ends when it is told to.
class OccupiedGpu {
 public:
  explicit OccupiedGpu(EmulatedGpu& gpu) : gpu_(gpu) {
    void* host = nullptr;
    REQUIRE_OK(gpu.driver().cuMemHostAlloc(&host, 64, 0));
    flag_ = static_cast<std::uint64_t*>(host);
    *flag_ = 0;
    REQUIRE_OK(gpu.driver().cuMemHostGetDevicePointer(&address_, host, 0));
    REQUIRE_OK(gpu.driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
  }
  void begin() { gpu_.launchWait(stream_, address_, 1); }
  void end() { __atomic_store_n(flag_, 1, __ATOMIC_RELEASE); }

 private:
  EmulatedGpu& gpu_;
  std::uint64_t* flag_ = nullptr;
  CUdeviceptr address_ = 0;
  CUstream stream_ = nullptr;
};

/// Both ways at once, each of the `count` messages in a place of its own.
void exchange(const Side& side, EmulatedGpu& gpu, Net& net, void* sends, void* receives,
              std::size_t bytes, int count, const std::function<void()>& before = {},
              const std::function<void()>& after = {}) {
  const std::size_t all = bytes * static_cast<std::size_t>(count);
  auto* const from = static_cast<unsigned char*>(gpu.alloc(all));
  auto* const to = static_cast<unsigned char*>(gpu.alloc(all));
  std::vector<unsigned char> host(bytes);
  for (int i = 0; i < count; ++i) {
    fill(host.data(), bytes, static_cast<std::uint64_t>(100 * side.rank() + i));
    gpu.write(from + static_cast<std::size_t>(i) * bytes, host.data(), bytes);
  }
  void* const fromHandle = registerOn(net, sends, from, all);
  void* const toHandle = registerOn(net, receives, to, all);
  side.meet();
  if (before) before();
  std::vector<void*> requests;
  for (int i = 0; i < count; ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * bytes;
    requests.push_back(receiveDevice(net, receives, to + at, bytes, 0, toHandle));
    requests.push_back(sendDevice(net, sends, from + at, bytes, 0, fromHandle));
  }
  const double start = now();
  while (!requests.empty()) {
    REQUIRE_SAYING(now() - start < 30, "stuck with " + std::to_string(requests.size()));
    std::erase_if(requests, [&](void* request) {
      int done = 0, size = 0;
      REQUIRE_OK(net.test(request, &done, &size));
      return done != 0;
    });
    ::usleep(50);
  }
  if (after) after();
  side.meet();
  for (int i = 0; i < count; ++i) {
    const std::vector<unsigned char> got =
        gpu.read(to + static_cast<std::size_t>(i) * bytes, bytes);
    REQUIRE(matches(got.data(), bytes, static_cast<std::uint64_t>(100 * (1 - side.rank()) + i)));
  }
  REQUIRE_OK(net.deregisterMemory(sends, fromHandle));
  REQUIRE_OK(net.deregisterMemory(receives, toHandle));
  gpu.free(from);
  gpu.free(to);
  REQUIRE(gpu.counters().freedWhileMapped == 0);
}

// A message of many windows, and several at once, with four slots for each direction.
TEST(StagingRoom, LittleOfIt) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        ::setenv("HOCCL_NET_STAGING_BYTES", "2MiB", 1);
        EmulatedGpu gpu(name.c_str());
        Session session(11);
        Net& net = session.net();
        void* const out = session.connectPair(side, 0);
        void* const back = session.connectPair(side, 1);
        void* const sends = side.rank() == 0 ? out : back;
        void* const receives = side.rank() == 0 ? back : out;
        exchange(side, gpu, net, sends, receives, 24 * kMiB + 12345, 1);
        exchange(side, gpu, net, sends, receives, 700001, 16);
        exchange(side, gpu, net, sends, receives, 1000, 16);
        REQUIRE_OK(net.closeSend(sends));
        REQUIRE_OK(net.closeReceive(receives));
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Rule 7: what waits for a peer that does not come keeps nobody else from the slots.
TEST(StagingRoom, WhoWaitsHoldsUpNobody) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        ::setenv("HOCCL_NET_STAGING_BYTES", "2MiB", 1);
        EmulatedGpu gpu(name.c_str());
        Session session(12);
        Net& net = session.net();
        void* const idle = session.connectPair(side, 0);
        void* const out = session.connectPair(side, 0);
        void* const back = session.connectPair(side, 1);
        void* const sends = side.rank() == 0 ? out : back;
        void* const receives = side.rank() == 0 ? back : out;
        void* const memory = gpu.alloc(4 * kMiB);
        void* const handle = registerOn(net, idle, memory, 4 * kMiB);
        std::vector<void*> waiting;
        // Rank 0 sends what nobody receives, on its own tags; rank 1 receives what nobody sends.
        for (int i = 0; i < 12; ++i) {
          waiting.push_back(side.rank() == 0
                                ? sendDevice(net, idle, memory, kMiB, 10 + i, handle)
                                : receiveDevice(net, idle, memory, kMiB, 40 + i, handle));
        }
        for (int round = 0; round < 3; ++round) {
          for (void* request : waiting) {
            int done = 0, size = 0;
            REQUIRE_OK(net.test(request, &done, &size));
            REQUIRE(done == 0);
          }
          exchange(side, gpu, net, sends, receives, 600000, 6);
        }
        side.meet();
        REQUIRE_OK(side.rank() == 0 ? net.closeSend(idle) : net.closeReceive(idle));
        REQUIRE_OK(net.closeSend(sends));
        REQUIRE_OK(net.closeReceive(receives));
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// FACTS 3: the application's cudaFree holds up every submission of its process, here until a kernel
// ends that has all SMs and waits for the traffic, as NCCL's does. So no call of the traffic may
// need the driver.
TEST(StagingBesides, FreesAndFullSms) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        EmulatedGpu gpu(name.c_str());
        Session session(11);
        Net& net = session.net();
        void* const out = session.connectPair(side, 0);
        void* const back = session.connectPair(side, 1);
        void* const sends = side.rank() == 0 ? out : back;
        void* const receives = side.rank() == 0 ? back : out;
        exchange(side, gpu, net, sends, receives, 300000, 2);  // nothing waits for a first time

        OccupiedGpu occupied(gpu);
        void* const freed = gpu.alloc(kMiB);
        std::atomic<bool> inFree{false}, isFree{false};
        std::thread application;
        exchange(
            side, gpu, net, sends, receives, 700001, 8,
            [&] {
              occupied.begin();
              application = std::thread([&] {
                REQUIRE_OK(gpu.driver().cuCtxSetCurrent(gpu.context()));
                inFree.store(true);
                gpu.free(freed);
                isFree.store(true);
              });
              while (!inFree.load()) ::usleep(100);
              ::usleep(20000);
            },
            [&] {
              REQUIRE_SAYING(!isFree.load(), "cudaFree should wait for the kernel");
              occupied.end();
              application.join();
            });
        REQUIRE_OK(net.closeSend(sends));
        REQUIRE_OK(net.closeReceive(receives));
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// --- Registrations
// ---------------------------------------------------------------------------------

TEST(StagingRegistrations, ManyAndFast) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        EmulatedGpu gpu(name.c_str());
        Session session(11);
        Net& net = session.net();
        void* const comm = session.connectPair(side, 0);
        auto* const memory = static_cast<unsigned char*>(gpu.alloc(1024 * kMiB));
        // The fastest of some: others have this machine's CPUs as well. Each is of an allocation
        // that is new, and so has its handle exported.
        double fastest = 1;
        for (int i = 0; i < 20; ++i) {
          void* const fresh = gpu.alloc(1024 * kMiB);
          void* handle = nullptr;
          const double start = now();
          REQUIRE_OK(net.registerMemory(comm, fresh, 1024 * kMiB, kDevicePointer, &handle));
          fastest = std::min(fastest, now() - start);
          REQUIRE_OK(net.deregisterMemory(comm, handle));
          gpu.free(fresh);
        }
        if (!CONFORMANCE_SANITIZED) {
          REQUIRE_SAYING(fastest < 10e-6, std::to_string(fastest * 1e6) + " us");
        }
        // One allocation, however many registrations of it there are, is mapped once.
        std::vector<void*> handles;
        for (std::size_t i = 0; i < 1000; ++i) {
          handles.push_back(registerOn(net, comm, memory + i * kMiB + 4096 * (i % 7), kMiB / 2));
        }
        for (void* handle : handles) REQUIRE_OK(net.deregisterMemory(comm, handle));
        gpu.free(memory);
        REQUIRE(gpu.counters().freedWhileMapped == 0);
        // A range that NCCL has rounded up to a page beyond the end of its memory.
        void* const odd = gpu.alloc(10000);
        void* const rounded = registerOn(net, comm, odd, 3 * 4096);
        REQUIRE_OK(net.deregisterMemory(comm, rounded));
        takeLog();
        // What is not device memory of a kind that a mover can map.
        void* handle = nullptr;
        std::vector<unsigned char> host(4096);
        REQUIRE(net.registerMemory(comm, host.data(), host.size(), kDevicePointer, &handle) !=
                ncclSuccess);
        REQUIRE(handle == nullptr);
        const std::string warning = onlyWarning();
        REQUIRE_SAYING(warning.find("memory CUDA does not know") != std::string::npos, warning);
        side.meet();
        REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Memory that goes while a message of it is under way, as in an abort: an error, and nothing stays
// mapped.
TEST(StagingRegistrations, GoneMeanwhile) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        EmulatedGpu gpu(name.c_str());
        Session session(12);
        Net& net = session.net();
        void* const comm = session.connectPair(side, 0);
        void* const memory = gpu.alloc(64 * kMiB);
        void* const handle = registerOn(net, comm, memory, 64 * kMiB);
        void* const request = side.rank() == 0
                                  ? sendDevice(net, comm, memory, 64 * kMiB, 1, handle)
                                  : receiveDevice(net, comm, memory, 64 * kMiB, 1, handle);
        side.meet();
        if (side.rank() == 1) {
          for (int i = 0; i < 20; ++i) {
            int done = 0, size = 0;
            REQUIRE_OK(net.test(request, &done, &size));
            REQUIRE(done == 0);  // rank 0 does not ask for its send
          }
          REQUIRE_OK(net.deregisterMemory(comm, handle));
          gpu.free(memory);
          REQUIRE(gpu.counters().freedWhileMapped == 0);
          side.meet();
          REQUIRE(failureOf(net, request) == ncclInvalidArgument);
          REQUIRE_OK(net.closeReceive(comm));
        } else {
          side.meet();
          REQUIRE(failureOf(net, request) == ncclRemoteError);
          REQUIRE_OK(net.deregisterMemory(comm, handle));
          gpu.free(memory);
          REQUIRE(gpu.counters().freedWhileMapped == 0);
          REQUIRE_OK(net.closeSend(comm));
        }
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST(StagingRegistrations, MemoryOfSendIsNotRegistered) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        EmulatedGpu gpu(name.c_str());
        Session session(11);
        Net& net = session.net();
        void* const comm = session.connectPair(side, 0);
        if (side.rank() == 0) {
          auto* const memory = static_cast<unsigned char*>(gpu.alloc(2 * kMiB));
          void* const handle = registerOn(net, comm, memory, kMiB);
          void* request = nullptr;
          REQUIRE(net.send(comm, memory + 3 * kMiB, 1000, 1, &request, handle) ==
                  ncclInvalidArgument);
          const std::string warning = onlyWarning();
          REQUIRE_SAYING(warning.find("regMr has not been told") != std::string::npos, warning);
          REQUIRE_OK(net.closeSend(comm));
        } else {
          std::vector<unsigned char> host(1000);
          REQUIRE(failureOfReceive(net, comm, host.data(), host.size(), 1) == ncclRemoteError);
          REQUIRE_OK(net.closeReceive(comm));
        }
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// --- When it is not on
// -----------------------------------------------------------------------------

struct Setting {
  const char* protocols;
  const char* tuner;
  int version;
  bool on;
  const char* says;
};

class StagingLl128 : public testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(
    Settings, StagingLl128,
    testing::Values(
        Setting{nullptr, nullptr, 11, false, "set NCCL_PROTO=^LL128"},
        Setting{"", "", 11, false, "set NCCL_PROTO=^LL128"},
        Setting{"^LL128", nullptr, 8, true, ""}, Setting{"^ll,LL128", nullptr, 11, true, ""},
        Setting{"Simple", nullptr, 11, true, ""}, Setting{"ll,simple", nullptr, 11, true, ""},
        Setting{"^LL", nullptr, 11, false, "set NCCL_PROTO=^LL128"},
        Setting{"LL128", CONFORMANCE_TUNER, 11, false, "NCCL_PROTO=LL128 lets NCCL use LL128"},
        Setting{"^LL,Simple", CONFORMANCE_TUNER, 11, false, "lets NCCL use LL128"},
        Setting{"allreduce:^LL128", CONFORMANCE_TUNER, 11, false, "lets NCCL use LL128"},
        Setting{"LL128,Simple", CONFORMANCE_TUNER, 11, true, ""},
        Setting{nullptr, CONFORMANCE_TUNER, 9, true, ""},
        Setting{nullptr, CONFORMANCE_TUNER, 12, true, ""},
        Setting{nullptr, CONFORMANCE_TUNER, 8, false, "before 2.24"},
        Setting{nullptr, "libc.so.6", 11, false, "NCCL_TUNER_PLUGIN=libc.so.6 is not HOCCL's"},
        Setting{nullptr, "nowhere", 11, false, "NCCL_TUNER_PLUGIN=nowhere is not HOCCL's"}));

TEST_P(StagingLl128, KeptOffOrRefused) {
  const Setting& setting = GetParam();
  const std::string name = sessionName();
  const Outcome outcome = runAlone(
      [&] {
        EmulatedGpu gpu(name.c_str());
        const auto set = [](const char* variable, const char* value) {
          value != nullptr ? ::setenv(variable, value, 1) : ::unsetenv(variable);
        };
        set("NCCL_PROTO", setting.protocols);
        set("NCCL_TUNER_PLUGIN", setting.tuner);
        Session session(setting.version);
        Net& net = session.net();
        Properties properties;
        REQUIRE_OK(net.properties(0, &properties));
        if (setting.on) {
          const std::string log = textOfLog();
          REQUIRE_SAYING(
              properties.pointerSupport == (hoccl::nccl_abi::kHostPointer | kDevicePointer), log);
          REQUIRE(moversOfThisProcess().size() == 1);
          return;
        }
        REQUIRE(properties.pointerSupport == hoccl::nccl_abi::kHostPointer);
        const std::string warning = onlyWarning();
        REQUIRE_SAYING(warning.find("HOCCL_NET_STAGING=1 has no effect") != std::string::npos &&
                           warning.find(setting.says) != std::string::npos,
                       warning);
        REQUIRE(moversOfThisProcess().empty());
        void* handle = nullptr;
        REQUIRE(net.registerMemory(nullptr, gpu.alloc(4096), 4096, kDevicePointer, &handle) ==
                ncclInvalidUsage);
      },
      30);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST(StagingRefused, NoMoverAndNoGpu) {
  const std::string name = sessionName();
  const Outcome outcome = runAlone(
      [&] {
        EmulatedGpu gpu(name.c_str());
        ::setenv("HOCCL_MOVER_PATH", "/nonexistent/hoccl-mover", 1);
        {
          Session session(11);
          const std::string warning = onlyWarning();
          REQUIRE_SAYING(
              warning.find("HOCCL_MOVER_PATH=/nonexistent/hoccl-mover") != std::string::npos,
              warning);
        }
        ::unsetenv("HOCCL_MOVER_PATH");
        takeLog();
        REQUIRE_OK(gpu.driver().cuCtxSetCurrent(nullptr));
        Session session(11);
        const std::string warning = onlyWarning();
        REQUIRE_SAYING(warning.find("no GPU is current") != std::string::npos, warning);
      },
      30);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// --- Ends
// ------------------------------------------------------------------------------------------

// The mover of either rank is killed in the middle: its application gets a system error, the other
// a remote one, both soon; closing waits for nobody; the next communicator has a mover again.
TEST(StagingEnds, MoverKilled) {
  for (const int killed : {0, 1}) {
    const std::string name = sessionName();
    const Outcome outcome = runPair(
        [&](const Side& side) {
          EmulatedGpu gpu(name.c_str());
          Session session(11);
          Net& net = session.net();
          void* const comm = session.connectPair(side, 0);
          constexpr std::size_t kBytes = 256 * kMiB;
          void* const memory = gpu.alloc(kBytes);
          void* const handle = registerOn(net, comm, memory, kBytes);
          void* const request = side.rank() == 0
                                    ? sendDevice(net, comm, memory, kBytes, 1, handle)
                                    : receiveDevice(net, comm, memory, kBytes, 1, handle);
          for (int i = 0; i < 50; ++i) {
            int done = 0, size = 0;
            REQUIRE_OK(net.test(request, &done, &size));
            REQUIRE(done == 0);
          }
          side.meet();
          const std::vector<pid_t> movers = moversOfThisProcess();
          REQUIRE(movers.size() == 1);
          takeLog();
          if (side.rank() == killed) REQUIRE(::kill(movers[0], SIGKILL) == 0);
          const double start = now();
          const ncclResult_t result = failureOf(net, request, 5);
          REQUIRE(result == (side.rank() == killed ? ncclSystemError : ncclRemoteError));
          const std::string warning = onlyWarning();
          if (side.rank() == killed) {
            REQUIRE_SAYING(warning.find("was killed by signal 9") != std::string::npos, warning);
          }
          const double closing = now();
          REQUIRE_OK(net.deregisterMemory(comm, handle));
          REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
          REQUIRE(now() - closing < 1.5 && now() - start < 5);
          gpu.free(memory);
          side.meet();
          Session next(11);
          REQUIRE(moversOfThisProcess().size() == 1);
          void* const out = next.connectPair(side, 0);
          void* const back = next.connectPair(side, 1);
          void* const sends = side.rank() == 0 ? out : back;
          void* const receives = side.rank() == 0 ? back : out;
          exchange(side, gpu, next.net(), sends, receives, 500000, 4);
          REQUIRE_OK(next.net().closeSend(sends));
          REQUIRE_OK(next.net().closeReceive(receives));
        },
        50);
    EXPECT_TRUE(outcome.ok()) << "killed: " << killed << "; " << outcome.text();
  }
}

// A mover does not outlive its application, however that ends.
TEST(StagingEnds, ApplicationKilled) {
  const std::string name = sessionName();
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const Outcome outcome = runAlone(
      [&] {
        EmulatedGpu gpu(name.c_str());
        Session session(11);
        const std::vector<pid_t> movers = moversOfThisProcess();
        REQUIRE(movers.size() == 1);
        REQUIRE(::write(pipe[1], movers.data(), sizeof(pid_t)) == sizeof(pid_t));
        ::kill(::getpid(), SIGKILL);
      },
      30);
  pid_t mover = 0;
  ::close(pipe[1]);
  ASSERT_EQ(::read(pipe[0], &mover, sizeof mover), static_cast<ssize_t>(sizeof mover))
      << outcome.text();
  ::close(pipe[0]);
  const double start = now();
  const auto runs = [&] {
    const std::string path = "/proc/" + std::to_string(mover) + "/exe";
    char target[256];
    return ::readlink(path.c_str(), target, sizeof target) > 0;
  };
  while (runs() && now() - start < 10) ::usleep(10000);
  EXPECT_LT(now() - start, 5);
}

// Closing with everything under way, and a stopped mover: bounded.
TEST(StagingEnds, CloseInTheMiddle) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        ::setenv("HOCCL_TIMEOUT_MS", "1000", 1);
        EmulatedGpu gpu(name.c_str());
        Session session(11);
        Net& net = session.net();
        void* const comm = session.connectPair(side, 0);
        constexpr std::size_t kBytes = 64 * kMiB;
        void* const memory = gpu.alloc(kBytes);
        void* const handle = registerOn(net, comm, memory, kBytes);
        void* const request = side.rank() == 0
                                  ? sendDevice(net, comm, memory, kBytes, 1, handle)
                                  : receiveDevice(net, comm, memory, kBytes, 1, handle);
        for (int i = 0; i < 50; ++i) {
          int done = 0, size = 0;
          REQUIRE_OK(net.test(request, &done, &size));
        }
        side.meet();
        const std::vector<pid_t> movers = moversOfThisProcess();
        if (side.rank() == 1) REQUIRE(::kill(movers[0], SIGSTOP) == 0);
        const double start = now();
        REQUIRE_OK(side.rank() == 0 ? net.closeSend(comm) : net.closeReceive(comm));
        REQUIRE(now() - start < 1);
        REQUIRE_OK(net.deregisterMemory(comm, handle));
        REQUIRE(now() - start < 3);
        if (side.rank() == 1) REQUIRE(::kill(movers[0], SIGCONT) == 0);
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
