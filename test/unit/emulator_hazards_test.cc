// FACTS 3 in the emulated driver: a call made while a transfer is pending can hang the job. A mover
// that works as a thread of the application deadlocks there; one in a process of its own does not.

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

// A kernel that has been launched, one that was not yet, and one with 64 KiB of local memory a
// thread.
constexpr char kKernels[] = R"(.version 7.0
.target sm_80
.address_size 64
.visible .entry warm() { ret; }
.visible .entry lazy() { ret; }
.visible .entry deep() { .local .align 8 .b8 depot[65536]; ret; }
)";

/// How the other threads of the process fare while X waits.
enum class Others { Run, BlockedInTheCall, NeverExecuted };

/// What the application has: a pending stream is somewhere else.
struct Application {
  CUdeviceptr device = 0, victim = 0;
  unsigned char* host = nullptr;
  unsigned char* hostVictim = nullptr;
  std::vector<unsigned char> plain;
  CUstream idle = nullptr;
  CUfunction warm = nullptr, lazy = nullptr, deep = nullptr;

  Application() : plain(kMiB) {
    device = allocate(kMiB);
    victim = allocate(kMiB);
    host = pinned(kMiB);
    hostVictim = pinned(kMiB);
    idle = makeStream();
    CUmodule module = nullptr;
    REQUIRE_OK(CU(cuModuleLoadData)(&module, kKernels));
    REQUIRE_OK(CU(cuModuleGetFunction)(&warm, module, "warm"));
    REQUIRE_OK(CU(cuModuleGetFunction)(&lazy, module, "lazy"));
    REQUIRE_OK(CU(cuModuleGetFunction)(&deep, module, "deep"));
    launch(warm, idle);
    REQUIRE_OK(CU(cuFuncLoad)(deep));  // which leaves the growth of its stack to the launch
    REQUIRE_OK(CU(cuCtxSynchronize)());
  }

  static void launch(CUfunction function, CUstream stream, unsigned shared = 0) {
    EXPECT_OK(CU(cuLaunchKernel)(function, 1, 1, 1, 32, 1, 1, shared, stream, nullptr, nullptr));
  }
};

struct Call {
  const char* name;
  Others others;
  bool waits;  ///< X itself does not return before the pending work is done
  std::function<void(Application&)> make;
};

const std::vector<Call>& calls() {
  static const std::vector<Call> list = {
      {"cuMemAlloc", Others::Run, false, [](Application&) { allocate(kMiB); }},
      {"cuMemHostAlloc", Others::Run, false, [](Application&) { pinned(kMiB); }},
      {"cuMemHostRegister", Others::Run, false,
       [](Application& a) { EXPECT_OK(CU(cuMemHostRegister)(a.plain.data(), kMiB, 0)); }},
      {"stream creation", Others::Run, false, [](Application&) { makeStream(); }},
      {"event creation", Others::Run, false,
       [](Application&) {
         CUevent event = nullptr;
         EXPECT_OK(CU(cuEventCreate)(&event, 0));
       }},
      {"VMM map", Others::Run, false,
       [](Application&) {
         CUmemAllocationProp properties{};
         properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
         properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
         CUmemGenericAllocationHandle handle = 0;
         CUdeviceptr address = 0;
         EXPECT_OK(CU(cuMemCreate)(&handle, 2 * kMiB, &properties, 0));
         EXPECT_OK(CU(cuMemAddressReserve)(&address, 2 * kMiB, 0, 0, 0));
         EXPECT_OK(CU(cuMemMap)(address, 2 * kMiB, 0, handle, 0));
         const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
         EXPECT_OK(CU(cuMemSetAccess)(address, 2 * kMiB, &access, 1));
       }},
      {"legacy-stream kernel", Others::Run, false,
       [](Application& a) { Application::launch(a.warm, nullptr); }},
      {"cuCtxSynchronize", Others::Run, true,
       [](Application&) { EXPECT_OK(CU(cuCtxSynchronize)()); }},
      {"cuMemFree", Others::BlockedInTheCall, true,
       [](Application& a) { EXPECT_OK(CU(cuMemFree)(a.victim)); }},
      {"cuMemFreeHost", Others::BlockedInTheCall, true,
       [](Application& a) { EXPECT_OK(CU(cuMemFreeHost)(a.hostVictim)); }},
      {"first launch of a lazily loaded kernel", Others::NeverExecuted, true,
       [](Application& a) { Application::launch(a.lazy, a.idle); }},
      {"first launch after raising a kernel's shared memory", Others::NeverExecuted, true,
       [](Application& a) {
         EXPECT_OK(CU(cuFuncSetAttribute)(a.warm, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                          200 << 10));
         Application::launch(a.warm, a.idle, 200 << 10);
       }},
      {"a kernel that grows the local-memory stack", Others::BlockedInTheCall, true,
       [](Application& a) { Application::launch(a.deep, a.idle); }},
  };
  return list;
}

