#pragma once

#include <cstddef>
#include <vector>

#include "link.h"
#include "outcome.h"

namespace standin {

/// The CUDA driver as far as the stand-in needs it, found in libcuda.so.1 at run time. Without it,
/// or in a thread without a context, every pointer is taken for host memory.
class Driver {
 public:
  static const Driver& get();

  /// The calling thread's context and device; null and 0 without a driver or context.
  void* currentContext() const;
  int currentDevice() const;
  /// The primary context of a device, retained for ever; null without a driver.
  void* primaryContext(int device) const;

  bool isDevicePointer(void* context, const void* pointer) const;
  bool isCapturing(void* context, void* stream) const;
  /// Waits until all work on the stream is done.
  Outcome waitIdle(void* context, void* stream, const Bound& bound) const;
  Outcome copyToHost(void* context, void* stream, void* to, const void* from, std::size_t bytes,
                     const Bound& bound) const;
  Outcome copyToDevice(void* context, void* stream, void* to, const void* from, std::size_t bytes,
                       const Bound& bound) const;
  /// Device memory of the current context; null where there is none.
  void* allocate(std::size_t bytes) const;
  bool release(void* pointer) const;

 private:
  Driver();
  struct Functions;
  const Functions* functions_;
};

}  // namespace standin
