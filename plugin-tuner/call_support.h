#pragma once

#include <nccl.h>

#include <cerrno>
#include <cstddef>

#include "common/base/nccl_result.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {

/// Bytes of one element; 0 for a type this build does not know.
std::size_t typeBytes(ncclDataType_t type);

/// What a call on a communicator that another thread aborts is told.
Status abortedStatus();

/// Makes `status` what ncclGetLastError says of the communicator.
ncclResult_t refuse(SteeredComm& comm, const Status& status);

/// Leaves the caller's errno as it was (rule 14).
class ErrnoKeeper {
 public:
  ErrnoKeeper() : saved_(errno) {}
  ~ErrnoKeeper() { errno = saved_; }
  ErrnoKeeper(const ErrnoKeeper&) = delete;
  ErrnoKeeper& operator=(const ErrnoKeeper&) = delete;

 private:
  int saved_;
};

}  // namespace hoccl
