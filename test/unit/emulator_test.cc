// The emulated driver (test/emulator). Every case runs in processes of its own, forked before the
// driver is loaded, because the driver reads its environment once and does not outlive a fork.

#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "test/emulator/hoccl_emu.h"

#ifdef __SANITIZE_THREAD__
// Else every process of every case sleeps a second at its end.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "atexit_sleep_ms=0";
}
#endif

namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kCaseLimit = 60s;  // far more than any case needs, also under a sanitizer
constexpr std::size_t kMiB = 1 << 20;

#ifndef HOCCL_EMULATOR_LIB
#define HOCCL_EMULATOR_LIB HOCCL_TEST_BUILD_DIR "/test/emulator/libcuda.so.1"
#endif

void* driverSymbol(const char* name) {
  static void* library = dlopen(HOCCL_EMULATOR_LIB, RTLD_NOW | RTLD_LOCAL);
  void* symbol = library == nullptr ? nullptr : dlsym(library, name);
  if (symbol == nullptr) {
    std::fprintf(stderr, "emulator_test: %s: %s\n", name, dlerror());
    std::abort();
  }
  return symbol;
}

// CU(cuMemAlloc)(…) calls cuMemAlloc_v2 of the library under test, as cuda.h maps the name.
#define CU_TEXT(name) #name
#define CU_NAMED(name)                            \
  (reinterpret_cast<decltype(&::name)>([] {       \
    static void* f = driverSymbol(CU_TEXT(name)); \
    return f;                                     \
  }()))
#define CU(name) CU_NAMED(name)
#define EXPECT_OK(call) EXPECT_EQ(call, CUDA_SUCCESS)
#define REQUIRE_OK(call)                                   \
  do {                                                     \
    const CUresult requireResult = (call);                 \
    if (requireResult != CUDA_SUCCESS) {                   \
      ADD_FAILURE() << #call << " gave " << requireResult; \
      std::fflush(nullptr);                                \
      _exit(1);                                            \
    }                                                      \
  } while (false)

using Environment = std::map<std::string, std::string>;

pid_t start(const Environment& environment, const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  for (const char* name :
       {"EMUCUDA_DEVICES", "EMUCUDA_DILATION", "EMUCUDA_SEED", "EMUCUDA_DELAY_US",
        "EMUCUDA_MEM_GIB", "EMUCUDA_P2P", "EMUCUDA_SESSION", "CUDA_VISIBLE_DEVICES"})
    unsetenv(name);
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  body();
  std::fflush(nullptr);
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

/// The wait status of a child that ends in time; kills it and fails otherwise.
int finish(pid_t pid) {
  const auto deadline = Clock::now() + kCaseLimit;
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (Clock::now() > deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      ADD_FAILURE() << "process " << pid << " did not end in time";
      return status;
    }
    std::this_thread::sleep_for(1ms);
  }
  return status;
}

void expectSuccess(pid_t pid) {
  const int status = finish(pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "wait status " << status;
}

void isolated(const Environment& environment, const std::function<void()>& body) {
  expectSuccess(start(environment, body));
}

/// cuInit and the primary context of an ordinal made current.
void openDevice(int ordinal = 0) {
  REQUIRE_OK(CU(cuInit)(0));
  CUcontext context = nullptr;
  REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&context, ordinal));
  REQUIRE_OK(CU(cuCtxSetCurrent)(context));
}

