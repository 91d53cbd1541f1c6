#include "test/emulator/context.h"

#include <cuda.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <string>
#include <vector>

#include "test/emulator/capture.h"
#include "test/emulator/engine.h"
#include "test/emulator/memory.h"
#include "test/emulator/session.h"
#include "test/emulator/settings.h"

namespace hoccl::emu {
namespace {

std::atomic<bool> gInitialised{false};
std::atomic<bool> gForked{false};
std::mutex gInitMutex;
Context* gContexts = nullptr;

// Plain data, so that a thread's end needs no destructor of this library.
constexpr int kMaxDepth = 32;
struct ContextStack {
  Context* items[kMaxDepth];
  int depth;
};
thread_local ContextStack tStack;

CUresult initialise() {
  std::lock_guard lock(gInitMutex);
  if (gForked) return CUDA_ERROR_NOT_INITIALIZED;
  if (gInitialised) return CUDA_SUCCESS;
  Settings values;
  std::string error;
  if (!loadSettings(&values, &error)) {
    std::fprintf(stderr, "emucuda: %s\n", error.c_str());
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (values.visible.empty()) return CUDA_ERROR_NO_DEVICE;
  setSettings(values);
  if (!session::open(&error)) {
    std::fprintf(stderr, "emucuda: %s\n", error.c_str());
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  gContexts = new Context[values.visible.size()];
  for (std::size_t i = 0; i < values.visible.size(); ++i) {
    gContexts[i].ordinal = static_cast<int>(i);
    gContexts[i].physical = values.visible[i];
  }
  pthread_atfork(nullptr, nullptr, [] { gForked = true; });
  gInitialised = true;
  return CUDA_SUCCESS;
}

}  // namespace

Context::Context() = default;
Context::~Context() = default;

bool initialised() { return gInitialised.load() && !gForked.load(); }

int deviceCount() { return static_cast<int>(settings().visible.size()); }

Context* contextOf(int ordinal) {
  return ordinal >= 0 && ordinal < deviceCount() ? &gContexts[ordinal] : nullptr;
}

Context* contextFrom(CUcontext handle) {
  for (int i = 0; i < deviceCount(); ++i) {
    if (gContexts[i].handle() != handle) continue;
    return gContexts[i].retained > 0 ? &gContexts[i] : nullptr;
  }
  return nullptr;
}

Context* currentContext() { return tStack.depth > 0 ? tStack.items[tStack.depth - 1] : nullptr; }

bool peerEnabled(int from, int to) {
  Context& context = gContexts[from];
  std::lock_guard lock(context.mutex);
  return context.peers.count(to) != 0;
}

}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuInit(unsigned int flags) {
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  try {
    return initialise();
  } catch (...) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  return driverCall([&]() -> CUresult {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Context* context = contextOf(device);
    if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard lock(context->mutex);
    const int mode = settings().computeMode;
    if (mode == CU_COMPUTEMODE_PROHIBITED) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (context->retained == 0 && mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS &&
        !session::takeDevice(context->physical))
      return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (context->legacy == nullptr) {
      context->legacy = std::make_shared<Stream>();
      context->legacy->context = context;
      context->channels = std::make_unique<ChannelSet>(settings().connections);
    }
    ++context->retained;
    *out = context->handle();
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return driverCall([&]() -> CUresult {
    Context* context = contextOf(device);
    if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    {
      std::lock_guard lock(context->mutex);
      if (context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
      if (context->retained > 1) {
        --context->retained;
        return CUDA_SUCCESS;
      }
    }
    // The last release destroys what the context holds, once its work is done.
    Scheduler::get().whileQuiet(context, [&] {
      std::lock_guard lock(context->mutex);
      context->retained = 0;
      context->peers.clear();
      context->perThread.clear();
    });
    dropStreamsOf(context);
    regions::removeAllOf(context);
    if (settings().computeMode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS)
      session::leaveDevice(context->physical);
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int* flags, int* active) {
  return driverCall([&]() -> CUresult {
    if (flags == nullptr || active == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Context* context = contextOf(device);
    if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard lock(context->mutex);
    *flags = context->flags;
    *active = context->retained > 0 ? 1 : 0;
    return CUDA_SUCCESS;
  });
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) {
  return driverCall([&]() -> CUresult {
    Context* context = contextOf(device);
    if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    std::lock_guard lock(context->mutex);
    context->flags = flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetCurrent(CUcontext* out) {
  return driverCall([&]() -> CUresult {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Context* context = currentContext();
    *out = context == nullptr ? nullptr : context->handle();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSetCurrent(CUcontext handle) {
  return driverCall([&]() -> CUresult {
    if (handle == nullptr) {
      if (tStack.depth > 0) --tStack.depth;
      return CUDA_SUCCESS;
    }
    Context* context = contextFrom(handle);
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (tStack.depth == 0) tStack.depth = 1;
    tStack.items[tStack.depth - 1] = context;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext handle) {
  return driverCall([&]() -> CUresult {
    Context* context = contextFrom(handle);
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (tStack.depth == kMaxDepth) return CUDA_ERROR_OUT_OF_MEMORY;
    tStack.items[tStack.depth++] = context;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* out) {
  return contextCall([&](Context& context) -> CUresult {
    --tStack.depth;
    if (out != nullptr) *out = context.handle();
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetDevice(CUdevice* out) {
  return contextCall([&](Context& context) -> CUresult {
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *out = context.ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetFlags(unsigned int* flags) {
  return contextCall([&](Context& context) -> CUresult {
    if (flags == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(context.mutex);
    *flags = context.flags;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return contextCall([&](Context&) -> CUresult {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxSynchronize(void) {
  return contextCall([&](Context& context) -> CUresult {
    if (const CUresult allowed = checkUnsafeCall(); allowed != CUDA_SUCCESS) return allowed;
    Scheduler::get().wait(&context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned int flags) {
  return contextCall([&](Context& context) -> CUresult {
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    Context* peer = contextFrom(handle);
    if (peer == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (peer->physical == context.physical) return CUDA_ERROR_INVALID_DEVICE;
    if (!reachEachOther(peer->physical, context.physical)) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    std::lock_guard lock(context.mutex);
    return context.peers.insert(peer->ordinal).second ? CUDA_SUCCESS
                                                      : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  });
}

CUresult cuCtxDisablePeerAccess(CUcontext handle) {
  return contextCall([&](Context& context) -> CUresult {
    Context* peer = contextFrom(handle);
    if (peer == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    std::lock_guard lock(context.mutex);
    return context.peers.erase(peer->ordinal) != 0 ? CUDA_SUCCESS
                                                   : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
  });
}

}  // extern "C"
