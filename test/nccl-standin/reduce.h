#pragma once

#include <cstddef>

#include "outcome.h"

namespace standin {

/// The scalar of an operator made by ncclRedOpCreatePreMulSum.
struct Scale {
  ncclDataType_t type = ncclInt8;
  char value[8] = {};
  const void* where = nullptr;  ///< read when the operation runs; null: `value`
};

/// Bytes of an element; 0 for a type there is not.
std::size_t typeSize(ncclDataType_t type);
/// Whether `combine` can do this.
bool canReduce(ncclDataType_t type, ncclRedOp_t op);
/// into[i] = into[i] op from[i]; for ncclAvg the sum.
void combine(void* into, const void* from, std::size_t count, ncclDataType_t type, ncclRedOp_t op);
/// data[i] = data[i] times the scalar.
void multiply(void* data, const void* scalar, std::size_t count, ncclDataType_t type);
/// Divides by the number of ranks for ncclAvg, else nothing.
void finish(void* data, std::size_t count, ncclDataType_t type, ncclRedOp_t op, int nranks);

}  // namespace standin
