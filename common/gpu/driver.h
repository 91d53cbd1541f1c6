#pragma once

#include <cuda.h>

#include <string>

#include "common/base/status.h"

namespace hoccl {

// cuda.h renames many functions to their versioned form (cuMemAlloc is cuMemAlloc_v2); the table
// below says name and symbol itself, so that a member's name stays the plain one.
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuDeviceGetUuid
#undef cuDevicePrimaryCtxRelease
#undef cuEventDestroy
#undef cuIpcOpenMemHandle
#undef cuMemAlloc
#undef cuMemFree
#undef cuMemGetAddressRange
#undef cuMemGetInfo
#undef cuMemHostGetDevicePointer
#undef cuMemHostRegister
#undef cuMemcpyDtoH
#undef cuMemcpyDtoHAsync
#undef cuMemcpyHtoD
#undef cuMemcpyHtoDAsync
#undef cuMemcpyDtoDAsync
#undef cuMemsetD8
#undef cuStreamBatchMemOp
#undef cuStreamDestroy
#undef cuStreamWaitValue64
#undef cuStreamWriteValue64

/// Every driver function HOCCL calls: X(member, exported symbol).
#define HOCCL_DRIVER_FUNCTIONS(X)                                         \
  X(cuInit, cuInit)                                                       \
  X(cuDriverGetVersion, cuDriverGetVersion)                               \
  X(cuGetErrorName, cuGetErrorName)                                       \
  X(cuGetErrorString, cuGetErrorString)                                   \
  X(cuDeviceGet, cuDeviceGet)                                             \
  X(cuDeviceGetCount, cuDeviceGetCount)                                   \
  X(cuDeviceGetName, cuDeviceGetName)                                     \
  X(cuDeviceGetUuid, cuDeviceGetUuid_v2)                                  \
  X(cuDeviceGetPCIBusId, cuDeviceGetPCIBusId)                             \
  X(cuDeviceGetAttribute, cuDeviceGetAttribute)                           \
  X(cuDeviceGetP2PAttribute, cuDeviceGetP2PAttribute)                     \
  X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                   \
  X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2)              \
  X(cuCtxGetCurrent, cuCtxGetCurrent)                                     \
  X(cuCtxSetCurrent, cuCtxSetCurrent)                                     \
  X(cuCtxPushCurrent, cuCtxPushCurrent_v2)                                \
  X(cuCtxPopCurrent, cuCtxPopCurrent_v2)                                  \
  X(cuCtxGetDevice, cuCtxGetDevice)                                       \
  X(cuCtxSynchronize, cuCtxSynchronize)                                   \
  X(cuMemAlloc, cuMemAlloc_v2)                                            \
  X(cuMemFree, cuMemFree_v2)                                              \
  X(cuMemGetInfo, cuMemGetInfo_v2)                                        \
  X(cuMemGetAddressRange, cuMemGetAddressRange_v2)                        \
  X(cuMemHostAlloc, cuMemHostAlloc)                                       \
  X(cuMemFreeHost, cuMemFreeHost)                                         \
  X(cuMemHostRegister, cuMemHostRegister_v2)                              \
  X(cuMemHostUnregister, cuMemHostUnregister)                             \
  X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2)              \
  X(cuPointerGetAttribute, cuPointerGetAttribute)                         \
  X(cuPointerGetAttributes, cuPointerGetAttributes)                       \
  X(cuIpcGetMemHandle, cuIpcGetMemHandle)                                 \
  X(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2)                            \
  X(cuIpcCloseMemHandle, cuIpcCloseMemHandle)                             \
  X(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle)             \
  X(cuMemExportToShareableHandle, cuMemExportToShareableHandle)           \
  X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle)       \
  X(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity)         \
  X(cuMemCreate, cuMemCreate)                                             \
  X(cuMemRelease, cuMemRelease)                                           \
  X(cuMemAddressReserve, cuMemAddressReserve)                             \
  X(cuMemAddressFree, cuMemAddressFree)                                   \
  X(cuMemMap, cuMemMap)                                                   \
  X(cuMemUnmap, cuMemUnmap)                                               \
  X(cuMemSetAccess, cuMemSetAccess)                                       \
  X(cuStreamCreate, cuStreamCreate)                                       \
  X(cuStreamDestroy, cuStreamDestroy_v2)                                  \
  X(cuStreamSynchronize, cuStreamSynchronize)                             \
  X(cuStreamQuery, cuStreamQuery)                                         \
  X(cuStreamWaitEvent, cuStreamWaitEvent)                                 \
  X(cuStreamIsCapturing, cuStreamIsCapturing)                             \
  X(cuStreamWriteValue64, cuStreamWriteValue64_v2)                        \
  X(cuStreamWaitValue64, cuStreamWaitValue64_v2)                          \
  X(cuStreamBatchMemOp, cuStreamBatchMemOp_v2)                            \
  X(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode) \
  X(cuMemcpyDtoH, cuMemcpyDtoH_v2)                                        \
  X(cuMemcpyHtoD, cuMemcpyHtoD_v2)                                        \
  X(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2)                              \
  X(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2)                              \
  X(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2)                              \
  X(cuMemsetD8, cuMemsetD8_v2)                                            \
  X(cuModuleLoadData, cuModuleLoadData)                                   \
  X(cuModuleGetFunction, cuModuleGetFunction)                             \
  X(cuModuleUnload, cuModuleUnload)                                       \
  X(cuLaunchKernel, cuLaunchKernel)                                       \
  X(cuEventCreate, cuEventCreate)                                         \
  X(cuEventRecord, cuEventRecord)                                         \
  X(cuEventSynchronize, cuEventSynchronize)                               \
  X(cuEventDestroy, cuEventDestroy_v2)

