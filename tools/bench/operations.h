#pragma once

#include <cstdint>
#include <string>

#include "common/base/status.h"

namespace hoccl::bench {

enum class Operation { SendRecv, AllGather, AlltoAll, AlltoAllv, Broadcast, Gather, Scatter };

/// What tells one operation from another as far as sizes and figures go; nccl-tests' definitions.
struct OperationFacts {
  Operation operation;
  const char* name;          ///< of the subcommand, and the JSON key `op`
  const char* sizeMeaning;   ///< what the size column counts
  const char* ncclFunction;  ///< the NCCL function for it; null: only as send/recv
  bool blocks;     ///< the size is cut into one equal block a rank (alltoallv: equal on average)
  bool rooted;     ///< one rank is the root
  bool inPlace;    ///< has an in-place form
  bool groupable;  ///< NCCL has that function only from 2.28.3 on; grouped send/recv does the same
  bool copyEngines;  ///< NCCL 2.28.3 and later has a form of it that copy engines carry out
};

const OperationFacts& factsOf(Operation operation);
/// All operations, in the order of the help text; ends before `kOperations`.
inline constexpr int kOperations = 7;
const OperationFacts& operationAt(int index);
/// Error: names what is known.
Status operationByName(const std::string& name, Operation* out);

/// busbw / algbw: (ranks - 1) / ranks where the size is cut into blocks, of which one stays where
/// it is, else 1. See nccl-tests' doc/PERFORMANCE.md. For alltoallv that is nccl-tests' definition
/// too, although with a skew another share of the bytes leaves a rank.
double busFactor(Operation operation, int ranks);

}  // namespace hoccl::bench
