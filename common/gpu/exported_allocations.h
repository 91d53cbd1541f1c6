#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "common/gpu/driver.h"

namespace hoccl {

/// The allocations of this process that movers may have mapped, by address: what a free has to look
/// up without a CUDA call (rule 1). An allocation enters when its handle is first exported, and
/// leaves when it is freed or another one lies where it was. Any thread; never destroyed, since
/// memory is freed while the process ends, too.
class ExportedAllocations {
 public:
  static ExportedAllocations& ofThisProcess();

  void add(CUdeviceptr base, std::size_t bytes, std::uint64_t id);
  /// Takes out what begins in [address, address + bytes), or exactly at `address` if `bytes` is 0,
  /// and returns the identities.
  std::vector<std::uint64_t> take(CUdeviceptr address, std::size_t bytes);
  [[nodiscard]] std::size_t size() const;

 private:
  struct Allocation {
    std::size_t bytes;
    std::uint64_t id;
  };
  mutable std::mutex mutex_;  ///< taken with the first use of an allocation and with its free only
  std::map<CUdeviceptr, Allocation> byBase_;
};

}  // namespace hoccl
