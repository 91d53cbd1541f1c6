#include <cuda.h>

#include <cstdint>
#include <cstring>

#include "test/emulator/context.h"
#include "test/emulator/memory.h"

namespace hoccl::emu {
namespace {

/// Bytes of an attribute's value; 0 for one the emulator does not know.
std::size_t sizeOf(CUpointer_attribute attribute) {
  switch (static_cast<int>(attribute)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      return 8;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      return 4;
    // Documented as booleans of different width over time; four bytes, as the driver writes them.
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      return 4;
    default:
      return 0;
  }
}

/// False where the attribute does not apply to the pointer.
bool valueOf(CUpointer_attribute attribute, const Region& region, std::uintptr_t pointer,
             std::uint64_t* out) {
  switch (static_cast<int>(attribute)) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *out = reinterpret_cast<std::uintptr_t>(region.context->handle());
      return true;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *out = region.isDevice() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *out = pointer;
      return true;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      *out = pointer;
      return !region.isDevice() || region.kind == RegionKind::Managed;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
      *out = region.syncMemops ? 1 : 0;
      return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
      *out = region.id;
      return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *out = static_cast<std::uint64_t>(region.ordinal);
      return true;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *out = region.kind == RegionKind::Device ? 1 : 0;
      return true;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:  // of mapped memory: the whole reservation
      *out = region.kind == RegionKind::Mapped ? reservationOf(region.base).base : region.base;
      return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *out = region.kind == RegionKind::Mapped ? reservationOf(region.base).bytes : region.size;
      return true;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      *out = region.base;
      return true;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      *out = region.size;
      return true;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *out = 1;
      return true;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
      *out = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE;
      return true;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *out = region.kind == RegionKind::Managed ? 1 : 0;
      return true;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
      *out = region.pool;
      return true;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      *out = region.backing != nullptr ? region.backing->handleTypes : 0;
      return true;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
      *out = region.backing != nullptr && region.backing->rdmaCapable ? 1 : 0;
      return true;
    default:
      *out = 0;
      return true;
  }
}

void store(void* out, std::uint64_t value, std::size_t size) {
  const auto narrow = static_cast<std::uint32_t>(value);
  std::memcpy(out, size == 8 ? static_cast<const void*>(&value) : &narrow, size);
}

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr pointer) {
  return driverCall([&]() -> CUresult {
    const std::size_t size = sizeOf(attribute);
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (size == 0) return CUDA_ERROR_NOT_SUPPORTED;
    const auto region = regions::find(pointer);
    std::uint64_t value = 0;
    if (region == nullptr || !valueOf(attribute, *region, pointer, &value))
      return CUDA_ERROR_INVALID_VALUE;
    store(out, value, size);
    return CUDA_SUCCESS;
  });
}

/// Zeros instead of an error for a pointer, or a combination, that has no value.
CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute* attributes, void** out,
                                CUdeviceptr pointer) {
  return driverCall([&]() -> CUresult {
    if (count == 0 || attributes == nullptr || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const auto region = regions::find(pointer);
    for (unsigned i = 0; i < count; ++i) {
      const std::size_t size = sizeOf(attributes[i]);
      if (size == 0) return CUDA_ERROR_NOT_SUPPORTED;
      std::uint64_t value = 0;
      if (region == nullptr || !valueOf(attributes[i], *region, pointer, &value)) value = 0;
      store(out[i], value, size);
    }
    return CUDA_SUCCESS;
  });
}

CUresult cuPointerSetAttribute(const void* value, CUpointer_attribute attribute,
                               CUdeviceptr pointer) {
  return driverCall([&]() -> CUresult {
    if (value == nullptr || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
      return CUDA_ERROR_INVALID_VALUE;
    const auto region = regions::find(pointer);
    if (region == nullptr || !region->isDevice()) return CUDA_ERROR_INVALID_VALUE;
    unsigned flag = 0;
    std::memcpy(&flag, value, sizeof flag);
    region->syncMemops = flag != 0;
    return CUDA_SUCCESS;
  });
}

}  // extern "C"