CUstream makeStream() {
  CUstream stream = nullptr;
  REQUIRE_OK(CU(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
  return stream;
}

CUdeviceptr allocate(std::size_t bytes) {
  CUdeviceptr pointer = 0;
  REQUIRE_OK(CU(cuMemAlloc)(&pointer, bytes));
  return pointer;
}

unsigned char* pinned(std::size_t bytes) {
  void* pointer = nullptr;
  REQUIRE_OK(CU(cuMemHostAlloc)(&pointer, bytes, CU_MEMHOSTALLOC_PORTABLE));
  return static_cast<unsigned char*>(pointer);
}

CUdeviceptr asDevice(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

unsigned char patternAt(std::size_t index, unsigned seed) {
  return static_cast<unsigned char>((index * 2654435761u + seed * 97u) >> 7);
}

void fillPattern(unsigned char* to, std::size_t bytes, unsigned seed) {
  for (std::size_t i = 0; i < bytes; ++i) to[i] = patternAt(i, seed);
}

std::size_t firstWrong(const unsigned char* from, std::size_t bytes, unsigned seed) {
  for (std::size_t i = 0; i < bytes; ++i)
    if (from[i] != patternAt(i, seed)) return i;
  return bytes;
}

std::uint64_t load(const std::uint64_t* flag) {
  return std::atomic_ref<const std::uint64_t>(*flag).load(std::memory_order_acquire);
}
void store(std::uint64_t* flag, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(*flag).store(value, std::memory_order_release);
}

bool eventually(const std::function<bool()>& condition, Clock::duration limit = 20s) {
  const auto deadline = Clock::now() + limit;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(50us);
  }
  return true;
}

struct ModelTime {
  double micros;  ///< as the events say; a lower bound holds on any machine
  double late;    ///< by how much this CPU may have lengthened it; an upper bound must allow for it
};

/// Model time of the work that `submit` puts on `stream`, by events around it. A kernel keeps all
/// of it until it is submitted, so that the time does not depend on how fast that went.
ModelTime measure(CUstream stream, const std::function<void()>& submit) {
  static std::uint64_t* gate = reinterpret_cast<std::uint64_t*>(pinned(4096));
  static std::uint64_t round = 0;
  CUevent events[2];
  for (CUevent& event : events) REQUIRE_OK(CU(cuEventCreate)(&event, 0));
  HocclEmuCounters before{}, after{};
  REQUIRE_OK(CU(hocclEmuGetCounters)(0, &before));
  REQUIRE_OK(CU(hocclEmuLaunchWaitKernel)(stream, asDevice(gate), ++round, 1));
  REQUIRE_OK(CU(cuEventRecord)(events[0], stream));
  submit();
  REQUIRE_OK(CU(cuEventRecord)(events[1], stream));
  store(gate, round);
  REQUIRE_OK(CU(cuEventSynchronize)(events[1]));
  float milliseconds = 0;
  REQUIRE_OK(CU(cuEventElapsedTime)(&milliseconds, events[0], events[1]));
  REQUIRE_OK(CU(hocclEmuGetCounters)(0, &after));
  for (CUevent event : events) EXPECT_OK(CU(cuEventDestroy)(event));
  return {milliseconds * 1e3,
          static_cast<double>(after.lateNanoseconds - before.lateNanoseconds) / 1e3};
}

/// `lowest` and `highest` in model microseconds.
void expectTime(const char* what, ModelTime time, double lowest, double highest) {
  EXPECT_GE(time.micros, lowest) << what;
  EXPECT_LE(time.micros - time.late, highest) << what << ", late by " << time.late;
}

/// Memory that a process and its forked children share.
template <typename T>
T* sharedMemory() {
  void* memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : new (memory) T();
}

/// A folder for one case's session files.
class Folder {
 public:
  Folder() : path_(testing::TempDir() + "emulator_testXXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

TEST(Emulator, DescribesItsDevices) {
  isolated({{"EMUCUDA_DEVICES", "3"}}, [] {
    int count = 0;
    EXPECT_EQ(CU(cuDeviceGetCount)(&count), CUDA_ERROR_NOT_INITIALIZED);
    REQUIRE_OK(CU(cuInit)(0));
    EXPECT_OK(CU(cuDeviceGetCount)(&count));
    EXPECT_EQ(count, 3);
    char name[64];
    EXPECT_OK(CU(cuDeviceGetName)(name, sizeof name, 1));
    EXPECT_STREQ(name, "HOCCL emulated GPU");
    const std::pair<CUdevice_attribute, int> expected[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, 0},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 0},
    };
    for (const auto& [attribute, value] : expected) {
      int read = -1;
      EXPECT_OK(CU(cuDeviceGetAttribute)(&read, attribute, 0));
      EXPECT_EQ(read, value) << "attribute " << attribute;
    }
    CUuuid uuids[3];
    for (int i = 0; i < 3; ++i) EXPECT_OK(CU(cuDeviceGetUuid)(&uuids[i], i));
    EXPECT_NE(std::memcmp(&uuids[0], &uuids[1], sizeof(CUuuid)), 0);
    int access[2] = {-1, -1};
    EXPECT_OK(CU(cuDeviceCanAccessPeer)(&access[0], 0, 1));
    EXPECT_OK(CU(cuDeviceCanAccessPeer)(&access[1], 0, 0));
    EXPECT_EQ(access[0], 1);
    EXPECT_EQ(access[1], 0);
    CUdevice unknown = 0;
    EXPECT_EQ(CU(cuDeviceGet)(&unknown, 3), CUDA_ERROR_INVALID_DEVICE);
    void* function = nullptr;
    EXPECT_OK(CU(cuGetProcAddress)("cuMemAlloc", &function, 13000, 0, nullptr));
    EXPECT_EQ(function, driverSymbol("cuMemAlloc_v2"));
    EXPECT_EQ(CU(cuGetProcAddress)("cuNoSuchCall", &function, 13000, 0, nullptr),
              CUDA_ERROR_NOT_FOUND);
  });
}

TEST(Emulator, VisibleDevicesByNumberAndUuid) {
  const auto body = [] {
    int count = 0;
    char bus[32];
    REQUIRE_OK(CU(cuInit)(0));
    EXPECT_OK(CU(cuDeviceGetCount)(&count));
    EXPECT_EQ(count, 2);
    EXPECT_OK(CU(cuDeviceGetPCIBusId)(bus, sizeof bus, 0));
    EXPECT_STREQ(bus, "0000:13:00.0");
  };
  isolated({{"EMUCUDA_DEVICES", "4"}, {"CUDA_VISIBLE_DEVICES", "3,1"}}, body);
  isolated({{"EMUCUDA_DEVICES", "4"},
            {"CUDA_VISIBLE_DEVICES", "GPU-484f4343-4c45-4d55-8000-475055000003,0"}},
           body);
}

TEST(Emulator, RefusesABadEnvironment) {
  for (const char* variable : {"EMUCUDA_DEVICES", "EMUCUDA_DILATION", "EMUCUDA_DELAY_US"})
    isolated({{variable, "-1"}}, [] { EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_INVALID_VALUE); });
  isolated({{"EMUCUDA_DEVICES", "0"}}, [] { EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_NO_DEVICE); });
}

TEST(Emulator, AForkedChildIsNotInitialised) {
  isolated({}, [] {
    openDevice();
    const pid_t child = start({}, [] {
      CUdeviceptr pointer = 0;
      EXPECT_EQ(CU(cuMemAlloc)(&pointer, 4096), CUDA_ERROR_NOT_INITIALIZED);
      EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_NOT_INITIALIZED);
    });
    expectSuccess(child);
  });
}

