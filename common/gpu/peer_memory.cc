#include "common/gpu/peer_memory.h"

#include <utility>

namespace hoccl {
namespace {

CUmemAllocationProp on(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

}  // namespace

Status PeerMemory::create(const Driver* driver, CUdevice self, CUdevice peer, std::uint64_t bytes,
                          PeerMemory* out) {
  const CUmemAllocationProp properties = on(peer);
  std::size_t grain = 0;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(
      driver,
      cuMemGetAllocationGranularity(&grain, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)));
  PeerMemory memory;
  memory.driver_ = driver;
  memory.bytes_ = (bytes + grain - 1) / grain * grain;
  HOCCL_RETURN_IF_ERROR(
      HOCCL_CU(driver, cuMemAddressReserve(&memory.address_, memory.bytes_, grain, 0, 0)));
  HOCCL_RETURN_IF_ERROR(memory.map(self, peer));
  *out = std::move(memory);
  return {};
}

Status PeerMemory::map(CUdevice self, CUdevice peer) {
  const CUmemAllocationProp properties = on(peer);
  CUmemGenericAllocationHandle handle = 0;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuMemCreate(&handle, bytes_, &properties, 0)));
  Status status = HOCCL_CU(driver_, cuMemMap(address_, bytes_, 0, handle, 0));
  driver_->cuMemRelease(handle);  // the mapping keeps it
  if (!status) return status;
  mapped_ = true;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = self;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return HOCCL_CU(driver_, cuMemSetAccess(address_, bytes_, &access, 1));
}

PeerMemory& PeerMemory::operator=(PeerMemory&& other) noexcept {
  if (this == &other) return *this;
  release();
  driver_ = other.driver_;
  address_ = std::exchange(other.address_, 0);
  bytes_ = std::exchange(other.bytes_, 0);
  mapped_ = std::exchange(other.mapped_, false);
  return *this;
}

void PeerMemory::release() {
  if (mapped_) driver_->cuMemUnmap(address_, bytes_);
  if (address_) driver_->cuMemAddressFree(address_, bytes_);
  mapped_ = false;
  address_ = 0;
}

}  // namespace hoccl
