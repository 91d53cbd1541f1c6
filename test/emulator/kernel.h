#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>

#include "test/emulator/engine.h"

namespace hoccl::emu {

/// Submits a kernel that holds `sms` SMs of the stream's device. `work` says what it does.
CUresult launchKernel(const StreamPtr& stream, int sms, std::unique_ptr<Work> work);
/// What a kernel does that ends when the 64-bit word at `flag` is >= `value`; null if a kernel of
/// this device cannot read there.
std::unique_ptr<Work> waitWork(CUdeviceptr flag, std::uint64_t value, const Context& context);

}  // namespace hoccl::emu