TEST(Emulator, ContextsStack) {
  isolated({{"EMUCUDA_DEVICES", "2"}}, [] {
    CUdeviceptr pointer = 0;
    REQUIRE_OK(CU(cuInit)(0));
    EXPECT_EQ(CU(cuMemAlloc)(&pointer, 64), CUDA_ERROR_INVALID_CONTEXT);
    CUcontext contexts[2], current = nullptr;
    for (int i = 0; i < 2; ++i) REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&contexts[i], i));
    EXPECT_OK(CU(cuCtxPushCurrent)(contexts[0]));
    EXPECT_OK(CU(cuCtxPushCurrent)(contexts[1]));
    CUdevice device = -1;
    EXPECT_OK(CU(cuCtxGetDevice)(&device));
    EXPECT_EQ(device, 1);
    EXPECT_OK(CU(cuCtxPopCurrent)(&current));
    EXPECT_EQ(current, contexts[1]);
    EXPECT_OK(CU(cuCtxGetCurrent)(&current));
    EXPECT_EQ(current, contexts[0]);
    EXPECT_OK(CU(cuCtxEnablePeerAccess)(contexts[1], 0));
    EXPECT_EQ(CU(cuCtxEnablePeerAccess)(contexts[1], 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    EXPECT_OK(CU(cuDevicePrimaryCtxRelease)(0));
    EXPECT_EQ(CU(cuMemAlloc)(&pointer, 64), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    unsigned flags = 0;
    int active = -1;
    EXPECT_OK(CU(cuDevicePrimaryCtxGetState)(0, &flags, &active));
    EXPECT_EQ(active, 0);
  });
}

TEST(Emulator, TheCpuCannotTouchDeviceMemory) {
  // ASan turns the fault into an exit status, so only success would be wrong.
  const int status = finish(start({}, [] {
    signal(SIGSEGV, SIG_DFL);
    openDevice();
    *reinterpret_cast<volatile char*>(allocate(4096)) = 1;
  }));
  EXPECT_FALSE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(Emulator, CopiesInEveryDirection) {
  isolated({{"EMUCUDA_DEVICES", "2"}, {"EMUCUDA_DILATION", "1"}}, [] {
    openDevice(1);
    CUcontext other = nullptr;
    REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&other, 0));
    EXPECT_OK(CU(cuCtxEnablePeerAccess)(other, 0));
    constexpr std::size_t kRoom = 3 * kMiB;
    const CUdeviceptr here = allocate(kRoom), here2 = allocate(kRoom);
    EXPECT_OK(CU(cuCtxPushCurrent)(other));
    const CUdeviceptr there = allocate(kRoom);
    EXPECT_OK(CU(cuCtxPopCurrent)(nullptr));
    unsigned char *source = pinned(kRoom), *result = pinned(kRoom);
    std::vector<unsigned char> pageable(kRoom);
    CUstream stream = makeStream();
    unsigned seed = 0;
    for (std::size_t bytes : {std::size_t{1}, std::size_t{4099}, 2 * kMiB + 13}) {
      const std::size_t offset = 7 + bytes % 5;
      fillPattern(source, bytes, ++seed);
      std::memset(result, 0xee, kRoom);
      EXPECT_OK(CU(cuMemcpyHtoDAsync)(here + offset, source, bytes, stream));
      EXPECT_OK(CU(cuMemcpyDtoDAsync)(here2 + 1, here + offset, bytes, stream));
      EXPECT_OK(CU(cuMemcpyAsync)(there + 3, here2 + 1, bytes, stream));
      EXPECT_OK(CU(cuMemcpyPeerAsync)(here + 11, other, there + 3, other, bytes, stream));
      EXPECT_OK(CU(cuMemcpyDtoHAsync)(result + offset, here + 11, bytes, stream));
      EXPECT_OK(CU(cuStreamSynchronize)(stream));
      EXPECT_EQ(firstWrong(result + offset, bytes, seed), bytes);
      EXPECT_EQ(result[offset - 1], 0xee);
      EXPECT_EQ(result[offset + bytes], 0xee);
      // Pageable memory both ways, synchronous calls, and a view of the device's bytes.
      fillPattern(pageable.data(), bytes, ++seed);
      EXPECT_OK(CU(cuMemcpyHtoD)(here2, pageable.data(), bytes));
      std::memset(pageable.data(), 0, bytes);
      EXPECT_OK(CU(cuMemcpyDtoH)(pageable.data(), here2, bytes));
      EXPECT_EQ(firstWrong(pageable.data(), bytes, seed), bytes);
      const auto* view = static_cast<unsigned char*>(CU(hocclEmuHostView)(here2));
      EXPECT_EQ(firstWrong(view, bytes, seed), bytes);
    }
    EXPECT_OK(CU(cuMemsetD8)(here, 0x5a, 100));
    EXPECT_OK(CU(cuMemsetD32Async)(here + 100, 0x01020304, 2, stream));
    EXPECT_OK(CU(cuStreamSynchronize)(stream));
    const auto* view = static_cast<unsigned char*>(CU(hocclEmuHostView)(here));
    EXPECT_EQ(view[99], 0x5a);
    EXPECT_EQ(view[107], 0x01);
    EXPECT_EQ(CU(cuMemcpyAsync)(here + kRoom - 4, here2, 5, stream), CUDA_ERROR_INVALID_VALUE);

    HocclEmuCounters counters{};
    EXPECT_OK(CU(hocclEmuGetCounters)(1, &counters));
    EXPECT_EQ(counters.sameDeviceD2D, 3u);
    EXPECT_EQ(counters.smOps, 3u);
    EXPECT_EQ(counters.copiesP2P, 6u);
    EXPECT_EQ(counters.copiesH2D, 6u);
    EXPECT_EQ(counters.h2dUnder32KiB, 4u);
    EXPECT_EQ(counters.bytesD2H, 2 * (1 + 4099 + 2 * kMiB + 13));
    EXPECT_OK(CU(hocclEmuGetCounters)(0, &counters));
    EXPECT_EQ(counters.copiesP2P, 0u);
  });
}

TEST(Emulator, AFlagFollowsItsBytes) {
  isolated({{"EMUCUDA_DILATION", "1"}, {"EMUCUDA_DELAY_US", "60"}, {"EMUCUDA_SEED", "7"}}, [] {
    openDevice();
    constexpr std::size_t kBytes = 70000;
    const CUdeviceptr device = allocate(kBytes);
    auto* host = pinned(2 * kBytes);
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    store(flag, 0);
    CUstream in = makeStream(), out = makeStream();
    for (unsigned round = 1; round <= 50; ++round) {
      fillPattern(host, kBytes, round);
      EXPECT_OK(CU(cuMemcpyHtoDAsync)(device, host, kBytes, in));
      EXPECT_OK(CU(cuStreamWriteValue64)(in, asDevice(flag), 2 * round - 1, 0));
      EXPECT_OK(
          CU(cuStreamWaitValue64)(out, asDevice(flag), 2 * round - 1, CU_STREAM_WAIT_VALUE_GEQ));
      EXPECT_OK(CU(cuMemcpyDtoHAsync)(host + kBytes, device, kBytes, out));
      EXPECT_OK(CU(cuStreamWriteValue64)(out, asDevice(flag), 2 * round, 0));
      EXPECT_TRUE(eventually([&] { return load(flag) == 2 * round; }));
      ASSERT_EQ(firstWrong(host + kBytes, kBytes, round), kBytes) << "round " << round;
    }
  });
}

