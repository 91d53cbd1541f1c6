#pragma once

#include <cstdint>

namespace e2e {

/// Counts what this thread does inside HOCCL between start() and stop(): allocations, mutexes
/// taken, system calls. What the emulated driver or the stand-in NCCL do when HOCCL calls them is
/// theirs: an event counts for the innermost of these libraries on the stack. One thread at a time.
class CallWatch {
 public:
  struct Counts {
    std::uint64_t allocations = 0;
    std::uint64_t locks = 0;
    std::uint64_t systemCalls = 0;
    /// All events, whoever's: shows that the watch sees anything.
    std::uint64_t seen = 0;
    long firstSystemCall = -1;  ///< its number
  };

  /// False where system calls cannot be watched (another CPU, seccomp forbidden); for ever in this
  /// thread: each of its further system calls takes a signal.
  static bool watchSystemCalls();
  static void start();
  static Counts stop();
};

}  // namespace e2e
