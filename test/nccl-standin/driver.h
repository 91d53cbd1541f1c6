#pragma once

#include <cstddef>
#include <cstdint>

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

  /// For a scope: the context is current and calls are allowed that a capture elsewhere forbids, as
  /// inside NCCL. Nothing where the context is null.
  class Scope {
   public:
    explicit Scope(void* context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    bool pushed_ = false;
    int captureMode_;
  };

  // All below need a Scope, whose context they use, and none waits for the device.
  bool isDevicePointer(const void* pointer) const;
  bool isCapturing(void* stream) const;
  /// Between memory that `pin` has seen and device memory, in the order of the stream.
  Outcome copyToHost(void* stream, void* to, const void* from, std::size_t bytes) const;
  Outcome copyToDevice(void* stream, void* to, const void* from, std::size_t bytes) const;
  /// On pinned memory, in the order of the stream: writes a value, waits for one at least as large.
  Outcome write(void* stream, std::uint64_t* word, std::uint64_t value) const;
  Outcome await(void* stream, std::uint64_t* word, std::uint64_t value) const;
  Outcome pin(void* memory, std::size_t bytes) const;
  bool unpin(void* memory) const;
  /// Device memory; null where there is none.
  void* allocate(std::size_t bytes) const;
  /// Needs no Scope.
  bool release(void* pointer) const;

 private:
  Driver();
  struct Functions;
  const Functions* functions_;
};

}  // namespace standin