TEST(Emulator, MemoryOperationsCompareAsDocumented) {
  isolated({{"EMUCUDA_DEVICES", "2"}}, [] {
    openDevice();
    auto* words = reinterpret_cast<std::uint32_t*>(pinned(4096));
    CUstream stream = makeStream();
    // With `value` wanted, does a wait pass while the word holds `now`?
    const auto expectPass = [&](bool pass, std::uint32_t now, std::uint32_t value, unsigned flags,
                                std::uint32_t release) {
      std::atomic_ref<std::uint32_t>(words[0]).store(now);
      EXPECT_OK(CU(cuStreamWaitValue32)(stream, asDevice(words), value, flags));
      const auto idle = [&] { return CU(cuStreamQuery)(stream) == CUDA_SUCCESS; };
      EXPECT_EQ(eventually(idle, pass ? 20s : 20ms), pass)
          << "word " << now << ", value " << value << ", flags " << flags;
      std::atomic_ref<std::uint32_t>(words[0]).store(release);
      EXPECT_OK(CU(cuStreamSynchronize)(stream));
    };
    expectPass(true, 5, 5, CU_STREAM_WAIT_VALUE_GEQ, 5);
    expectPass(false, 4, 5, CU_STREAM_WAIT_VALUE_GEQ, 5);
    expectPass(true, 2, 0xfffffff0u, CU_STREAM_WAIT_VALUE_GEQ, 2);  // the counter wrapped
    expectPass(false, 6, 5, CU_STREAM_WAIT_VALUE_EQ, 5);
    expectPass(true, 6, 2, CU_STREAM_WAIT_VALUE_AND, 6);
    expectPass(false, 4, 2, CU_STREAM_WAIT_VALUE_AND, 2);
    expectPass(false, ~5u, 5, CU_STREAM_WAIT_VALUE_NOR, 0);
    CUstreamBatchMemOpParams batch[3] = {};
    batch[0].writeValue = {
        CU_STREAM_MEM_OP_WRITE_VALUE_32, asDevice(&words[2]), {.value = 9}, 0, 0};
    batch[1].waitValue = {CU_STREAM_MEM_OP_WAIT_VALUE_32, asDevice(&words[2]), {.value = 9}, 0, 0};
    batch[2].writeValue = {
        CU_STREAM_MEM_OP_WRITE_VALUE_64, asDevice(&words[4]), {.value64 = 1ull << 40}, 0, 0};
    EXPECT_OK(CU(cuStreamBatchMemOp)(stream, 3, batch, 0));
    EXPECT_OK(CU(cuStreamSynchronize)(stream));
    EXPECT_EQ(words[5], 256u);
    std::uint32_t plain = 0;
    EXPECT_EQ(CU(cuStreamWriteValue32)(stream, asDevice(&plain), 1, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuStreamWriteValue64)(stream, asDevice(&words[1]), 1, 0),
              CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuStreamWaitValue32)(stream, asDevice(words), 1, CU_STREAM_WAIT_VALUE_FLUSH),
              CUDA_ERROR_NOT_SUPPORTED);
    // A peer GPU's memory is refused.
    CUcontext other = nullptr;
    REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&other, 1));
    EXPECT_OK(CU(cuCtxPushCurrent)(other));
    const CUdeviceptr peer = allocate(64);
    EXPECT_OK(CU(cuCtxPopCurrent)(nullptr));
    EXPECT_EQ(CU(cuStreamWriteValue32)(stream, peer, 1, 0), CUDA_ERROR_INVALID_VALUE);
  });
}

TEST(Emulator, MemoryOperationsReachAnotherProcess) {
  const int fd = memfd_create("flags", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, 4096), 0);
  constexpr std::uint64_t kRounds = 200;
  const auto side = [&](int mine) {
    openDevice();
    auto* flags =
        static_cast<std::uint64_t*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    REQUIRE_OK(CU(cuMemHostRegister)(flags, 4096, CU_MEMHOSTREGISTER_PORTABLE));
    CUstream stream = makeStream();
    const CUdeviceptr own = asDevice(&flags[8 * mine]), others = asDevice(&flags[8 * (1 - mine)]);
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      if (mine == 0) {
        EXPECT_OK(CU(cuStreamWriteValue64)(stream, own, round, 0));
      }
      EXPECT_OK(CU(cuStreamWaitValue64)(stream, others, round, CU_STREAM_WAIT_VALUE_GEQ));
      if (mine == 1) {
        EXPECT_OK(CU(cuStreamWriteValue64)(stream, own, round, 0));
      }
    }
    EXPECT_OK(CU(cuStreamSynchronize)(stream));
    EXPECT_EQ(load(&flags[8 * mine]), kRounds);
    EXPECT_EQ(load(&flags[8 * (1 - mine)]), kRounds);
    EXPECT_OK(CU(cuMemHostUnregister)(flags));
  };
  const pid_t first = start({}, [&] { side(0); });
  const pid_t second = start({}, [&] { side(1); });
  expectSuccess(first);
  expectSuccess(second);
  close(fd);
}

TEST(Emulator, HandlesCrossProcesses) {
  struct Mail {
    std::atomic<int> stage{0};
    CUipcMemHandle handle;
    CUdeviceptr address;
  };
  auto* mail = sharedMemory<Mail>();
  constexpr std::size_t kBytes = 3 * kMiB + 5;
  const auto reached = [&](int stage) {
    const bool came = eventually([&] { return mail->stage >= stage; });
    EXPECT_TRUE(came) << "stage " << stage;
    if (!came) _exit(1);
  };
  const Environment environment{{"EMUCUDA_DEVICES", "2"}, {"EMUCUDA_DILATION", "1"}};
  const pid_t exporter = start(environment, [&] {
    openDevice(0);
    const CUdeviceptr memory = allocate(kBytes);
    std::vector<unsigned char> bytes(kBytes);
    fillPattern(bytes.data(), kBytes, 1);
    EXPECT_OK(CU(cuMemcpyHtoD)(memory, bytes.data(), kBytes));
    EXPECT_OK(CU(cuIpcGetMemHandle)(&mail->handle, memory + 4096));
    CUdeviceptr own = 0;
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&own, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
              CUDA_ERROR_INVALID_CONTEXT);
    mail->stage = 1;
    reached(2);  // the importer wrote
    EXPECT_OK(CU(cuMemcpyDtoH)(bytes.data(), memory, kBytes));
    EXPECT_EQ(firstWrong(bytes.data(), kBytes, 2), kBytes);
    EXPECT_OK(CU(cuMemFree)(memory));
    const CUdeviceptr next = allocate(kBytes);  // gets the same descriptor number
    EXPECT_OK(CU(cuMemsetD8)(next, 0, kBytes));
    mail->stage = 3;
    reached(4);
  });
  const pid_t importer = start(environment, [&] {
    openDevice(1);
    reached(1);
    CUdeviceptr memory = 0, again = 0;
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, mail->handle, 0), CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    REQUIRE_OK(CU(cuIpcOpenMemHandle)(&memory, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    EXPECT_OK(CU(cuIpcOpenMemHandle)(&again, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    EXPECT_EQ(again, memory);
    EXPECT_OK(CU(cuIpcCloseMemHandle)(again));
    int ordinal = -1, capable = -1;
    EXPECT_OK(CU(cuPointerGetAttribute)(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory));
    EXPECT_EQ(ordinal, 0);
    EXPECT_OK(CU(cuPointerGetAttribute)(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                        memory));
    EXPECT_EQ(capable, 0);
    std::vector<unsigned char> bytes(kBytes);
    EXPECT_OK(CU(cuMemcpyDtoH)(bytes.data(), memory, kBytes));
    EXPECT_EQ(firstWrong(bytes.data(), kBytes, 1), kBytes);
    fillPattern(bytes.data(), kBytes, 2);
    EXPECT_OK(CU(cuMemcpyHtoD)(memory, bytes.data(), kBytes));
    mail->stage = 2;
    reached(3);  // freed by the exporter: this mapping stays, the handle is dead
    std::memset(bytes.data(), 0, kBytes);
    EXPECT_OK(CU(cuMemcpyDtoH)(bytes.data(), memory, kBytes));
    EXPECT_EQ(firstWrong(bytes.data(), kBytes, 2), kBytes);
    EXPECT_OK(CU(cuIpcCloseMemHandle)(memory));
    EXPECT_EQ(CU(cuIpcCloseMemHandle)(memory), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
              CUDA_ERROR_INVALID_HANDLE);
    mail->stage = 4;
  });
  expectSuccess(exporter);
  expectSuccess(importer);
  // Both are gone: the handle leads nowhere.
  isolated(environment, [&] {
    openDevice(1);
    CUdeviceptr memory = 0;
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
              CUDA_ERROR_MAP_FAILED);
  });
}

TEST(Emulator, DescribesPointers) {
  isolated({}, [] {
    openDevice();
    constexpr std::size_t kBytes = 10000;
    const CUdeviceptr device = allocate(kBytes);
    std::uint64_t id = 0, nextId = 0;
    EXPECT_OK(CU(cuPointerGetAttribute)(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, device + 17));
    EXPECT_OK(CU(cuMemFree)(device));
    const CUdeviceptr second = allocate(kBytes);
    EXPECT_OK(CU(cuPointerGetAttribute)(&nextId, CU_POINTER_ATTRIBUTE_BUFFER_ID, second));
    EXPECT_GT(nextId, id);

    unsigned type = 99, managed = 99, capable = 99;
    CUdeviceptr base = 0;
    std::size_t size = 0;
    void* pool = &base;
    CUpointer_attribute which[] = {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,      CU_POINTER_ATTRIBUTE_IS_MANAGED,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,   CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
    void* out[] = {&type, &managed, &base, &size, &pool, &capable};
    EXPECT_OK(CU(cuPointerGetAttributes)(6, which, out, second + kBytes - 1));
    EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
    EXPECT_EQ(managed, 0u);
    EXPECT_EQ(base, second);
    EXPECT_EQ(size, kBytes);
    EXPECT_EQ(pool, nullptr);
    EXPECT_EQ(capable, 1u);

    std::vector<unsigned char> plain(kBytes);
    EXPECT_EQ(
        CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, asDevice(plain.data())),
        CUDA_ERROR_INVALID_VALUE);
    EXPECT_OK(CU(cuPointerGetAttributes)(6, which, out, asDevice(plain.data())));
    EXPECT_EQ(type, 0u);
    EXPECT_EQ(size, 0u);

    EXPECT_OK(CU(cuMemHostRegister)(plain.data(), kBytes, 0));
    EXPECT_EQ(CU(cuMemHostRegister)(plain.data() + 5000, 10, 0),
              CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    EXPECT_OK(CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                        asDevice(plain.data() + 1)));
    EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_HOST));
    CUdeviceptr mapped = 0;
    EXPECT_OK(CU(cuMemHostGetDevicePointer)(&mapped, plain.data() + 8, 0));
    EXPECT_EQ(mapped, asDevice(plain.data() + 8));
    EXPECT_OK(CU(cuMemHostUnregister)(plain.data()));
    EXPECT_EQ(CU(cuMemHostUnregister)(plain.data()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    // Nothing is mapped at the first page.
    EXPECT_EQ(CU(cuMemHostRegister)(reinterpret_cast<void*>(4096), 4096, 0),
              CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuMemGetAddressRange)(&base, &size, 4096), CUDA_ERROR_NOT_FOUND);
  });
}

