#pragma once

#include <vector>

#include "operation.h"
#include "outcome.h"

namespace standin {

/// Enqueues the operations of a group, or one outside of groups, and returns. On a communicator
/// without a CUDA context, where there is no stream, it returns when they are done. An error of an
/// operation ends up in its communicator's state.
Outcome execute(std::vector<Operation> operations);

/// Takes back what streams need no more. Also done by `execute`.
void reapLaunches(void* context);

}  // namespace standin