Environment environment(int devices = 1) {
  return {{"EMUCUDA_DILATION", "1"}, {"EMUCUDA_DEVICES", std::to_string(devices)}};
}

struct Flags {
  alignas(64) std::uint64_t start = 0;
  alignas(64) std::uint64_t finish = 0;
  alignas(64) std::uint64_t copied = 0;
  std::atomic<int> stage{0};
  CUipcMemHandle handle;
  char page[3500];
};
static_assert(sizeof(Flags) <= 4096);

Flags* sharedFlags() { return sharedMemory<Flags>(); }

/// A lane as a mover has it: primed by a copy, so that its flags are on a copy channel.
struct Lane {
  CUdeviceptr device = 0;
  unsigned char* host = nullptr;
  CUstream stream = nullptr;

  explicit Lane(CUdeviceptr from) : device(from), host(pinned(kMiB)), stream(makeStream()) {
    EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, 4096, stream));
    EXPECT_OK(CU(cuStreamSynchronize)(stream));
  }
  /// Copy and flag. `step` counts the calls that have returned.
  void submit(std::uint64_t* flag, std::atomic<int>* step) const {
    EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, kMiB, stream));
    ++*step;
    EXPECT_OK(CU(cuStreamWriteValue64)(stream, asDevice(flag), 1, 0));
    ++*step;
  }
};

void makeCurrent(int ordinal) {
  CUcontext context = nullptr;
  REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&context, ordinal));
  REQUIRE_OK(CU(cuCtxSetCurrent)(context));
}

/// The application's side: a stream that writes `start` and waits for `finish`.
CUstream beginTransfer(Flags* flags) {
  REQUIRE_OK(CU(cuMemHostRegister)(flags, sizeof *flags, CU_MEMHOSTREGISTER_PORTABLE));
  CUstream user = makeStream();
  EXPECT_OK(CU(cuStreamWriteValue64)(user, asDevice(&flags->start), 1, 0));
  EXPECT_OK(CU(cuStreamWaitValue64)(user, asDevice(&flags->finish), 1, CU_STREAM_WAIT_VALUE_GEQ));
  EXPECT_TRUE(eventually([&] { return load(&flags->start) == 1; }));
  return user;
}

/// X in a thread, and its end.
class Caller {
 public:
  Caller(const Call& call, Application* application)
      : thread_([this, &call, application] {
          makeCurrent(0);
          call.make(*application);
          returned = true;
        }) {
    // X that waits is inside by now; one that does not has returned.
    eventually([&] { return returned.load(); }, 50ms);
  }
  ~Caller() { thread_.join(); }
  std::atomic<bool> returned{false};

 private:
  std::thread thread_;
};

// The columns "another thread, same context" and "second context, same process": what X does to a
// thread that submits copy and flag, while an independent transfer is pending.
TEST(Emulator, Facts3WhatACallDoesToOtherThreads) {
  for (const int contexts : {1, 2})
    for (const Call& call : calls())
      isolated(environment(contexts), [&] {
        const std::string what = std::string(call.name) + ", contexts " + std::to_string(contexts);
        openDevice();
        Application application;
        auto* flags = sharedFlags();
        std::atomic<int> step{0};
        std::atomic<bool> go{false};
        std::atomic<std::uint64_t> ready{0};
        std::thread other([&] {
          makeCurrent(contexts - 1);
          const Lane lane(allocate(kMiB));
          ready = 1;
          EXPECT_TRUE(eventually([&] { return go.load(); }));
          lane.submit(&flags->copied, &step);
        });
        EXPECT_TRUE(eventually([&] { return ready == 1; }));
        CUstream user = beginTransfer(flags);
        {
          const Caller caller(call, &application);
          EXPECT_EQ(caller.returned, !call.waits) << what;
          go = true;
          const auto copied = [&] { return load(&flags->copied) == 1; };
          if (call.others == Others::Run) {
            EXPECT_TRUE(eventually(copied, 5s)) << what;
          } else {
            EXPECT_FALSE(eventually(copied, 100ms)) << what;
            EXPECT_EQ(step, call.others == Others::BlockedInTheCall ? 0 : 2) << what;
          }
          store(&flags->finish, 1);
          EXPECT_TRUE(eventually(copied, 5s)) << what << ", after the release";
        }
        other.join();
        EXPECT_OK(CU(cuStreamSynchronize)(user));
      });
}