TEST(Emulator, SmWorkWaitsForFreeSmsAndCopyEnginesDoNot) {
  isolated({{"EMUCUDA_DILATION", "1"}}, [] {
    openDevice();
    const CUdeviceptr device = allocate(4 * kMiB);
    auto* host = pinned(4 * kMiB);
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    CUstream hog = makeStream(), d2d = makeStream(), memset = makeStream(), out = makeStream(),
             in = makeStream();
    EXPECT_OK(CU(hocclEmuLaunchWaitKernel)(hog, asDevice(flag), 1, 132));
    EXPECT_OK(CU(cuMemcpyDtoDAsync)(device, device + 2 * kMiB, kMiB, d2d));
    EXPECT_OK(CU(cuMemsetD8Async)(device, 1, kMiB, memset));
    EXPECT_OK(CU(cuMemsetD8Async)(device + 2 * kMiB, 2, 4096, out));  // small: needs no SM
    EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, 2 * kMiB, out));
    EXPECT_OK(CU(cuMemcpyHtoDAsync)(device + 3 * kMiB, host, kMiB, in));
    EXPECT_OK(CU(cuStreamSynchronize)(out));
    EXPECT_OK(CU(cuStreamSynchronize)(in));
    std::this_thread::sleep_for(20ms);
    for (CUstream stream : {hog, d2d, memset})
      EXPECT_EQ(CU(cuStreamQuery)(stream), CUDA_ERROR_NOT_READY);
    store(flag, 1);
    for (CUstream stream : {hog, d2d, memset}) EXPECT_OK(CU(cuStreamSynchronize)(stream));
    HocclEmuCounters counters{};
    EXPECT_OK(CU(hocclEmuGetCounters)(0, &counters));
    EXPECT_EQ(counters.kernels, 1u);
    EXPECT_EQ(counters.sameDeviceD2D, 1u);
    EXPECT_EQ(counters.largeMemsets, 1u);
    EXPECT_EQ(counters.smOps, 3u);
  });
}

