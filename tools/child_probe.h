#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace hoccl {

/// What came of work done in a forked child.
struct ChildResult {
  bool ok = false;      ///< the child ended by itself with status 0 in time
  std::string output;   ///< what the work returned
  std::string problem;  ///< "ended by signal 11 (Segmentation fault)", "no end within 10000 ms"
};

/// Runs `work` in a forked child, so that a library that crashes or hangs while it is loaded hurts
/// nobody, and returns the text that it returns. The child's standard output goes to standard
/// error.
ChildResult runInChild(const std::function<std::string()>& work, std::uint64_t timeoutMs);

/// How long a library may take to load, or a driver to start.
inline constexpr std::uint64_t kProbeTimeoutMs = 20000;

}  // namespace hoccl
