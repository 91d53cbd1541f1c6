#include "driver.h"

#include <cuda.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

namespace standin {
namespace {

constexpr useconds_t kPollPauseUs = 20;

std::uintptr_t number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

#define STANDIN_TEXT_OF(name) #name
// Expands cuda.h's renaming first: cuMemAlloc becomes "cuMemAlloc_v2".
#define STANDIN_SYMBOL(name) STANDIN_TEXT_OF(name)
#define STANDIN_DRIVER_FUNCTIONS(X)            \
  X(ctxGetCurrent, cuCtxGetCurrent)            \
  X(ctxGetDevice, cuCtxGetDevice)              \
  X(ctxPush, cuCtxPushCurrent)                 \
  X(ctxPop, cuCtxPopCurrent)                   \
  X(primaryRetain, cuDevicePrimaryCtxRetain)   \
  X(pointerAttributes, cuPointerGetAttributes) \
  X(streamQuery, cuStreamQuery)                \
  X(streamIsCapturing, cuStreamIsCapturing)    \
  X(toHost, cuMemcpyDtoHAsync)                 \
  X(toDevice, cuMemcpyHtoDAsync)               \
  X(memAlloc, cuMemAlloc)                      \
  X(memFree, cuMemFree)

struct Driver::Functions {
#define X(member, name) decltype(&name) member = nullptr;
  STANDIN_DRIVER_FUNCTIONS(X)
#undef X

  /// A context made current for a scope.
  class Current {
   public:
    Current(const Functions& functions, void* context) : functions_(functions) {
      pushed_ = functions.ctxPush(static_cast<CUcontext>(context)) == CUDA_SUCCESS;
    }
    ~Current() {
      CUcontext popped;
      if (pushed_) functions_.ctxPop(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const Functions& functions_;
    bool pushed_;
  };
};

Driver::Driver() : functions_(nullptr) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (!library) return;
  static Functions functions;
  bool all = true;
#define X(member, name)                                                                   \
  functions.member =                                                                      \
      reinterpret_cast<decltype(functions.member)>(dlsym(library, STANDIN_SYMBOL(name))); \
  all = all && functions.member;
  STANDIN_DRIVER_FUNCTIONS(X)
#undef X
  if (all) functions_ = &functions;
}

const Driver& Driver::get() {
  static const Driver* const driver = new Driver;
  return *driver;
}

void* Driver::currentContext() const {
  CUcontext context = nullptr;
  if (!functions_ || functions_->ctxGetCurrent(&context) != CUDA_SUCCESS) return nullptr;
  return context;
}

int Driver::currentDevice() const {
  CUdevice device = 0;
  if (!currentContext() || functions_->ctxGetDevice(&device) != CUDA_SUCCESS) return 0;
  return device;
}

void* Driver::primaryContext(int device) const {
  CUcontext context = nullptr;
  if (!functions_ || functions_->primaryRetain(&context, device) != CUDA_SUCCESS) return nullptr;
  return context;
}

bool Driver::isDevicePointer(void* context, const void* pointer) const {
  if (!context) return false;
  const Functions::Current current(*functions_, context);
  unsigned int type = 0;
  CUpointer_attribute attribute = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
  void* result = &type;
  return functions_->pointerAttributes(1, &attribute, &result, number(pointer)) == CUDA_SUCCESS &&
         type == CU_MEMORYTYPE_DEVICE;
}

bool Driver::isCapturing(void* context, void* stream) const {
  if (!context) return false;
  const Functions::Current current(*functions_, context);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return functions_->streamIsCapturing(static_cast<CUstream>(stream), &status) == CUDA_SUCCESS &&
         status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

Outcome Driver::waitIdle(void* context, void* stream, const Bound& bound) const {
  if (!context) return {};
  const Functions::Current current(*functions_, context);
  while (true) {
    const CUresult result = functions_->streamQuery(static_cast<CUstream>(stream));
    if (result == CUDA_SUCCESS) return {};
    if (result != CUDA_ERROR_NOT_READY) {
      return Outcome::error(ncclUnhandledCudaError,
                            fmt::format("cuStreamQuery: error {}", static_cast<int>(result)));
    }
    if (Outcome over = bound.check(fmt::format("stream {} to become idle", fmt::ptr(stream)));
        !over) {
      return over;
    }
    usleep(kPollPauseUs);
  }
}

Outcome Driver::copyToHost(void* context, void* stream, void* to, const void* from,
                           std::size_t bytes, const Bound& bound) const {
  {
    const Functions::Current current(*functions_, context);
    const CUresult result =
        functions_->toHost(to, number(from), bytes, static_cast<CUstream>(stream));
    if (result != CUDA_SUCCESS) {
      return Outcome::error(ncclUnhandledCudaError,
                            fmt::format("cuMemcpyDtoHAsync: error {}", static_cast<int>(result)));
    }
  }
  return waitIdle(context, stream, bound);
}

Outcome Driver::copyToDevice(void* context, void* stream, void* to, const void* from,
                             std::size_t bytes, const Bound& bound) const {
  {
    const Functions::Current current(*functions_, context);
    const CUresult result =
        functions_->toDevice(number(to), from, bytes, static_cast<CUstream>(stream));
    if (result != CUDA_SUCCESS) {
      return Outcome::error(ncclUnhandledCudaError,
                            fmt::format("cuMemcpyHtoDAsync: error {}", static_cast<int>(result)));
    }
  }
  return waitIdle(context, stream, bound);
}

void* Driver::allocate(std::size_t bytes) const {
  CUdeviceptr pointer = 0;
  if (!currentContext() || functions_->memAlloc(&pointer, bytes) != CUDA_SUCCESS) return nullptr;
  return reinterpret_cast<void*>(pointer);
}

bool Driver::release(void* pointer) const {
  return functions_ && functions_->memFree(number(pointer)) == CUDA_SUCCESS;
}

}  // namespace standin