TEST(Emulator, AKernelTakesItsModelTime) {
  isolated({{"EMUCUDA_DILATION", "20"}}, [] {
    openDevice();
    CUstream stream = makeStream();
    const ModelTime time =
        measure(stream, [&] { EXPECT_OK(CU(hocclEmuLaunchKernel)(stream, 500'000, 1)); });
    expectTime("kernel", time, 499.9, 500.1);
    EXPECT_EQ(CU(hocclEmuLaunchKernel)(stream, 1, 133), CUDA_ERROR_INVALID_VALUE);
  });
}

TEST(Emulator, AKernelsBodyRunsInStreamOrder) {
  isolated({{"EMUCUDA_DILATION", "1"}}, [] {
    openDevice();
    const CUdeviceptr device = allocate(4096);
    auto* host = pinned(4096);
    std::memset(host, 3, 4096);
    CUstream stream = makeStream();
    EXPECT_OK(CU(cuMemcpyHtoDAsync)(device, host, 4096, stream));
    EXPECT_OK(CU(hocclEmuLaunchBody)(
        stream, 1000, 1,
        [](void* bytes) {
          for (int i = 0; i < 4096; ++i) static_cast<unsigned char*>(bytes)[i] += 4;
        },
        CU(hocclEmuHostView)(device)));
    EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, 4096, stream));
    EXPECT_OK(CU(cuStreamSynchronize)(stream));
    EXPECT_EQ(host[4095], 7);
  });
}

TEST(Emulator, DirectionsOverlapAndOneDirectionIsShared) {
  isolated({{"EMUCUDA_DILATION", "100"}}, [] {
    openDevice();
    constexpr std::size_t kBytes = 2 * kMiB;
    constexpr double kAlone = 2.4 + kBytes / 55.4e3;  // us
    const CUdeviceptr device = allocate(2 * kBytes);
    auto* host = pinned(2 * kBytes);
    std::memset(host, 1, 2 * kBytes);
    CUstream first = makeStream(), second = makeStream();
    CUevent begin = nullptr, end = nullptr;
    REQUIRE_OK(CU(cuEventCreate)(&begin, 0));
    REQUIRE_OK(CU(cuEventCreate)(&end, 0));
    const auto both = [&](bool sameDirection) {
      return measure(first, [&] {
        EXPECT_OK(CU(cuEventRecord)(begin, first));
        EXPECT_OK(CU(cuStreamWaitEvent)(second, begin, 0));
        EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, kBytes, first));
        if (sameDirection) {
          EXPECT_OK(CU(cuMemcpyDtoHAsync)(host + kBytes, device + kBytes, kBytes, second));
        } else {
          EXPECT_OK(CU(cuMemcpyHtoDAsync)(device + kBytes, host + kBytes, kBytes, second));
        }
        EXPECT_OK(CU(cuEventRecord)(end, second));
        EXPECT_OK(CU(cuStreamWaitEvent)(first, end, 0));
      });
    };
    const ModelTime alone =
        measure(first, [&] { EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, kBytes, first)); });
    expectTime("one copy", alone, 0.99 * kAlone, 1.05 * kAlone);
    expectTime("both directions at once", both(false), 0.99 * kAlone, 1.1 * kAlone);
    expectTime("one direction twice at once", both(true), 1.98 * kAlone, 2.1 * kAlone);
  });
}

TEST(Emulator, PeersHaveNvlinkSpeed) {
  isolated({{"EMUCUDA_DEVICES", "2"}, {"EMUCUDA_DILATION", "300"}}, [] {
    openDevice(0);
    CUcontext other = nullptr;
    REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&other, 1));
    constexpr std::size_t kBytes = 4 * kMiB;
    constexpr double kWire = kBytes / 397e3;  // us
    const CUdeviceptr here = allocate(kBytes);
    EXPECT_OK(CU(cuCtxPushCurrent)(other));
    const CUdeviceptr there = allocate(kBytes);
    EXPECT_OK(CU(cuCtxPopCurrent)(nullptr));
    CUstream stream = makeStream();
    const ModelTime push =
        measure(stream, [&] { EXPECT_OK(CU(cuMemcpyAsync)(there, here, kBytes, stream)); });
    const ModelTime pull =
        measure(stream, [&] { EXPECT_OK(CU(cuMemcpyAsync)(here, there, kBytes, stream)); });
    expectTime("push", push, 2 + 0.99 * kWire, 2.1 + 1.05 * kWire);
    expectTime("pull", pull, 8.7 + 0.99 * kWire, 8.8 + 1.05 * kWire);
    // Two pushes out of one device share its link; a push and a pull use the two directions.
    CUstream second = makeStream();
    CUevent begin = nullptr, end = nullptr;
    REQUIRE_OK(CU(cuEventCreate)(&begin, 0));
    REQUIRE_OK(CU(cuEventCreate)(&end, 0));
    const auto both = [&](CUdeviceptr to, CUdeviceptr from) {
      return measure(stream, [&] {
        EXPECT_OK(CU(cuEventRecord)(begin, stream));
        EXPECT_OK(CU(cuStreamWaitEvent)(second, begin, 0));
        EXPECT_OK(CU(cuMemcpyAsync)(there, here, kBytes, stream));
        EXPECT_OK(CU(cuMemcpyAsync)(to, from, kBytes, second));
        EXPECT_OK(CU(cuEventRecord)(end, second));
        EXPECT_OK(CU(cuStreamWaitEvent)(stream, end, 0));
      });
    };
    expectTime("two pushes", both(there, here), 2 + 1.98 * kWire, 2.1 + 2.1 * kWire);
    expectTime("push and pull", both(here, there), 8.7 + 0.99 * kWire, 8.8 + 1.1 * kWire);
  });
}

TEST(Emulator, ProcessesOfASessionShareAnEngine) {
  struct Board {
    std::atomic<int> ready{0};
    std::atomic<std::uint64_t> startedAt{0}, endedAt[2]{};
    alignas(4096) std::uint64_t gate = 0;
    char page[4096 - sizeof(std::uint64_t)];
  };
  auto* board = sharedMemory<Board>();
  constexpr std::size_t kBytes = 4 * kMiB;
  constexpr double kAlone = 2.4 + kBytes / 55.4e3;
  const Folder folder;
  const auto meet = [&](int processes) {
    ++board->ready;
    EXPECT_TRUE(eventually([&] { return board->ready >= processes; }));
  };
  const auto body = [&](int index) {
    openDevice();
    const CUdeviceptr device = allocate(kBytes);
    auto* host = pinned(kBytes);
    std::memset(host, 1, kBytes);
    REQUIRE_OK(CU(cuMemHostRegister)(&board->gate, 4096, CU_MEMHOSTREGISTER_PORTABLE));
    CUstream stream = makeStream();
    EXPECT_OK(CU(cuStreamWaitValue64)(stream, asDevice(&board->gate), 1, CU_STREAM_WAIT_VALUE_GEQ));
    EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, kBytes, stream));
    meet(2);
    if (index == 0) {
      board->startedAt = CU(hocclEmuNow)();
      store(&board->gate, 1);
    }
    EXPECT_OK(CU(cuStreamSynchronize)(stream));
    board->endedAt[index] = CU(hocclEmuNow)();
    meet(4);
    HocclEmuCounters mine{}, all{};
    EXPECT_OK(CU(hocclEmuGetCounters)(0, &mine));
    EXPECT_OK(CU(hocclEmuGetSessionCounters)(0, &all));
    EXPECT_EQ(mine.bytesD2H, kBytes);
    EXPECT_EQ(all.bytesD2H, 2 * kBytes);
    meet(6);
    meet(9);
  };
  // Slow enough that this machine's own delays do not look like a shared engine.
  const Environment environment{
      {"EMUCUDA_DILATION", "1000"}, {"EMUCUDA_SESSION", "engine"}, {"TMPDIR", folder.path()}};
  const pid_t first = start(environment, [&] { body(0); });
  const pid_t second = start(environment, [&] { body(1); });
  EXPECT_TRUE(eventually([&] { return board->ready >= 6; }));
  // Times of another dilation would make no sense beside theirs.
  Environment different = environment;
  different["EMUCUDA_DILATION"] = "50";
  isolated(different, [] { EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_OPERATING_SYSTEM); });
  meet(9);
  expectSuccess(first);
  expectSuccess(second);
  const std::uint64_t end = std::max<std::uint64_t>(board->endedAt[0], board->endedAt[1]);
  EXPECT_GE(static_cast<double>(end - board->startedAt) / 1e3, 2 * kAlone);
}

