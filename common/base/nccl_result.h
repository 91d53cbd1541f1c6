#pragma once

#include <nccl.h>

#include "common/base/status.h"

namespace hoccl {

/// What NCCL's callers get for a status, at the edge of both libraries. Needs nccl.h.
constexpr ncclResult_t toNccl(Code code) {
  switch (code) {
    case Code::Ok:
      return ncclSuccess;
    case Code::InvalidArgument:
      return ncclInvalidArgument;
    case Code::InvalidConfig:
    case Code::Unsupported:
      return ncclInvalidUsage;
    case Code::Cuda:
      return ncclUnhandledCudaError;
    case Code::Remote:
    case Code::Timeout:
      return ncclRemoteError;
    case Code::System:
    case Code::Aborted:
      return ncclSystemError;
    case Code::Internal:
      return ncclInternalError;
  }
  return ncclInternalError;
}

}  // namespace hoccl
