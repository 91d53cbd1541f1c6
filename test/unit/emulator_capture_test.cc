// Stream capture in the emulated driver.

#include <cstdint>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

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

}  // namespace
}  // namespace hoccl::emu_test
