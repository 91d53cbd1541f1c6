// The emulated driver's engines and their model time.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

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

// FACTS 1, row by row: which copies run while every SM is taken?
TEST(Emulator, Facts1WhichCopiesNeedNoSm) {
  isolated({{"EMUCUDA_DEVICES", "2"}, {"EMUCUDA_DILATION", "1"}}, [] {
    openDevice(0);
    CUcontext own = nullptr, peer = nullptr;
    EXPECT_OK(CU(cuCtxGetCurrent)(&own));
    REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&peer, 1));
    const CUdeviceptr here = allocate(4 * kMiB);
    auto* host = pinned(kMiB);
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    EXPECT_OK(CU(cuCtxPushCurrent)(peer));
    const CUdeviceptr there = allocate(kMiB);
    CUstream peersStream = makeStream();
    EXPECT_OK(CU(cuCtxPopCurrent)(nullptr));
    CUstream hog = makeStream();
    EXPECT_OK(CU(hocclEmuLaunchWaitKernel)(hog, asDevice(flag), 1, 132));

    std::vector<CUstream> held;
    const auto expect = [&](const char* what, bool runs, CUstream stream, auto&& submit) {
      EXPECT_OK(submit(stream)) << what;
      const auto done = [&] { return CU(cuStreamQuery)(stream) == CUDA_SUCCESS; };
      EXPECT_EQ(eventually(done, runs ? Clock::duration(5s) : 20ms), runs) << what;
      if (!runs) held.push_back(stream);
    };
    expect("peer to peer, pushed", true, makeStream(),
           [&](CUstream s) { return CU(cuMemcpyAsync)(there, here, kMiB, s); });
    expect("peer to peer, pulled", true, makeStream(),
           [&](CUstream s) { return CU(cuMemcpyPeerAsync)(here, own, there, peer, kMiB, s); });
    expect("device to pinned host", true, makeStream(),
           [&](CUstream s) { return CU(cuMemcpyDtoHAsync)(host, here, kMiB, s); });
    expect("pinned host to device", true, makeStream(),
           [&](CUstream s) { return CU(cuMemcpyHtoDAsync)(here, host, kMiB, s); });
    expect("same device", false, makeStream(),
           [&](CUstream s) { return CU(cuMemcpyDtoDAsync)(here, here + kMiB, kMiB, s); });
    expect("same device, the generic copy", false, makeStream(),
           [&](CUstream s) { return CU(cuMemcpyAsync)(here, here + kMiB, kMiB, s); });
    expect("same device, the peer copy", false, makeStream(),
           [&](CUstream s) { return CU(cuMemcpyPeerAsync)(here, own, here + kMiB, own, kMiB, s); });
    expect("same device, issued from another one", false, peersStream,
           [&](CUstream s) { return CU(cuMemcpyAsync)(here, here + kMiB, kMiB, s); });
    expect("memset of 4 KiB", true, makeStream(),
           [&](CUstream s) { return CU(cuMemsetD8Async)(here, 1, 4096, s); });
    expect("memset of 1 MiB", false, makeStream(),
           [&](CUstream s) { return CU(cuMemsetD8Async)(here, 1, kMiB, s); });
    expect("own memory to own memory by two hops over a peer", true, makeStream(), [&](CUstream s) {
      const CUresult out = CU(cuMemcpyAsync)(there, here, kMiB, s);
      return out != CUDA_SUCCESS ? out : CU(cuMemcpyAsync)(here + kMiB, there, kMiB, s);
    });
    store(flag, 1);
    for (CUstream stream : held) EXPECT_OK(CU(cuStreamSynchronize)(stream));
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

}  // namespace
}  // namespace hoccl::emu_test