/// One transfer whose finish the mover's lane writes, and X in the middle of it. True if it came to
/// its end within the limit.
bool transferEnds(const Call& call, bool moverIsAThread, Clock::duration limit) {
  auto* flags = sharedFlags();
  auto* ended = sharedMemory<std::atomic<int>>();
  const auto move = [flags](const Lane& lane) {
    EXPECT_TRUE(eventually([&] { return flags->stage == 2; }));
    std::atomic<int> step{0};
    lane.submit(&flags->finish, &step);
    EXPECT_TRUE(eventually([&] { return load(&flags->finish) == 1; }));
  };
  pid_t mover = 0;
  if (!moverIsAThread)
    mover = start(environment(), [&] {
      openDevice();
      EXPECT_TRUE(eventually([&] { return flags->stage == 1; }));
      REQUIRE_OK(CU(cuMemHostRegister)(flags, sizeof *flags, CU_MEMHOSTREGISTER_PORTABLE));
      CUdeviceptr memory = 0;
      REQUIRE_OK(
          CU(cuIpcOpenMemHandle)(&memory, flags->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
      const Lane lane(memory);
      *ended = -1;  // ready
      move(lane);
    });
  const pid_t application = start(environment(), [&] {
    openDevice();
    Application state;
    std::thread proxy;
    std::atomic<bool> ready{false};
    EXPECT_OK(CU(cuIpcGetMemHandle)(&flags->handle, state.device));
    CUstream user = nullptr;
    if (moverIsAThread) {
      proxy = std::thread([&] {
        makeCurrent(0);
        const Lane lane(state.device);
        ready = true;
        move(lane);
      });
      EXPECT_TRUE(eventually([&] { return ready.load(); }));
    } else {
      flags->stage = 1;
      EXPECT_TRUE(eventually([&] { return *ended == -1; }));
    }
    user = beginTransfer(flags);
    {
      const Caller caller(call, &state);
      flags->stage = 2;
      EXPECT_OK(CU(cuStreamSynchronize)(user));
    }
    if (proxy.joinable()) proxy.join();
    *ended = 1;
  });
  const bool inTime = eventually([&] { return *ended == 1; }, limit);
  if (!inTime) {
    // A deadlock: nothing in there will ever move again.
    kill(application, SIGKILL);
    finish(application);
    if (mover != 0) kill(mover, SIGKILL);
    if (mover != 0) finish(mover);
    return false;
  }
  expectSuccess(application);
  if (mover != 0) expectSuccess(mover);
  return true;
}

// "The pending stream waits for the copy and the copy waits for X, which waits for the stream."
TEST(Emulator, Facts3AMoverThatIsAThreadDeadlocks) {
  int deadlocks = 0;
  for (const Call& call : calls()) {
    const bool hazard = call.others != Others::Run;
    EXPECT_EQ(transferEnds(call, true, hazard ? Clock::duration(500ms) : 10s), !hazard)
        << call.name;
    if (hazard) ++deadlocks;
  }
  EXPECT_EQ(deadlocks, 5);
}

TEST(Emulator, Facts3AMoverThatIsAProcessNeverDeadlocks) {
  for (const Call& call : calls()) EXPECT_TRUE(transferEnds(call, false, 20s)) << call.name;
}

// "a full queue blocks the call" (seen on an H200: at 1020 operations; with kernels and copies also
// the calls of other threads, with memory operations only the caller's own).
TEST(Emulator, Facts3AFullQueueBlocksTheCall) {
  for (const bool kernels : {true, false})
    isolated(environment(), [&] {
      openDevice();
      auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
      CUstream full = makeStream(), other = makeStream();
      CUcontext context = nullptr;
      EXPECT_OK(CU(cuCtxGetCurrent)(&context));
      EXPECT_OK(CU(cuStreamWaitValue64)(full, asDevice(flag), 1, CU_STREAM_WAIT_VALUE_GEQ));
      constexpr int kAll = 1500;
      std::atomic<int> submitted{0};
      std::thread submitting([&] {
        EXPECT_OK(CU(cuCtxSetCurrent)(context));
        for (; submitted < kAll; ++submitted) {
          if (kernels) {
            EXPECT_OK(CU(hocclEmuLaunchKernel)(full, 1, 1));
          } else {
            EXPECT_OK(CU(cuStreamWriteValue64)(full, asDevice(&flag[8]), 1, 0));
          }
        }
      });
      EXPECT_TRUE(eventually([&] { return submitted >= 1000; }));
      std::this_thread::sleep_for(100ms);
      EXPECT_LT(submitted, 1100);
      std::atomic<bool> ran{false};
      std::thread bystander([&] {
        EXPECT_OK(CU(cuCtxSetCurrent)(context));
        EXPECT_OK(CU(cuStreamWriteValue64)(other, asDevice(&flag[16]), 1, 0));
        EXPECT_OK(CU(cuStreamSynchronize)(other));
        ran = true;
      });
      EXPECT_EQ(eventually([&] { return ran.load(); }, kernels ? Clock::duration(50ms) : 5s),
                !kernels);
      store(flag, 1);
      EXPECT_TRUE(eventually([&] { return submitted == kAll && ran; }));
      submitting.join();
      bystander.join();
      EXPECT_OK(CU(cuCtxSynchronize)());
    });
}

}  // namespace
}  // namespace hoccl::emu_test
