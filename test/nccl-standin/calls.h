#pragma once

#include "operation.h"

namespace standin {

// The operations as NCCL's functions begin them: recorded under the function's name, checked, and
// submitted. AlltoAll, Gather and Scatter become sends and receives, as with NCCL.

ncclResult_t operate(const char* function, Operation op);
ncclResult_t allToAll(const char* function, const Operation& whole);
ncclResult_t gather(const char* function, const Operation& whole);
ncclResult_t scatter(const char* function, const Operation& whole);

/// Writes NCCL's line about its copy engines, where NCCL would let them do that.
void noteCopyEngines(const Operation& op);

}  // namespace standin
