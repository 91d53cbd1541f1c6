// Streams, events and their order in the emulated driver.

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

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
}  // namespace hoccl::emu_test
