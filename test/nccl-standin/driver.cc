#include "driver.h"

#include <cuda.h>
#include <dlfcn.h>
#include <fmt/format.h>

namespace standin {
namespace {

std::uintptr_t number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

Outcome outcomeOf(CUresult result, const char* function) {
  if (result == CUDA_SUCCESS) return {};
  return Outcome::error(ncclUnhandledCudaError,
                        fmt::format("{}: error {}", function, static_cast<int>(result)));
}

}  // namespace

#define STANDIN_TEXT_OF(name) #name
// Expands cuda.h's renaming first: cuMemAlloc becomes "cuMemAlloc_v2".
#define STANDIN_SYMBOL(name) STANDIN_TEXT_OF(name)
#define STANDIN_DRIVER_FUNCTIONS(X)                 \
  X(ctxGetCurrent, cuCtxGetCurrent)                 \
  X(ctxGetDevice, cuCtxGetDevice)                   \
  X(ctxPush, cuCtxPushCurrent)                      \
  X(ctxPop, cuCtxPopCurrent)                        \
  X(primaryRetain, cuDevicePrimaryCtxRetain)        \
  X(captureMode, cuThreadExchangeStreamCaptureMode) \
  X(pointerAttributes, cuPointerGetAttributes)      \
  X(streamIsCapturing, cuStreamIsCapturing)         \
  X(toHost, cuMemcpyDtoHAsync)                      \
  X(toDevice, cuMemcpyHtoDAsync)                    \
  X(writeValue, cuStreamWriteValue64)               \
  X(waitValue, cuStreamWaitValue64)                 \
  X(hostRegister, cuMemHostRegister)                \
  X(hostUnregister, cuMemHostUnregister)            \
  X(memAlloc, cuMemAlloc)                           \
  X(memFree, cuMemFree)

struct Driver::Functions {
#define X(member, name) decltype(&name) member = nullptr;
  STANDIN_DRIVER_FUNCTIONS(X)
#undef X
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

Driver::Scope::Scope(void* context) : captureMode_(CU_STREAM_CAPTURE_MODE_RELAXED) {
  if (!context) return;
  const Functions& functions = *Driver::get().functions_;
  pushed_ = functions.ctxPush(static_cast<CUcontext>(context)) == CUDA_SUCCESS;
  if (!pushed_) return;
  auto mode = static_cast<CUstreamCaptureMode>(captureMode_);
  functions.captureMode(&mode);
  captureMode_ = mode;
}

Driver::Scope::~Scope() {
  if (!pushed_) return;
  const Functions& functions = *Driver::get().functions_;
  auto mode = static_cast<CUstreamCaptureMode>(captureMode_);
  functions.captureMode(&mode);
  CUcontext popped;
  functions.ctxPop(&popped);
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

bool Driver::isDevicePointer(const void* pointer) const {
  unsigned int type = 0;
  CUpointer_attribute attribute = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
  void* result = &type;
  return functions_->pointerAttributes(1, &attribute, &result, number(pointer)) == CUDA_SUCCESS &&
         type == CU_MEMORYTYPE_DEVICE;
}

bool Driver::isCapturing(void* stream) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  return functions_->streamIsCapturing(static_cast<CUstream>(stream), &status) == CUDA_SUCCESS &&
         status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

Outcome Driver::copyToHost(void* stream, void* to, const void* from, std::size_t bytes) const {
  return outcomeOf(functions_->toHost(to, number(from), bytes, static_cast<CUstream>(stream)),
                   "cuMemcpyDtoHAsync");
}

Outcome Driver::copyToDevice(void* stream, void* to, const void* from, std::size_t bytes) const {
  return outcomeOf(functions_->toDevice(number(to), from, bytes, static_cast<CUstream>(stream)),
                   "cuMemcpyHtoDAsync");
}

Outcome Driver::write(void* stream, std::uint64_t* word, std::uint64_t value) const {
  return outcomeOf(functions_->writeValue(static_cast<CUstream>(stream), number(word), value,
                                          CU_STREAM_WRITE_VALUE_DEFAULT),
                   "cuStreamWriteValue64");
}

Outcome Driver::await(void* stream, std::uint64_t* word, std::uint64_t value) const {
  return outcomeOf(functions_->waitValue(static_cast<CUstream>(stream), number(word), value,
                                         CU_STREAM_WAIT_VALUE_GEQ),
                   "cuStreamWaitValue64");
}

Outcome Driver::pin(void* memory, std::size_t bytes) const {
  return outcomeOf(functions_->hostRegister(memory, bytes, CU_MEMHOSTREGISTER_PORTABLE),
                   "cuMemHostRegister");
}

bool Driver::unpin(void* memory) const {
  return functions_->hostUnregister(memory) == CUDA_SUCCESS;
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
