#pragma once

namespace hoccl {

/// Between two looks of a spinning loop: leaves the core's other hardware thread its share.
inline void relaxCpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

}  // namespace hoccl
