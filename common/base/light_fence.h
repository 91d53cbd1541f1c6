#pragma once

#include <atomic>

namespace hoccl {

// A store-load fence in two unequal halves, for two processes of which one passes it often and the
// other hardly ever: membarrier(2), MEMBARRIER_CMD_GLOBAL_EXPEDITED.

/// Makes light fences of this process' threads pair with heavy ones of any process. False: the
/// kernel cannot (before Linux 4.16, or the call is filtered); then both sides need full fences.
bool registerLightFences();

/// The often-passed side: the compiler keeps the order, the heavy side sees to the processor's.
inline void lightFence() { std::atomic_signal_fence(std::memory_order_seq_cst); }

/// The other side: a full fence here and in every thread that runs in a process with light fences.
/// A system call. False: it was not made.
bool heavyFence();

}  // namespace hoccl
