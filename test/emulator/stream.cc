#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "test/emulator/capture.h"
#include "test/emulator/context.h"
#include "test/emulator/engine.h"

namespace hoccl::emu {
namespace {

constexpr int kLeastPriority = 0, kGreatestPriority = -5;

std::shared_mutex gMutex;
// Never destroyed: other threads may still use streams while the process ends.
auto& table() {
  static auto* streams = new std::unordered_map<CUstream, StreamPtr>;
  return *streams;
}
std::atomic<std::uint64_t> gNextStreamId{1};

StreamPtr makeStream(Context& context, unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>();
  stream->context = &context;
  stream->flags = flags;
  stream->priority = std::clamp(priority, kGreatestPriority, kLeastPriority);
  stream->id = gNextStreamId.fetch_add(1);
  return stream;
}

StreamPtr perThreadStream(Context& context) {
  std::lock_guard lock(context.mutex);
  StreamPtr& stream = context.perThread[std::this_thread::get_id()];
  if (stream == nullptr) stream = makeStream(context, CU_STREAM_DEFAULT, 0);
  return stream;
}

}  // namespace

StreamPtr streamFrom(CUstream handle, Context& current) {
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return current.legacy;
  if (handle == CU_STREAM_PER_THREAD) return perThreadStream(current);
  std::shared_lock lock(gMutex);
  auto found = table().find(handle);
  return found == table().end() ? nullptr : found->second;
}

void dropStreamsOf(Context* context) {
  std::unique_lock lock(gMutex);
  std::erase_if(table(), [&](const auto& entry) { return entry.second->context == context; });
}

}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuStreamCreateWithPriority(CUstream* out, unsigned int flags, int priority) {
  return contextCall([&](Context& context) -> CUresult {
    if (out == nullptr || (flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) != 0)
      return CUDA_ERROR_INVALID_VALUE;
    StreamPtr stream = makeStream(context, flags, priority);
    *out = reinterpret_cast<CUstream>(stream.get());
    std::unique_lock lock(gMutex);
    table().emplace(*out, std::move(stream));
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamCreate(CUstream* out, unsigned int flags) {
  return cuStreamCreateWithPriority(out, flags, 0);
}

/// Work still queued runs to its end, as with the real driver.
CUresult cuStreamDestroy_v2(CUstream handle) {
  return contextCall([&](Context&) -> CUresult {
    std::unique_lock lock(gMutex);
    return table().erase(handle) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (const CUresult allowed = checkNotCapturing(stream); allowed != CUDA_SUCCESS) return allowed;
    Scheduler::get().wait(stream);
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamQuery(CUstream handle) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (const CUresult allowed = checkNotCapturing(stream); allowed != CUDA_SUCCESS) return allowed;
    return Scheduler::get().idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* out) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *out = stream->context->handle();
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice* out) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *out = stream->context->ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetFlags(CUstream handle, unsigned int* flags) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetPriority(CUstream handle, int* priority) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (priority == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
  });
}

CUresult cuStreamGetId(CUstream handle, unsigned long long* id) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (id == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *id = stream->id;
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
