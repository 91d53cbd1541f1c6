#pragma once

// Inside a child: the emulated driver, and device memory of every kind that NCCL registers.

#include <cstdint>
#include <string>
#include <vector>

#include "common/gpu/driver.h"
#include "test/emulator/hoccl_emu.h"

namespace conformance {

/// Loads the emulated driver into this process and its children, with device 0 current in this
/// thread, and switches staging on. Before the plugin's init.
class EmulatedGpu {
 public:
  /// Ends the child where something fails.
  explicit EmulatedGpu(const char* session);
  [[nodiscard]] const hoccl::Driver& driver() const { return *driver_; }
  [[nodiscard]] CUcontext context() const { return context_; }
  /// Of all processes of the session, movers included.
  [[nodiscard]] HocclEmuCounters sessionCounters() const;
  /// Of this process.
  [[nodiscard]] HocclEmuCounters counters() const;

  /// A kernel on all SMs that ends when the word at `flag` is `value` or more.
  void launchWait(CUstream stream, CUdeviceptr flag, std::uint64_t value) const;

  void* alloc(std::size_t bytes) const;
  void free(void* pointer) const;
  /// Segments of 2 MiB side by side, as PyTorch's expandable_segments have them.
  void* map(std::size_t bytes);
  void unmap(void* pointer, std::size_t bytes);
  void write(void* device, const void* host, std::size_t bytes) const;
  [[nodiscard]] std::vector<unsigned char> read(const void* device, std::size_t bytes) const;

 private:
  const hoccl::Driver* driver_ = nullptr;
  CUcontext context_ = nullptr;
  void* library_ = nullptr;
};

/// Movers that are children of this process.
std::vector<pid_t> moversOfThisProcess();

}  // namespace conformance
