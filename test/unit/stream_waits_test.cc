// Which kind of wait is chosen (rule 6). The driver is a table of functions that always succeed.

#include "common/gpu/stream_waits.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace hoccl {
namespace {

constexpr std::uint64_t kTimeoutMs = 100;
int launches = 0;
CUresult streamState = CUDA_SUCCESS;

const Driver* fakeDriver(bool kernelLoads = true) {
  static Driver driver;
  driver.cuModuleLoadData = kernelLoads
                                ? [](CUmodule*, const void*) { return CUDA_SUCCESS; }
                                : [](CUmodule*, const void*) { return CUDA_ERROR_INVALID_PTX; };
  driver.cuModuleGetFunction = [](CUfunction*, CUmodule, const char*) { return CUDA_SUCCESS; };
  driver.cuMemHostAlloc = [](void**, size_t, unsigned) { return CUDA_SUCCESS; };
  driver.cuMemHostGetDevicePointer = [](CUdeviceptr*, void*, unsigned) { return CUDA_SUCCESS; };
  driver.cuStreamCreate = [](CUstream*, unsigned) { return CUDA_SUCCESS; };
  driver.cuStreamQuery = [](CUstream) { return streamState; };
  driver.cuStreamDestroy = [](CUstream) { return CUDA_SUCCESS; };
  driver.cuLaunchKernel = [](CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned, CUstream, void**, void**) {
    ++launches;
    return CUDA_SUCCESS;
  };
  driver.cuGetErrorName = [](CUresult, const char** name) {
    *name = "CUDA_ERROR_INVALID_PTX";
    return CUDA_SUCCESS;
  };
  driver.cuGetErrorString = [](CUresult, const char** text) {
    *text = "bad PTX";
    return CUDA_SUCCESS;
  };
  return &driver;
}

CUstream stream(std::uintptr_t n) { return reinterpret_cast<CUstream>(n << 8); }

class StreamWaitsTest : public testing::Test {
 protected:
  void SetUp() override { unsetenv("CUDA_DEVICE_MAX_CONNECTIONS"); }
  void TearDown() override { unsetenv("CUDA_DEVICE_MAX_CONNECTIONS"); }
  std::unique_ptr<StreamWaits> make(const char* policy) {
    std::unique_ptr<StreamWaits> waits;
    Status status = StreamWaits::create(fakeDriver(), policy, kTimeoutMs, &waits);
    EXPECT_TRUE(status) << status.message();
    return waits;
  }
  std::vector<Flag> flags_ = std::vector<Flag>(64);
};

TEST_F(StreamWaitsTest, MemoryOperationsWhileThereAreMoreChannelsThanStreamsThatWait) {
  auto waits = make("auto");
  for (std::uintptr_t n = 1; n <= 3; ++n) {
    EXPECT_EQ(waits->choose(stream(n), &flags_[n], 1), WaitKind::MemoryOp) << n;
  }
  EXPECT_EQ(waits->choose(stream(4), &flags_[4], 1), WaitKind::Kernel);
  // Any number on a stream that waits already: only its first holds a channel.
  EXPECT_EQ(waits->choose(stream(2), &flags_[5], 1), WaitKind::MemoryOp);
  // A kernel holds no channel: once one of the three is over, the next may have its place.
  flags_[1].set(1);
  EXPECT_EQ(waits->choose(stream(5), &flags_[6], 1), WaitKind::MemoryOp);
  EXPECT_EQ(waits->choose(stream(1), &flags_[7], 1), WaitKind::Kernel);
}

TEST_F(StreamWaitsTest, AWaitThatHasEndedDoesNotCount) {
  auto waits = make("auto");
  for (std::uintptr_t n = 1; n <= 50; ++n) {
    EXPECT_EQ(waits->choose(stream(n), &flags_[n], 7), WaitKind::MemoryOp) << n;
    flags_[n].set(7);
  }
  EXPECT_EQ(waits->count(WaitKind::MemoryOp), 50u);
  EXPECT_EQ(waits->count(WaitKind::Kernel), 0u);
}

TEST_F(StreamWaitsTest, TheLegacyStreamCountsLikeAnyOther) {
  auto waits = make("auto");
  EXPECT_EQ(waits->choose(nullptr, &flags_[0], 1), WaitKind::MemoryOp);
  EXPECT_EQ(waits->choose(stream(1), &flags_[1], 1), WaitKind::MemoryOp);
  EXPECT_EQ(waits->choose(nullptr, &flags_[2], 1), WaitKind::MemoryOp);
  EXPECT_EQ(waits->choose(stream(2), &flags_[3], 1), WaitKind::MemoryOp);
  EXPECT_EQ(waits->choose(stream(3), &flags_[4], 1), WaitKind::Kernel);
}

TEST_F(StreamWaitsTest, OneConnectionLeavesNoRoom) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  auto waits = make("auto");
  EXPECT_EQ(waits->choose(stream(1), &flags_[1], 1), WaitKind::Kernel);
}

TEST_F(StreamWaitsTest, ThirtyTwoConnectionsLeaveMuch) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  auto waits = make("auto");
  for (std::uintptr_t n = 1; n <= 31; ++n) {
    EXPECT_EQ(waits->choose(stream(n), &flags_[n], 1), WaitKind::MemoryOp) << n;
  }
  EXPECT_EQ(waits->choose(stream(32), &flags_[32], 1), WaitKind::Kernel);
  EXPECT_EQ(waits->choose(stream(40), &flags_[40], 1), WaitKind::Kernel);
}

TEST_F(StreamWaitsTest, TheKernelRunsOnceBeforeItIsNeeded) {
  launches = 0;
  make("kernel");
  EXPECT_EQ(launches, 1);
  launches = 0;
  make("memop");
  EXPECT_EQ(launches, 0);
}

TEST_F(StreamWaitsTest, WithoutItsKernelAutoWaitsByMemoryOperationsWhereThereAreChannels) {
  std::unique_ptr<StreamWaits> waits;
  ASSERT_TRUE(StreamWaits::create(fakeDriver(false), "auto", kTimeoutMs, &waits));
  EXPECT_EQ(waits->choose(stream(1), &flags_[1], 1), WaitKind::MemoryOp);
  const Status refused = StreamWaits::create(fakeDriver(false), "kernel", kTimeoutMs, &waits);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.message().find("HOCCL_WAIT=kernel"), std::string::npos) << refused.message();
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  EXPECT_FALSE(StreamWaits::create(fakeDriver(false), "auto", kTimeoutMs, &waits));
}

TEST_F(StreamWaitsTest, AFirstRunThatDoesNotEndIsNotWaitedForForEver) {
  streamState = CUDA_ERROR_NOT_READY;
  std::unique_ptr<StreamWaits> waits;
  const Status late = StreamWaits::create(fakeDriver(), "kernel", kTimeoutMs, &waits);
  streamState = CUDA_SUCCESS;
  ASSERT_FALSE(late);
  EXPECT_EQ(late.code(), Code::Timeout);
  EXPECT_NE(late.message().find("100 ms"), std::string::npos) << late.message();
}

}  // namespace
}  // namespace hoccl
