#pragma once

#include <cstddef>

namespace hoccl {

/// HocclCoreApi::freeing: the movers of this process let go of what lies there before it is freed.
/// Waits for the operations on that memory and for no others, at most HOCCL_TIMEOUT_MS for each
/// call; after that the free goes on, with a warning that says what was pending. Memory that no
/// mover was ever told of costs a look-up. Does nothing in a forked child: the movers are its
/// parent's.
void freeing(unsigned long long address, std::size_t bytes);

/// HocclCoreApi::allocationFailed: the movers unmap every import that no operation uses. 1 when
/// there was one.
int allocationFailed();

}  // namespace hoccl
