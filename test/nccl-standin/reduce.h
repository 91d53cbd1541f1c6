#pragma once

#include <cstddef>

#include "outcome.h"

namespace standin {

/// Whether `combine` can do this.
bool canReduce(ncclDataType_t type, ncclRedOp_t op);
/// into[i] = into[i] op from[i]; for ncclAvg the sum.
void combine(void* into, const void* from, std::size_t count, ncclDataType_t type, ncclRedOp_t op);
/// Divides by the number of ranks for ncclAvg, else nothing.
void finish(void* data, std::size_t count, ncclDataType_t type, ncclRedOp_t op, int nranks);

}  // namespace standin
