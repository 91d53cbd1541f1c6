#pragma once

#include <cstddef>

#include "common/base/flag.h"
#include "common/gpu/driver.h"

namespace hoccl {

/// Host memory registered with CUDA for the current context: copy engines may read and write it, and
/// streams may write and wait on flags in it. Unregisters when destroyed.
class HostRegistration {
 public:
  HostRegistration() = default;
  ~HostRegistration() { reset(); }
  HostRegistration(HostRegistration&& other) noexcept { *this = std::move(other); }
  HostRegistration& operator=(HostRegistration&& other) noexcept;
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;

  static Status create(const Driver* driver, void* base, std::size_t bytes, HostRegistration* out);
  void reset();

  /// Address by which streams reach `pointer`, which lies in the region.
  [[nodiscard]] CUdeviceptr deviceAddress(const void* pointer) const {
    return device_ + static_cast<CUdeviceptr>(static_cast<const std::byte*>(pointer) - base_);
  }
  [[nodiscard]] CUdeviceptr deviceAddress(const Flag& flag) const {
    return deviceAddress(static_cast<const void*>(&flag.value));
  }

 private:
  const Driver* driver_ = nullptr;
  std::byte* base_ = nullptr;
  CUdeviceptr device_ = 0;
};

}  // namespace hoccl
