#pragma once

// "Device memory" that is ordinary memory, its device address the host address: buffers with guard
// bytes, and a pattern in which every byte tells where it belongs.

#include <cuda.h>
#include <fmt/format.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace hoccl::test {

/// Bytes that tell where they belong: no two transfers and no two offsets look alike for long. This
/// is the word at `offset`, a multiple of 8, of transfer `key`.
inline std::uint64_t patternWord(std::uint64_t key, std::uint64_t offset) {
  const std::uint64_t v = (offset / 8 + 1) * 0x9e3779b97f4a7c15ull ^ key * 0xff51afd7ed558ccdull;
  return v ^ v >> 29;
}
inline std::byte patternAt(std::uint64_t key, std::uint64_t offset) {
  return static_cast<std::byte>(patternWord(key, offset) >> (offset % 8 * 8));
}
/// Bytes [offset, offset + length) of transfer `key`; whole words at a time, which sanitizers like.
inline void writePattern(std::byte* to, std::uint64_t key, std::uint64_t offset,
                         std::uint64_t length) {
  for (std::uint64_t i = 0; i < length;) {
    if ((offset + i) % 8 == 0 && length - i >= 8) {
      const std::uint64_t word = patternWord(key, offset + i);
      std::memcpy(to + i, &word, 8);
      i += 8;
    } else {
      to[i] = patternAt(key, offset + i);
      ++i;
    }
  }
}
/// Copies into another mover's buffer that have ended. The flag behind such a copy is mapped at two
/// addresses, at which ThreadSanitizer sees two flags: this one orders the bytes for it.
inline std::atomic<std::uint64_t>& peerCopies() {
  static std::atomic<std::uint64_t> count{0};
  return count;
}

inline constexpr std::byte kPoison{0xa5};
inline constexpr std::size_t kGuard = 64;

/// A "device" buffer with guard bytes around it, at an odd address if asked.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::uint64_t bytes, std::size_t shift = 0)
      : bytes_(bytes), shift_(kGuard + shift), memory_(bytes + 2 * kGuard + shift, kPoison) {}
  ~DeviceBuffer() { peerCopies().load(std::memory_order_acquire); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  DeviceBuffer(DeviceBuffer&&) = default;
  [[nodiscard]] std::byte* data() { return memory_.data() + shift_; }
  [[nodiscard]] CUdeviceptr address() { return reinterpret_cast<CUdeviceptr>(data()); }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  void fill(std::uint64_t key) { writePattern(data(), key, 0, bytes_); }
  /// Empty if every byte inside is the pattern of `key` and every byte outside untouched.
  [[nodiscard]] std::string check(std::uint64_t key) {
    peerCopies().load(std::memory_order_acquire);
    std::vector<std::byte> expected(bytes_);
    writePattern(expected.data(), key, 0, bytes_);
    const bool same = std::memcmp(expected.data(), data(), bytes_) == 0;
    for (std::uint64_t i = 0; !same && i < bytes_; ++i) {
      if (data()[i] != expected[i]) {
        return fmt::format("byte {} of {} is {:#x}, not {:#x}", i, bytes_,
                           static_cast<unsigned>(data()[i]), static_cast<unsigned>(expected[i]));
      }
    }
    return checkGuards();
  }
  [[nodiscard]] std::string checkGuards() {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (i == shift_) i += bytes_;
      if (memory_[i] != kPoison) return fmt::format("guard byte {} was written", i);
    }
    return {};
  }
  /// Empty if nothing was written at all.
  [[nodiscard]] std::string untouched() {
    for (std::byte b : memory_) {
      if (b != kPoison) return "a byte was written";
    }
    return {};
  }

 private:
  std::uint64_t bytes_;
  std::size_t shift_;
  std::vector<std::byte> memory_;
};

}  // namespace hoccl::test
