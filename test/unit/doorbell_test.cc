// The doorbell: a growing number, one ring at a time. The driver is a table of functions of the
// test.

#include "common/gpu/doorbell.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace hoccl {
namespace {

std::uint64_t* word = nullptr;  // what the doorbell has the GPU write
std::vector<std::uint64_t> rings;
CUresult answer = CUDA_SUCCESS;

const Driver* fakeDriver() {
  static Driver driver;
  driver.cuStreamCreate = [](CUstream* stream, unsigned flags) {
    EXPECT_EQ(flags, static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) << "or it waits for others";
    *stream = reinterpret_cast<CUstream>(0x100);
    return CUDA_SUCCESS;
  };
  driver.cuStreamDestroy = [](CUstream) { return CUDA_SUCCESS; };
  driver.cuMemHostAlloc = [](void** out, size_t bytes, unsigned) {
    EXPECT_GE(bytes, sizeof(std::uint64_t));
    *out = word = static_cast<std::uint64_t*>(std::calloc(1, bytes));
    return CUDA_SUCCESS;
  };
  driver.cuMemFreeHost = [](void* memory) {
    std::free(memory);
    return CUDA_SUCCESS;
  };
  driver.cuMemHostGetDevicePointer = [](CUdeviceptr* out, void* memory, unsigned) {
    *out = reinterpret_cast<CUdeviceptr>(memory);
    return CUDA_SUCCESS;
  };
  driver.cuStreamWriteValue64 = [](CUstream, CUdeviceptr address, cuuint64_t value, unsigned) {
    EXPECT_EQ(address, reinterpret_cast<CUdeviceptr>(word));
    if (answer == CUDA_SUCCESS) rings.push_back(value);
    return answer;
  };
  driver.cuGetErrorName = [](CUresult, const char** name) {
    *name = "CUDA_ERROR_LAUNCH_FAILED";
    return CUDA_SUCCESS;
  };
  driver.cuGetErrorString = [](CUresult, const char** text) {
    *text = "failed";
    return CUDA_SUCCESS;
  };
  return &driver;
}

class DoorbellTest : public testing::Test {
 protected:
  void SetUp() override {
    rings.clear();
    answer = CUDA_SUCCESS;
    const Status status = makeStreamDoorbell(fakeDriver(), &doorbell_);
    ASSERT_TRUE(status) << status.message();
  }
  bool ring() {
    bool rang = false;
    const Status status = doorbell_->ring(&rang);
    EXPECT_TRUE(status) << status.message();
    return rang;
  }
  std::unique_ptr<Doorbell> doorbell_;
};

TEST_F(DoorbellTest, NoRingWhileTheLastOneIsUnderWay) {
  EXPECT_TRUE(ring());
  EXPECT_FALSE(ring());
  EXPECT_FALSE(ring());
  EXPECT_EQ(rings, std::vector<std::uint64_t>{1});
  *word = 1;  // as the GPU does
  EXPECT_TRUE(ring());
  EXPECT_FALSE(ring());
  *word = 2;
  EXPECT_TRUE(ring());
  EXPECT_EQ(rings, (std::vector<std::uint64_t>{1, 2, 3}));
}

TEST_F(DoorbellTest, TheDriversErrorIsItsOwn) {
  answer = CUDA_ERROR_LAUNCH_FAILED;
  bool rang = false;
  const Status status = doorbell_->ring(&rang);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.code(), Code::Cuda);
  EXPECT_NE(status.message().find("cuStreamWriteValue64"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace hoccl
