#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>

#include "test/emulator/capture.h"
#include "test/emulator/context.h"
#include "test/emulator/memory.h"

namespace hoccl::emu {

/// Calls that allocate or free are forbidden during most captures.
template <typename Body>
CUresult allocationCall(Body&& body) {
  return contextCall([&](Context& context) -> CUresult {
    if (const CUresult allowed = checkUnsafeCall(); allowed != CUDA_SUCCESS) return allowed;
    return body(context);
  });
}

/// A region of the context's device, not yet in the table.
std::shared_ptr<Region> newRegion(RegionKind kind, Context& context, unsigned flags);
/// Device memory of the context, in the table; null when there is none left.
std::shared_ptr<Region> allocateDevice(RegionKind kind, Context& context, std::size_t bytes);

}  // namespace hoccl::emu