TEST(Emulator, TheLastProcessRemovesTheSessionsFile) {
  const Folder folder;
  const Environment environment{{"EMUCUDA_SESSION", "ends"}, {"TMPDIR", folder.path()}};
  auto* stage = sharedMemory<std::atomic<int>>();
  const auto end = [] { std::exit(testing::Test::HasFailure() ? 1 : 0); };
  const pid_t first = start(environment, [&] {
    openDevice();
    ++*stage;
    EXPECT_TRUE(eventually([&] { return *stage >= 2; }));
    end();
  });
  EXPECT_TRUE(eventually([&] { return *stage >= 1; }));
  expectSuccess(start(environment, [&] {
    openDevice();
    end();
  }));
  EXPECT_FALSE(folder.empty());  // the first one still uses it
  ++*stage;
  expectSuccess(first);
  EXPECT_TRUE(folder.empty());
}

TEST(Emulator, AWaitHoldsUpOnlyItsStream) {
  isolated({{"EMUCUDA_DILATION", "1"}}, [] {
    openDevice();
    const CUdeviceptr device = allocate(kMiB);
    auto* host = pinned(kMiB);
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    CUstream parked = makeStream(), other = makeStream();
    EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, 4096, parked));
    EXPECT_OK(CU(cuStreamWaitValue64)(parked, asDevice(flag), 1, CU_STREAM_WAIT_VALUE_GEQ));
    EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, kMiB, other));
    EXPECT_OK(CU(cuStreamSynchronize)(other));
    EXPECT_EQ(CU(cuStreamQuery)(parked), CUDA_ERROR_NOT_READY);

    // A free waits for the device, and holds up what every other thread submits.
    CUcontext context = nullptr;
    EXPECT_OK(CU(cuCtxGetCurrent)(&context));
    const CUdeviceptr victim = allocate(4096);
    std::atomic<bool> freed{false}, stop{false};
    std::atomic<int> submitted{0};
    std::thread submitting([&] {
      EXPECT_OK(CU(cuCtxSetCurrent)(context));
      while (!stop) {
        EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, 64, other));
        EXPECT_OK(CU(cuStreamSynchronize)(other));
        ++submitted;
      }
    });
    EXPECT_TRUE(eventually([&] { return submitted > 0; }));
    std::thread freeing([&] {
      EXPECT_OK(CU(cuCtxSetCurrent)(context));
      EXPECT_OK(CU(cuMemFree)(victim));
      freed = true;
    });
    EXPECT_TRUE(eventually([&] {
      const int before = submitted;
      std::this_thread::sleep_for(50ms);
      return submitted == before;
    }));
    EXPECT_FALSE(freed);
    const int before = submitted;
    store(flag, 1);
    EXPECT_TRUE(eventually([&] { return submitted > before && freed; }));
    stop = true;
    freeing.join();
    submitting.join();
    EXPECT_OK(CU(cuStreamSynchronize)(parked));
  });
}

TEST(Emulator, EventsOrderStreams) {
  isolated({{"EMUCUDA_DILATION", "1"}}, [] {
    openDevice();
    auto* flags = reinterpret_cast<std::uint64_t*>(pinned(4096));
    CUstream first = makeStream(), second = makeStream();
    CUevent event = nullptr, untimed = nullptr;
    REQUIRE_OK(CU(cuEventCreate)(&event, 0));
    REQUIRE_OK(CU(cuEventCreate)(&untimed, CU_EVENT_DISABLE_TIMING));
    EXPECT_OK(CU(cuEventQuery)(event));  // never recorded: nothing to wait for
    EXPECT_OK(CU(cuStreamWaitEvent)(second, event, 0));
    EXPECT_OK(CU(cuStreamWaitValue64)(first, asDevice(&flags[0]), 1, CU_STREAM_WAIT_VALUE_GEQ));
    EXPECT_OK(CU(cuEventRecord)(event, first));
    EXPECT_OK(CU(cuStreamWaitEvent)(second, event, 0));
    EXPECT_OK(CU(cuStreamWriteValue64)(second, asDevice(&flags[1]), 1, 0));
    // The wait is for the recording at its call, not for this later one.
    EXPECT_OK(CU(cuStreamWaitValue64)(first, asDevice(&flags[2]), 1, CU_STREAM_WAIT_VALUE_GEQ));
    EXPECT_OK(CU(cuEventRecord)(event, first));
    std::this_thread::sleep_for(20ms);
    EXPECT_EQ(load(&flags[1]), 0u);
    store(&flags[0], 1);
    EXPECT_OK(CU(cuStreamSynchronize)(second));
    EXPECT_EQ(load(&flags[1]), 1u);
    EXPECT_EQ(CU(cuEventQuery)(event), CUDA_ERROR_NOT_READY);
    store(&flags[2], 1);
    EXPECT_OK(CU(cuEventSynchronize)(event));
    EXPECT_OK(CU(cuEventRecord)(untimed, first));
    float milliseconds = 0;
    EXPECT_EQ(CU(cuEventElapsedTime)(&milliseconds, event, untimed), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_OK(CU(cuEventDestroy)(event));
    EXPECT_EQ(CU(cuEventDestroy)(event), CUDA_ERROR_INVALID_HANDLE);
  });
}

TEST(Emulator, NothingBeginsBeforeTheFlagItWaitsFor) {
  isolated({{"EMUCUDA_DILATION", "1000"}}, [] {
    openDevice();
    constexpr std::size_t kBytes = 768 << 10;
    constexpr double kAlone = 2.4 + kBytes / 55.4e3;  // us; as many ms of real time
    const CUdeviceptr device = allocate(kBytes);
    auto* host = pinned(kBytes);
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    CUstream busy = makeStream(), stream = makeStream();
    // The emulator's thread is held inside a kernel's body, so it sees the wait only after the
    // flag.
    static std::atomic<bool> holds{false}, release{false};
    EXPECT_OK(CU(hocclEmuLaunchBody)(
        busy, 0, 1,
        [](void*) {
          holds = true;
          while (!release) std::this_thread::sleep_for(100us);
        },
        nullptr));
    EXPECT_TRUE(eventually([&] { return holds.load(); }));
    EXPECT_OK(CU(cuStreamWaitValue64)(stream, asDevice(flag), 1, CU_STREAM_WAIT_VALUE_GEQ));
    EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, kBytes, stream));
    std::this_thread::sleep_for(10ms);
    const std::uint64_t written = CU(hocclEmuNow)();
    store(flag, 1);
    release = true;
    EXPECT_OK(CU(cuStreamSynchronize)(stream));
    EXPECT_GE(static_cast<double>(CU(hocclEmuNow)() - written) / 1e3, kAlone);
  });
}

