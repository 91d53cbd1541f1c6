#pragma once

// What the tests of the emulated driver (test/emulator) share. Every case runs in processes of its
// own, forked before the driver is loaded, because the driver reads its environment once and does
// not outlive a fork.

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

namespace hoccl::emu_test {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

inline constexpr auto kCaseLimit = 60s;  // far more than any case needs, also under a sanitizer
inline constexpr std::size_t kMiB = 1 << 20;

#ifndef HOCCL_EMULATOR_LIB
#define HOCCL_EMULATOR_LIB HOCCL_TEST_BUILD_DIR "/test/emulator/libcuda.so.1"
#endif

inline void* driverSymbol(const char* name) {
  static void* library = dlopen(HOCCL_EMULATOR_LIB, RTLD_NOW | RTLD_LOCAL);
  void* symbol = library == nullptr ? nullptr : dlsym(library, name);
  if (symbol == nullptr) {
    std::fprintf(stderr, "emulator test: %s: %s\n", name, dlerror());
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

inline pid_t start(const Environment& environment, const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  std::vector<std::string> inherited{"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS",
                                     "CUDA_MODULE_LOADING"};
  for (char** entry = environ; *entry != nullptr; ++entry)
    if (std::strncmp(*entry, "EMUCUDA_", 8) == 0)
      inherited.emplace_back(*entry, std::strcspn(*entry, "="));
  for (const std::string& name : inherited) unsetenv(name.c_str());
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  body();
  std::fflush(nullptr);
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

/// The wait status of a child that ends in time; kills it and fails otherwise.
inline int finish(pid_t pid) {
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

inline void expectSuccess(pid_t pid) {
  const int status = finish(pid);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "wait status " << status;
}

inline void isolated(const Environment& environment, const std::function<void()>& body) {
  expectSuccess(start(environment, body));
}

/// cuInit and the primary context of an ordinal made current.
inline void openDevice(int ordinal = 0) {
  REQUIRE_OK(CU(cuInit)(0));
  CUcontext context = nullptr;
  REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&context, ordinal));
  REQUIRE_OK(CU(cuCtxSetCurrent)(context));
}

inline CUstream makeStream() {
  CUstream stream = nullptr;
  REQUIRE_OK(CU(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
  return stream;
}

inline CUdeviceptr allocate(std::size_t bytes) {
  CUdeviceptr pointer = 0;
  REQUIRE_OK(CU(cuMemAlloc)(&pointer, bytes));
  return pointer;
}

inline unsigned char* pinned(std::size_t bytes) {
  void* pointer = nullptr;
  REQUIRE_OK(CU(cuMemHostAlloc)(&pointer, bytes, CU_MEMHOSTALLOC_PORTABLE));
  return static_cast<unsigned char*>(pointer);
}

inline CUdeviceptr asDevice(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

inline unsigned char patternAt(std::size_t index, unsigned seed) {
  return static_cast<unsigned char>((index * 2654435761u + seed * 97u) >> 7);
}

inline void fillPattern(unsigned char* to, std::size_t bytes, unsigned seed) {
  for (std::size_t i = 0; i < bytes; ++i) to[i] = patternAt(i, seed);
}

inline std::size_t firstWrong(const unsigned char* from, std::size_t bytes, unsigned seed) {
  for (std::size_t i = 0; i < bytes; ++i)
    if (from[i] != patternAt(i, seed)) return i;
  return bytes;
}

inline std::uint64_t load(const std::uint64_t* flag) {
  return std::atomic_ref<const std::uint64_t>(*flag).load(std::memory_order_acquire);
}
inline void store(std::uint64_t* flag, std::uint64_t value) {
  std::atomic_ref<std::uint64_t>(*flag).store(value, std::memory_order_release);
}

inline bool eventually(const std::function<bool()>& condition, Clock::duration limit = 20s) {
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
inline ModelTime measure(CUstream stream, const std::function<void()>& submit) {
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
inline void expectTime(const char* what, ModelTime time, double lowest, double highest) {
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

}  // namespace hoccl::emu_test
