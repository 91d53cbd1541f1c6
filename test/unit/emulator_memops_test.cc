// Stream memory operations of the emulated driver.

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

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

}  // namespace
}  // namespace hoccl::emu_test
