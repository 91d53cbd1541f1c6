#pragma once

#include <vector>

#include "comm.h"
#include "operation.h"

namespace standin {

/// How many groups the calling thread is in.
int groupDepth();
void groupBegin();
/// At the outermost end: runs the jobs, then the operations queued since its begin.
ncclResult_t groupFinish();
/// The end of a group whose operations are not done, but timed in microseconds, by a model that
/// only grows with their bytes.
ncclResult_t groupSimulate(float* microseconds);
/// Queues for the outermost end, or runs at once outside of a group.
ncclResult_t submit(Job job);
ncclResult_t submit(Operation operation);
/// An error of a call inside a group, which its end reports too.
ncclResult_t failInGroup(ncclResult_t code);

}  // namespace standin
