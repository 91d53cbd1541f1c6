#pragma once

#include <cstddef>

#include "common/base/fd.h"
#include "common/base/status.h"

namespace hoccl {

/// Memory shared between processes: a memfd of fixed size, mapped readable and writable. It has no
/// name in the file system, so nothing is left behind and nobody else can open it; it reaches
/// another process as a descriptor (unix_socket.h). Move-only; unmapped and closed at the end.
class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  /// Makes `bytes` (> 0) of zeroed memory whose size is sealed: neither process can shrink it under
  /// the other, which would be a SIGBUS. `name` is shown in /proc/PID/maps only.
  static Status create(const char* name, std::size_t bytes, SharedMemory* out);
  /// Maps what another process created. `fd` is taken over, also on failure. The size must be
  /// exactly `expectedBytes` and sealed.
  static Status map(UniqueFd fd, std::size_t expectedBytes, SharedMemory* out);

  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] int fd() const { return fd_.get(); }
  /// The memory stays mapped; nobody can be given it any more.
  void closeFd() { fd_.reset(); }
  [[nodiscard]] bool valid() const { return data_ != nullptr; }
  void reset();

 private:
  UniqueFd fd_;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace hoccl
