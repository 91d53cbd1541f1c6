#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "test/emulator/engine.h"

namespace hoccl::emu {

/// A stream capture under way: what is submitted to its streams is accepted and never runs. Guarded
/// by the scheduler's lock.
struct Capture {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::uint64_t id = 0;
  std::thread::id thread;
  bool invalidated = false;
  bool ended = false;
  std::weak_ptr<Stream> origin;
  std::vector<std::weak_ptr<Stream>> streams;  ///< origin and those that joined by events
  Context* context = nullptr;
};

/// CUDA_SUCCESS, or why the calling thread may not make a potentially unsafe call (allocation,
/// event query, …) while captures are under way.
CUresult checkUnsafeCall();
/// The stream is being captured: a call that waits for or asks about it ends the capture in error.
CUresult checkNotCapturing(const StreamPtr& stream);
/// For a submission; call with the scheduler's lock held. `*drop`: the stream is being captured.
CUresult checkSubmission(const StreamPtr& stream, bool* drop);
/// The legacy stream cannot be used while a blocking stream of its context is being captured; with
/// `invalidate` the attempt ends that capture in error. Call with the scheduler's lock held.
CUresult checkLegacy(const StreamPtr& stream, bool invalidate);
/// Adds the stream to the capture; call with the scheduler's lock held.
void joinCapture(const std::shared_ptr<Capture>& capture, const StreamPtr& stream);

}  // namespace hoccl::emu
