#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "comm.h"
#include "outcome.h"
#include "reduce.h"

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
  std::optional<Scale> scale{};  ///< of a reduction: what each rank's input is multiplied by first
};

/// Bytes a rank gives and gets. Where only the root gives or gets, others have none.
std::size_t bytesIn(const Operation& op);
std::size_t bytesOut(const Operation& op);

/// Host memory that an operation reads or writes: the application's, or staged device memory.
struct Host {
  char* data = nullptr;
  std::size_t bytes = 0;
  bool staged = false;
};

/// An operation with its data on the host.
struct Staged {
  Operation op;
  Host in, out;
  Host scalar;  ///< of an operator whose scalar is in device memory
};

/// Moves the data of operations on one communicator: sends and receives at once, then the
/// collectives in order.
Outcome moveData(ncclComm* comm, const std::vector<Staged>& operations);

}  // namespace standin
