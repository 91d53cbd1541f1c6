#pragma once

#include <fmt/format.h>

#include <string>

namespace e2e {

/// Ends this rank: the line goes to standard error, the exit status is 1. No exit handler runs, so
/// that what is broken cannot hang the end.
[[noreturn]] void failAt(const char* file, int line, const std::string& what);

}  // namespace e2e

/// A rank's assertion: `REQUIRE(condition, "what was seen: {}", value)`.
#define REQUIRE(condition, ...)                                                        \
  do {                                                                                 \
    if (!(condition))                                                                  \
      ::e2e::failAt(__FILE__, __LINE__, #condition ": " + ::fmt::format(__VA_ARGS__)); \
  } while (0)

#define REQUIRE_NCCL(call)                                                               \
  do {                                                                                   \
    const ncclResult_t result_ = (call);                                                 \
    REQUIRE(result_ == ncclSuccess, #call " returned {}: {}", static_cast<int>(result_), \
            ::e2e::nccl().ncclGetLastError(nullptr));                                    \
  } while (0)

#define REQUIRE_CU(call)                                                               \
  do {                                                                                 \
    const CUresult result_ = (call);                                                   \
    REQUIRE(result_ == CUDA_SUCCESS, #call " returned {}", static_cast<int>(result_)); \
  } while (0)
