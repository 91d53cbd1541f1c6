#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hoccl::bench {

/// A stretch of CLOCK_MONOTONIC nanoseconds.
struct TimeWindow {
  std::uint64_t beginNs = 0, endNs = 0;
};

/// Where a tracer loaded into the rank processes and their movers writes its files, "%p" standing
/// for the process id: $KERNELTRACE_OUT, else <pid>.json in $GPU_CHECK_TRACE_DIR; empty without a
/// tracer.
std::string kernelTracePattern();

/// What needed an SM (kernels, copies within one device, memsets over 64 KiB) in each window, in
/// all processes that wrote a file for the pattern. Empty where that is not known for sure: no file
/// of one of `ranks`, a file that ends before the window does, or lost events.
std::vector<std::optional<std::uint64_t>> countTracedKernels(
    const std::string& pattern, const std::vector<pid_t>& ranks,
    const std::vector<TimeWindow>& windows);

}  // namespace hoccl::bench