TEST(Emulator, DefaultStreamsOrderAgainstBlockingStreams) {
  isolated({{"EMUCUDA_DILATION", "1"}}, [] {
    openDevice();
    auto* flags = reinterpret_cast<std::uint64_t*>(pinned(4096));
    CUstream blocking = nullptr, independent = makeStream();
    REQUIRE_OK(CU(cuStreamCreate)(&blocking, CU_STREAM_DEFAULT));
    const auto write = [&](CUstream stream, int index) {
      EXPECT_OK(CU(cuStreamWriteValue64)(stream, asDevice(&flags[index]), 1, 0));
    };
    EXPECT_OK(CU(cuStreamWaitValue64)(blocking, asDevice(&flags[0]), 1, CU_STREAM_WAIT_VALUE_GEQ));
    write(CU_STREAM_LEGACY, 1);      // after `blocking`
    write(CU_STREAM_PER_THREAD, 2);  // after the legacy stream
    write(independent, 3);           // after nothing
    EXPECT_OK(CU(cuStreamSynchronize)(independent));
    std::this_thread::sleep_for(20ms);
    EXPECT_EQ(load(&flags[1]), 0u);
    EXPECT_EQ(load(&flags[2]), 0u);
    EXPECT_EQ(load(&flags[3]), 1u);
    store(&flags[0], 1);
    EXPECT_OK(CU(cuStreamSynchronize)(CU_STREAM_PER_THREAD));
    EXPECT_EQ(load(&flags[1]), 1u);
    EXPECT_EQ(load(&flags[2]), 1u);
    EXPECT_OK(CU(cuCtxSynchronize)());
  });
}

TEST(Emulator, CaptureIsReportedAndForbidsWhatItMust) {
  isolated({}, [] {
    openDevice();
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    CUstream stream = makeStream(), joined = makeStream();
    const auto status = [](CUstream which) {
      CUstreamCaptureStatus value = CU_STREAM_CAPTURE_STATUS_NONE;
      EXPECT_OK(CU(cuStreamIsCapturing)(which, &value));
      return value;
    };
    CUevent event = nullptr;
    REQUIRE_OK(CU(cuEventCreate)(&event, 0));
    EXPECT_EQ(status(stream), CU_STREAM_CAPTURE_STATUS_NONE);
    EXPECT_OK(CU(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT_EQ(status(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    EXPECT_OK(CU(cuStreamWriteValue64)(stream, asDevice(flag), 1, 0));
    EXPECT_OK(CU(cuEventRecord)(event, stream));
    EXPECT_EQ(CU(cuEventQuery)(event), CUDA_ERROR_CAPTURED_EVENT);
    EXPECT_OK(CU(cuStreamWaitEvent)(joined, event, 0));
    EXPECT_EQ(status(joined), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    const CUdeviceptr memory = allocate(64);  // relaxed: allowed
    CUgraph graph = nullptr;
    EXPECT_OK(CU(cuStreamEndCapture)(stream, &graph));
    EXPECT_NE(graph, nullptr);
    EXPECT_OK(CU(cuGraphDestroy)(graph));
    EXPECT_EQ(status(joined), CU_STREAM_CAPTURE_STATUS_NONE);
    EXPECT_OK(CU(cuStreamSynchronize)(stream));
    EXPECT_EQ(load(flag), 0u);  // captured, never run
    HocclEmuCounters counters{};
    EXPECT_OK(CU(hocclEmuGetCounters)(0, &counters));
    EXPECT_EQ(counters.memOps, 0u);

    EXPECT_OK(CU(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    EXPECT_OK(CU(cuThreadExchangeStreamCaptureMode)(&mode));
    EXPECT_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    EXPECT_OK(CU(cuMemFree)(memory));  // this thread exchanged its mode
    EXPECT_OK(CU(cuThreadExchangeStreamCaptureMode)(&mode));
    CUdeviceptr refused = 0;
    EXPECT_EQ(CU(cuMemAlloc)(&refused, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT_EQ(status(stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    EXPECT_EQ(CU(cuStreamEndCapture)(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    EXPECT_OK(CU(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    EXPECT_EQ(CU(cuStreamSynchronize)(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT_EQ(CU(cuStreamEndCapture)(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    EXPECT_EQ(CU(cuStreamBeginCapture)(nullptr, CU_STREAM_CAPTURE_MODE_GLOBAL),
              CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  });
}

TEST(Emulator, ManyThreadsAndStreams) {
  isolated({{"EMUCUDA_DEVICES", "2"},
            {"EMUCUDA_DILATION", "0.01"},
            {"EMUCUDA_DELAY_US", "20"},
            {"EMUCUDA_SEED", "3"}},
           [] {
             REQUIRE_OK(CU(cuInit)(0));
             CUcontext contexts[2];
             for (int i = 0; i < 2; ++i) REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&contexts[i], i));
             std::vector<std::thread> threads;
             for (unsigned t = 0; t < 4; ++t)
               threads.emplace_back([&, t] {
                 REQUIRE_OK(CU(cuCtxSetCurrent)(contexts[t % 2]));
                 constexpr std::size_t kBytes = 50000;
                 auto* host = pinned(2 * kBytes);
                 for (unsigned round = 0; round < 10; ++round) {
                   CUstream stream = makeStream();
                   const CUdeviceptr device = allocate(kBytes);
                   CUevent event = nullptr;
                   REQUIRE_OK(CU(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING));
                   fillPattern(host, kBytes, 100 * t + round);
                   EXPECT_OK(CU(cuMemcpyHtoDAsync)(device, host, kBytes, stream));
                   EXPECT_OK(CU(cuMemcpyDtoHAsync)(host + kBytes, device, kBytes, stream));
                   EXPECT_OK(CU(cuEventRecord)(event, stream));
                   EXPECT_OK(CU(cuStreamDestroy)(stream));  // the work goes on
                   EXPECT_OK(CU(cuEventSynchronize)(event));
                   EXPECT_EQ(firstWrong(host + kBytes, kBytes, 100 * t + round), kBytes);
                   EXPECT_OK(CU(cuEventDestroy)(event));
                   EXPECT_OK(CU(cuMemFree)(device));
                 }
                 EXPECT_OK(CU(cuMemFreeHost)(host));
               });
             for (std::thread& thread : threads) thread.join();
           });
}

}  // namespace
