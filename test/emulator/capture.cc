#include "test/emulator/capture.h"

#include <atomic>
#include <mutex>
#include <utility>

#include "test/emulator/context.h"

namespace hoccl::emu {
namespace {

/// What a capture leaves: operations of a graph are not kept, so it can only be destroyed.
struct Graph {
  std::uint64_t id;
};

// Guarded by the scheduler's lock. Never destroyed, like the scheduler.
auto& captures() {
  static auto* list = new std::vector<std::shared_ptr<Capture>>;
  return *list;
}
auto& graphs() {
  static auto* list = new std::vector<std::unique_ptr<Graph>>;
  return *list;
}
std::uint64_t gNextCapture = 1;
// A call that is never legal during a capture is checked often, captures are rare.
std::atomic<int> gCaptures{0};

thread_local CUstreamCaptureMode tMode = CU_STREAM_CAPTURE_MODE_GLOBAL;

void endCapture(Capture* capture) {
  for (const auto& weak : capture->streams)
    if (const StreamPtr stream = weak.lock()) stream->capture = nullptr;
  capture->ended = true;
  std::erase_if(captures(), [&](const auto& other) { return other.get() == capture; });
  --gCaptures;
}

}  // namespace

CUresult checkUnsafeCall() {
  if (gCaptures == 0 || tMode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  std::lock_guard lock(Scheduler::get().lock());
  for (const auto& capture : captures()) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool forbidden = (own && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) ||
                           (!own && tMode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                            capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    if (!forbidden) continue;
    capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return CUDA_SUCCESS;
}

CUresult checkNotCapturing(const StreamPtr& stream) {
  if (gCaptures == 0) return CUDA_SUCCESS;
  std::lock_guard lock(Scheduler::get().lock());
  if (stream->capture != nullptr) {
    stream->capture->invalidated = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return checkLegacy(stream, true);
}

CUresult checkSubmission(const StreamPtr& stream, bool* drop) {
  if (gCaptures == 0) return CUDA_SUCCESS;
  if (stream->capture != nullptr) {
    *drop = true;
    return stream->capture->invalidated ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  }
  return checkLegacy(stream, true);
}

CUresult checkLegacy(const StreamPtr& stream, bool invalidate) {
  if (!stream->isLegacy()) return CUDA_SUCCESS;
  // The legacy stream would have to wait for the captured one, which does not run.
  for (const auto& capture : captures()) {
    if (capture->context != stream->context || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
      continue;
    for (const auto& weak : capture->streams) {
      const StreamPtr captured = weak.lock();
      if (captured == nullptr || !captured->isBlocking()) continue;
      if (invalidate) capture->invalidated = true;
      return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
  }
  return CUDA_SUCCESS;
}

void joinCapture(const std::shared_ptr<Capture>& capture, const StreamPtr& stream) {
  stream->capture = capture;
  capture->streams.push_back(stream);
}

}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return driverCall([&]() -> CUresult {
    if (mode == nullptr || *mode < 0 || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
      return CUDA_ERROR_INVALID_VALUE;
    std::swap(*mode, tMode);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  return streamCall(handle, [&](Context& context, const StreamPtr& stream) -> CUresult {
    if (mode < 0 || mode > CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (stream->isLegacy()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    std::lock_guard lock(Scheduler::get().lock());
    if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->mode = mode;
    capture->id = gNextCapture++;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream;
    capture->context = &context;
    joinCapture(capture, stream);
    captures().push_back(std::move(capture));
    ++gCaptures;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *graph = nullptr;
    std::lock_guard lock(Scheduler::get().lock());
    const std::shared_ptr<Capture> capture = stream->capture;
    if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin.lock() != stream) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
        capture->thread != std::this_thread::get_id())
      return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    endCapture(capture.get());
    if (capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    graphs().push_back(std::make_unique<Graph>(Graph{capture->id}));
    *graph = reinterpret_cast<CUgraph>(graphs().back().get());
    return CUDA_SUCCESS;
  });
}

CUresult cuGraphDestroy(CUgraph graph) {
  return driverCall([&]() -> CUresult {
    std::lock_guard lock(Scheduler::get().lock());
    const std::size_t erased = std::erase_if(
        graphs(), [&](const auto& g) { return reinterpret_cast<CUgraph>(g.get()) == graph; });
    return erased != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies,
                                   const CUgraphEdgeData** edges, size_t* count) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (status == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(Scheduler::get().lock());
    if (const CUresult allowed = checkLegacy(stream, false); allowed != CUDA_SUCCESS)
      return allowed;
    *status = stream->capture == nullptr     ? CU_STREAM_CAPTURE_STATUS_NONE
              : stream->capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                             : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id != nullptr && stream->capture != nullptr) *id = stream->capture->id;
    if (graph != nullptr) *graph = nullptr;
    if (dependencies != nullptr) *dependencies = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** dependencies,
                                   size_t* count) {
  return cuStreamGetCaptureInfo_v3(handle, status, id, graph, dependencies, nullptr, count);
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  return cuStreamGetCaptureInfo_v3(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

}  // extern "C"
