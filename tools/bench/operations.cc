#include "tools/bench/operations.h"

#include <fmt/format.h>

namespace hoccl::bench {
namespace {

constexpr OperationFacts kFacts[kOperations] = {
    {Operation::SendRecv, "sendrecv", "bytes one rank sends", nullptr, false, false, false, false,
     false},
    {Operation::AllGather, "allgather", "bytes one rank receives, its own block included",
     "ncclAllGather", true, false, true, false, true},
    {Operation::AlltoAll, "alltoall", "bytes one rank sends, the block for itself included",
     "ncclAlltoAll", true, false, false, true, true},
    {Operation::AlltoAllv, "alltoallv", "bytes one rank sends, the block for itself included",
     nullptr, true, false, false, false, false},
    {Operation::Broadcast, "broadcast", "bytes each rank receives", "ncclBroadcast", false, true,
     true, false, false},
    {Operation::Gather, "gather", "bytes the root receives, its own block included", "ncclGather",
     true, true, true, true, true},
    {Operation::Scatter, "scatter", "bytes the root sends, its own block included", "ncclScatter",
     true, true, true, true, true},
};

}  // namespace

const OperationFacts& operationAt(int index) { return kFacts[index]; }

const OperationFacts& factsOf(Operation operation) {
  for (const OperationFacts& facts : kFacts)
    if (facts.operation == operation) return facts;
  return kFacts[0];
}

Status operationByName(const std::string& name, Operation* out) {
  std::string known;
  for (const OperationFacts& facts : kFacts) {
    if (name == facts.name) {
      *out = facts.operation;
      return {};
    }
    known += fmt::format("{}{}", known.empty() ? "" : ", ", facts.name);
  }
  return Status::error(Code::InvalidArgument,
                       fmt::format("operation {}: known are {}", name, known));
}

double busFactor(Operation operation, int ranks) {
  return factsOf(operation).blocks ? static_cast<double>(ranks - 1) / ranks : 1;
}

}  // namespace hoccl::bench
