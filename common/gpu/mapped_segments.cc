#include "common/gpu/mapped_segments.h"

#include <fmt/format.h>

namespace hoccl {

bool segmentAt(const Driver* driver, CUdeviceptr address, MappedSegment* out) {
  std::size_t bytes = 0;
  // Not the attributes RANGE_START_ADDR and RANGE_SIZE: of mapped memory those tell the
  // reservation.
  if (driver->cuMemGetAddressRange(&out->base, &bytes, address) != CUDA_SUCCESS ||
      driver->cuPointerGetAttribute(&out->id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address) !=
          CUDA_SUCCESS) {
    return false;
  }
  out->bytes = bytes;
  return out->id != 0 && out->base <= address && out->end() > address;
}

Status segmentsOf(const Driver* driver, CUdeviceptr address, std::uint64_t bytes,
                  std::vector<MappedSegment>* out) {
  out->clear();
  for (CUdeviceptr at = address; at < address + bytes; at = out->back().end()) {
    MappedSegment segment;
    if (!segmentAt(driver, at, &segment) || (!out->empty() && segment.base != at)) {
      return Status::error(
          Code::InvalidArgument,
          fmt::format("{} bytes at {:#x} reach beyond what is mapped there: nothing "
                      "is at {:#x}",
                      bytes, address, at));
    }
    out->push_back(segment);
  }
  return {};
}

Status exportSegment(const Driver* driver, const MappedSegment& segment, SegmentHandle* out) {
  CUmemGenericAllocationHandle handle = 0;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(
      driver, cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(segment.base))));
  int fd = -1;
  Status exported = HOCCL_CU(driver, cuMemExportToShareableHandle(
                                         &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  out->fd.reset(exported ? fd : -1);
  // What says why not is the first error: memory with fabric handles is rare.
  if (!exported && driver->cuMemExportToShareableHandle(
                       out->fabric.data(), handle, CU_MEM_HANDLE_TYPE_FABRIC, 0) == CUDA_SUCCESS) {
    exported = {};
  }
  (void)driver->cuMemRelease(handle);
  return exported;
}

Status importSegment(const Driver* driver, SegmentHandle& segment,
                     CUmemGenericAllocationHandle* out) {
  // The driver takes a descriptor as the pointer itself.
  void* const descriptor = reinterpret_cast<void*>(static_cast<std::intptr_t>(segment.fd.get()));
  return segment.fd
             ? HOCCL_CU(driver, cuMemImportFromShareableHandle(
                                    out, descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
             : HOCCL_CU(driver, cuMemImportFromShareableHandle(out, segment.fabric.data(),
                                                               CU_MEM_HANDLE_TYPE_FABRIC));
}

}  // namespace hoccl