/// The CUDA driver as found at run time; one build runs with and without a GPU.
struct Driver {
#define X(member, symbol) decltype(&::symbol) member = nullptr;
  HOCCL_DRIVER_FUNCTIONS(X)
#undef X

  /// Loads libcuda.so.1 once per process and calls cuInit. Error: no driver, a symbol it lacks, or
  /// why cuInit failed. Thread-safe; the table lives until the process ends.
  static Status load(const Driver** out);

  /// An error Status naming the call, the driver's name of `result` and its text.
  [[nodiscard]] Status error(const char* call, CUresult result,
                             std::source_location where = std::source_location::current()) const;
};

/// Status of one driver call: HOCCL_CU(driver, cuMemAlloc(&p, n)).
#define HOCCL_CU(driver, call)                                                  \
  ([&]() -> ::hoccl::Status {                                                   \
    CUresult hocclResult_ = (driver)->call;                                     \
    return hocclResult_ == CUDA_SUCCESS ? ::hoccl::Status()                     \
                                        : (driver)->error(#call, hocclResult_); \
  }())

/// Returns from the enclosing function when the Status expression is an error.
#define HOCCL_RETURN_IF_ERROR(expression)        \
  do {                                           \
    ::hoccl::Status hocclStatus_ = (expression); \
    if (!hocclStatus_) return hocclStatus_;      \
  } while (false)

/// Makes `context` current for the scope and puts the caller's context back (rule 14).
class ContextGuard {
 public:
  ContextGuard(const Driver* driver, CUcontext context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  const Driver* driver_;
  bool pushed_ = false;
};

/// Whether a stream says itself to which context it belongs; not so the default, legacy and
/// per-thread streams, which are those of the current context.
inline bool namesItsContext(CUstream stream) {
  return stream != nullptr && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
}

/// Relaxes the thread's stream-capture mode for the scope (rule 14): calls that a capture on
/// another stream would forbid neither fail nor end it.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver* driver) : driver_(driver) {
    driver_->cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedCapture() { driver_->cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver* driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

/// The device's UUID as "GPU-xxxxxxxx-…", as nvidia-smi prints it.
Status deviceUuid(const Driver* driver, CUdevice device, std::string* out);
/// The device with that UUID among those visible to this process.
Status deviceByUuid(const Driver* driver, const std::string& uuid, CUdevice* out);

}  // namespace hoccl
