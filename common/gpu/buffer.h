#pragma once

#include <cstdint>

#include "common/gpu/driver.h"

namespace hoccl {

/// The allocation a device pointer lies in, in the form another process can map.
struct ExportedBuffer {
  /// It is one of virtual memory management: it has no handle, and the buffer may reach over several
  /// (mapped_segments.h). Only `allocationId`, that of the first one, is set.
  bool segments = false;
  std::uint64_t allocationId = 0;  ///< CU_POINTER_ATTRIBUTE_BUFFER_ID
  CUdeviceptr base = 0;
  std::uint64_t allocationBytes = 0;
  std::uint64_t offset = 0;  ///< of the pointer from `base`
  const CUipcMemHandle* handle = nullptr;  ///< good until the thread's next exportBuffer
};

/// Memory that cannot be exported to the mover.
struct ForeignMemory {
  bool known = false;  ///< to CUDA: the copy engines can reach it
  bool host = false;   ///< it lies in host memory
  bool segments = false;  ///< virtual memory management (cuMemCreate, cuMemMap)
  const char* name = "memory CUDA does not know";  ///< for a person
};
ForeignMemory foreignMemory(const Driver* driver, const void* pointer);
/// The error of a buffer that cannot be mapped.
Status cannotBeMapped(const Driver* driver, const void* pointer);

/// Classifies `pointer` by its memory type and exports its allocation. The export handle is kept per
/// thread by allocation identity, so that a buffer seen before costs one attribute query. Errors:
/// Unsupported for memory that is no device memory or cannot be exported (pools, managed),
/// InvalidArgument where it is shorter than `bytes` from the pointer on; each names what it is.
/// `context` is made current where the driver needs one. Never blocks; safe inside an NCCL call.
Status exportBuffer(const Driver* driver, CUcontext context, const void* pointer,
                    std::uint64_t bytes, ExportedBuffer* out);

}  // namespace hoccl
