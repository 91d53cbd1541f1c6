#include <cuda.h>

#include <memory>
#include <utility>
#include <vector>

#include "test/emulator/context.h"
#include "test/emulator/engine.h"
#include "test/emulator/hoccl_emu.h"
#include "test/emulator/memory.h"
#include "test/emulator/session.h"

namespace hoccl::emu {
namespace {

/// `work` holds what the kernel does; the rest is filled in here.
CUresult launch(CUstream handle, int sms, std::unique_ptr<Work> work) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    const int physical = stream->context->physical;
    if (sms < 1 || sms > kSms) return CUDA_ERROR_INVALID_VALUE;
    if (work->until != nullptr && work->pins[0]->isDevice() && work->pins[0]->physical != physical)
      return CUDA_ERROR_INVALID_VALUE;
    work->path = Path::Sm;
    work->physical = physical;
    work->sms = sms;
    std::vector<Op> ops(1);
    ops[0].kind = OpKind::Work;
    ops[0].work = std::move(work);
    bool captured = false;
    const CUresult result = Scheduler::get().submit(stream, std::move(ops), &captured);
    if (result == CUDA_SUCCESS && !captured) {
      session::count(physical, Counter::Kernels);
      session::count(physical, Counter::SmOps);
    }
    return result;
  });
}

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult hocclEmuLaunchBody(CUstream stream, uint64_t modelNanoseconds, int sms,
                            void (*body)(void*), void* argument) {
  return driverCall([&]() -> CUresult {
    auto work = std::make_unique<Work>();
    work->latencyNs = static_cast<double>(modelNanoseconds);
    work->body = body;
    work->argument = argument;
    return launch(stream, sms, std::move(work));
  });
}

CUresult hocclEmuLaunchKernel(CUstream stream, uint64_t modelNanoseconds, int sms) {
  return hocclEmuLaunchBody(stream, modelNanoseconds, sms, nullptr, nullptr);
}

CUresult hocclEmuLaunchWaitKernel(CUstream stream, CUdeviceptr flag, uint64_t value, int sms) {
  return driverCall([&]() -> CUresult {
    auto work = std::make_unique<Work>();
    work->pins[0] = regions::find(flag);
    if (flag % sizeof value != 0 || work->pins[0] == nullptr ||
        !work->pins[0]->contains(flag, sizeof value))
      return CUDA_ERROR_INVALID_VALUE;
    work->until = work->pins[0]->at(flag);
    work->untilValue = value;
    return launch(stream, sms, std::move(work));
  });
}

}  // extern "C"
