// Copies of the emulated driver: every byte, in every direction.

#include <signal.h>
#include <sys/wait.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

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

}  // namespace
}  // namespace hoccl::emu_test
