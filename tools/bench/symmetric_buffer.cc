#include "tools/bench/symmetric_buffer.h"

#include <fmt/format.h>

namespace hoccl::bench {
namespace {

constexpr int kSymmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC, since older headers lack it

}  // namespace

BufferSource symmetricMemory(const NcclApi* nccl, ncclComm_t communicator) {
  return [nccl, communicator](std::uint64_t bytes, std::unique_ptr<Buffer>* out) {
    auto buffer = std::make_unique<SymmetricBuffer>();
    const Status status = buffer->allocate(nccl, communicator, bytes);
    *out = std::move(buffer);
    return status;
  };
}

Status SymmetricBuffer::allocate(const NcclApi* nccl, ncclComm_t communicator,
                                 std::uint64_t bytes) {
  release();
  nccl_ = nccl;
  communicator_ = communicator;
  const std::uint64_t whole = (bytes + kDevicePageBytes - 1) / kDevicePageBytes * kDevicePageBytes;
  const auto failed = [&](const char* call, ncclResult_t result) {
    return nccl->error(call, result, communicator)
        .inContext(fmt::format("{} bytes in a symmetric window", bytes));
  };
  void* pointer = nullptr;
  if (const ncclResult_t result = nccl->memAlloc(&pointer, whole); result != ncclSuccess)
    return failed("ncclMemAlloc", result);
  pointer_ = reinterpret_cast<CUdeviceptr>(pointer);
  if (const ncclResult_t result =
          nccl->windowRegister(communicator, pointer, whole, &window_, kSymmetric);
      result != ncclSuccess)
    return failed("ncclCommWindowRegister", result);
  return {};
}

void SymmetricBuffer::release() {
  if (window_) nccl_->windowDeregister(communicator_, window_);
  if (pointer_) nccl_->memFree(reinterpret_cast<void*>(pointer_));
  window_ = nullptr;
  pointer_ = 0;
}

}  // namespace hoccl::bench
