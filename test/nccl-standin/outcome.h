#pragma once

#include <nccl.h>

#include <string>
#include <utility>

namespace standin {

/// What a step of the stand-in came to: ncclSuccess, or a code and the text for ncclGetLastError.
struct [[nodiscard]] Outcome {
  ncclResult_t code = ncclSuccess;
  std::string text;

  explicit operator bool() const { return code == ncclSuccess; }
  static Outcome error(ncclResult_t code, std::string text) { return {code, std::move(text)}; }
};

}  // namespace standin
