#pragma once

#include <cstdint>
#include <vector>

#include "comm.h"
#include "outcome.h"

namespace standin {

enum class Kind : std::uint32_t {
  Send,
  Receive,
  AllReduce,
  Reduce,
  ReduceScatter,
  AllGather,
  Broadcast,
};

struct Operation {
  Kind kind;
  const void* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;  ///< as the NCCL function takes it
  ncclDataType_t type = ncclInt8;
  ncclRedOp_t reduction = ncclSum;
  int peer = 0;  ///< or root
  ncclComm* comm = nullptr;
  void* stream = nullptr;
};

/// Bytes of an element; 0 for a type there is not.
std::size_t typeSize(ncclDataType_t type);

/// Moves the data of a group's operations: sends and receives of a communicator at once, then its
/// collectives in order; communicators beside each other. Returns when all is done. An error ends
/// up in the communicator's state too.
Outcome execute(std::vector<Operation> operations);

}  // namespace standin
