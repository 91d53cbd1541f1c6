// The byte check on a GPU's memory, here the emulated one: what is planted must be found.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>

#include "tools/bench/rank_buffers.h"

namespace hoccl::bench {
namespace {

class BenchBuffers : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("hoccl_bench_buffers_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
    const char* before = ::getenv("TMPDIR");
    if (before) temporary_ = before;
    ::setenv("TMPDIR", folder_.c_str(), 1);  // of the emulator's session
    ::setenv("EMUCUDA_SESSION", ("buffers-" + std::to_string(::getpid())).c_str(), 1);
    ::setenv("EMUCUDA_DILATION", "1", 1);
    // What later asks for libcuda.so.1 gets this one.
    ASSERT_TRUE(::dlopen(HOCCL_TEST_BUILD_DIR "/test/emulator/libcuda.so.1", RTLD_NOW))
        << dlerror();
    device_ = std::make_unique<RankDevice>();
    const Status status = device_->open(0);
    ASSERT_TRUE(status) << status.message();
    ASSERT_TRUE(device_->info().emulated);
  }
  void TearDown() override {
    device_.reset();
    temporary_.empty() ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", temporary_.c_str(), 1);
    for (const char* name : {"EMUCUDA_SESSION", "EMUCUDA_DILATION"}) ::unsetenv(name);
    std::filesystem::remove_all(folder_);
  }

  /// Makes the buffers of rank 1 of 3 for the shape and fills them for operation 5.
  std::unique_ptr<RankBuffers> prepared(Operation operation, const Shape& shape) {
    layout_ = layoutOf({operation, 3, 1, Pattern::Ring, 2, 1}, 1, shape);
    auto buffers = std::make_unique<RankBuffers>(device_.get(), 1);
    Status status = buffers->allocate(deviceMemory(device_->driver()), layout_.sendBytes,
                                      layout_.receiveBytes, 3);
    EXPECT_TRUE(status) << status.message();
    status = buffers->prepare(layout_, 5);
    EXPECT_TRUE(status) << status.message();
    return buffers;
  }
  /// What the operation must bring, written by hand.
  void deliver(RankBuffers* buffers) {
    for (const Block& block : layout_.receive)
      ASSERT_TRUE(device_->upload(addressOf(buffers, block.offset), block.bytes,
                                  BytePattern::of(block.source, block.part, 5), false));
  }
  std::uint64_t wrong(RankBuffers* buffers, std::uint64_t number = 5) {
    std::uint64_t wrong = 0;
    const Status status = buffers->verify(layout_, number, &wrong);
    EXPECT_TRUE(status) << status.message();
    return wrong;
  }
  void flip(RankBuffers* buffers, std::uint64_t position) {
    const Driver* driver = device_->driver();
    std::uint8_t byte = 0;
    ASSERT_EQ(driver->cuMemcpyDtoH(&byte, addressOf(buffers, position), 1), CUDA_SUCCESS);
    byte ^= 0x40;
    ASSERT_EQ(driver->cuMemcpyHtoD(addressOf(buffers, position), &byte, 1), CUDA_SUCCESS);
  }
  static CUdeviceptr addressOf(RankBuffers* buffers, std::uint64_t position) {
    return reinterpret_cast<CUdeviceptr>(buffers->receiveBase()) + position;
  }

  std::filesystem::path folder_;
  std::string temporary_;  // TMPDIR before the test
  std::unique_ptr<RankDevice> device_;
  RankLayout layout_;
};

TEST_F(BenchBuffers, PoisonIsWrongAndWhatIsBroughtIsRight) {
  auto buffers = prepared(Operation::AllGather, {3003, false});
  EXPECT_EQ(wrong(buffers.get()), 3003u);
  deliver(buffers.get());
  EXPECT_EQ(wrong(buffers.get()), 0u);
  // In place the rank's own block is there before.
  buffers = prepared(Operation::AllGather, {3003, true});
  EXPECT_EQ(wrong(buffers.get()), 2002u);
}

TEST_F(BenchBuffers, EachPlantedByteIsCountedAndTheFirstNamed) {
  auto buffers = prepared(Operation::AlltoAllv, {3000, false});
  deliver(buffers.get());
  flip(buffers.get(), 0);
  flip(buffers.get(), 2999);
  testing::internal::CaptureStderr();
  EXPECT_EQ(wrong(buffers.get()), 2u);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("rank 1: 1 wrong bytes of 1000 from rank 0, the first at 0"),
            std::string::npos)
      << said;
}

TEST_F(BenchBuffers, AByteBehindTheEndIsFound) {
  auto buffers = prepared(Operation::Gather, {3003, false});
  deliver(buffers.get());
  flip(buffers.get(), 3003 + 17);
  testing::internal::CaptureStderr();
  EXPECT_EQ(wrong(buffers.get()), 1u);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("1 bytes written behind the receive buffer of 3003 bytes, the first 17"),
            std::string::npos)
      << said;
}

TEST_F(BenchBuffers, BytesOfAnotherOperationAreWrong) {
  auto buffers = prepared(Operation::Broadcast, {4000, true});  // rank 1 is the root: all is there
  EXPECT_EQ(wrong(buffers.get()), 0u);
  EXPECT_GT(wrong(buffers.get(), 6), 3900u);
}

TEST_F(BenchBuffers, SwappedBlocksAreWrong) {
  auto buffers = prepared(Operation::AlltoAll, {3000, false});
  for (const Block& block : layout_.receive)
    ASSERT_TRUE(device_->upload(addressOf(buffers.get(), 2000 - block.offset), block.bytes,
                                BytePattern::of(block.source, block.part, 5), false));
  // The middle block is in its place.
  EXPECT_GT(wrong(buffers.get()), 1900u);
  EXPECT_LE(wrong(buffers.get()), 2000u);
}

}  // namespace
}  // namespace hoccl::bench
