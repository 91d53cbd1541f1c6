#include "common/gpu/host_registration.h"

#include <fmt/format.h>

#include <utility>

namespace hoccl {

HostRegistration& HostRegistration::operator=(HostRegistration&& other) noexcept {
  if (this != &other) {
    reset();
    driver_ = std::exchange(other.driver_, nullptr);
    base_ = std::exchange(other.base_, nullptr);
    device_ = std::exchange(other.device_, 0);
  }
  return *this;
}

Status HostRegistration::create(const Driver* driver, void* base, std::size_t bytes,
                                HostRegistration* out) {
  constexpr unsigned kFlags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  if (Status status = HOCCL_CU(driver, cuMemHostRegister(base, bytes, kFlags)); !status) {
    return status.inContext(
        fmt::format("cannot pin {} bytes of staging memory (a memory limit of the container or a "
                    "small RLIMIT_MEMLOCK is the usual cause; HOCCL_SLOTS and HOCCL_SLOT_BYTES make "
                    "it smaller)",
                    bytes));
  }
  HostRegistration registration;
  registration.driver_ = driver;
  registration.base_ = static_cast<std::byte*>(base);
  HOCCL_RETURN_IF_ERROR(
      HOCCL_CU(driver, cuMemHostGetDevicePointer(&registration.device_, base, 0)));
  *out = std::move(registration);
  return {};
}

void HostRegistration::reset() {
  if (base_) driver_->cuMemHostUnregister(base_);
  base_ = nullptr;
}

}  // namespace hoccl
