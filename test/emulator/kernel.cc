#include "test/emulator/kernel.h"

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

CUresult launchKernel(const StreamPtr& stream, int sms, std::unique_ptr<Work> work) {
  const int physical = stream->context->physical;
  if (sms < 1 || sms > kSms) return CUDA_ERROR_INVALID_VALUE;
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
}

std::unique_ptr<Work> waitWork(CUdeviceptr flag, std::uint64_t value, const Context& context) {
  auto work = std::make_unique<Work>();
  work->pins[0] = regions::find(flag);
  const Region* region = work->pins[0].get();
  if (flag % sizeof value != 0 || region == nullptr || !region->contains(flag, sizeof value) ||
      (region->isDevice() && region->physical != context.physical))
    return nullptr;
  work->until = region->at(flag);
  work->untilValue = value;
  return work;
}

}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult hocclEmuLaunchBody(CUstream handle, uint64_t modelNanoseconds, int sms,
                            void (*body)(void*), void* argument) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    auto work = std::make_unique<Work>();
    work->latencyNs = static_cast<double>(modelNanoseconds);
    work->body = body;
    work->argument = argument;
    return launchKernel(stream, sms, std::move(work));
  });
}

CUresult hocclEmuLaunchKernel(CUstream stream, uint64_t modelNanoseconds, int sms) {
  return hocclEmuLaunchBody(stream, modelNanoseconds, sms, nullptr, nullptr);
}

CUresult hocclEmuLaunchWaitKernel(CUstream handle, CUdeviceptr flag, uint64_t value, int sms) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    auto work = waitWork(flag, value, *stream->context);
    return work == nullptr ? CUDA_ERROR_INVALID_VALUE : launchKernel(stream, sms, std::move(work));
  });
}

}  // extern "C"
