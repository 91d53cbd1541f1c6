#include <cuda.h>

#include <utility>
#include <vector>

#include "test/emulator/context.h"
#include "test/emulator/engine.h"
#include "test/emulator/memory.h"
#include "test/emulator/session.h"

namespace hoccl::emu {
namespace {

constexpr unsigned kMaxBatch = 256;  // CUDA's documented limit of one batch

/// Memory operations reach pinned host memory and the issuing device's own memory; a peer GPU's is
/// refused, since HOCCL must not rely on it.
CUresult resolve(const Stream& stream, CUdeviceptr address, bool is64, Op* op) {
  const std::size_t size = is64 ? 8 : 4;
  if (address % size != 0) return CUDA_ERROR_INVALID_VALUE;
  op->region = regions::find(address);
  if (op->region == nullptr || !op->region->contains(address, size))
    return CUDA_ERROR_INVALID_VALUE;
  if (op->region->kind == RegionKind::Managed) return CUDA_ERROR_INVALID_VALUE;  // as documented
  if (op->region->isDevice() && op->region->physical != stream.context->physical)
    return CUDA_ERROR_INVALID_VALUE;
  op->address = op->region->at(address);
  op->is64 = is64;
  return CUDA_SUCCESS;
}

CUresult makeWrite(const Stream& stream, CUdeviceptr address, std::uint64_t value, unsigned flags,
                   bool is64, std::vector<Op>* ops) {
  if (flags > CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) return CUDA_ERROR_INVALID_VALUE;
  Op op;
  op.kind = OpKind::Write;
  op.value = value;
  const CUresult result = resolve(stream, address, is64, &op);
  if (result == CUDA_SUCCESS) ops->push_back(std::move(op));
  return result;
}

CUresult makeWait(const Stream& stream, CUdeviceptr address, std::uint64_t value, unsigned flags,
                  bool is64, std::vector<Op>* ops) {
  // CAN_FLUSH_REMOTE_WRITES reads 0.
  if ((flags & CU_STREAM_WAIT_VALUE_FLUSH) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (flags > CU_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;
  Op op;
  op.kind = OpKind::Wait;
  op.value = value;
  op.waitFlags = flags;
  const CUresult result = resolve(stream, address, is64, &op);
  if (result == CUDA_SUCCESS) ops->push_back(std::move(op));
  return result;
}

CUresult submit(const StreamPtr& stream, std::vector<Op> ops) {
  const std::size_t count = ops.size();
  bool captured = false;
  const CUresult result = Scheduler::get().submit(stream, std::move(ops), &captured);
  if (result == CUDA_SUCCESS && !captured)
    session::count(stream->context->physical, Counter::MemOps, count);
  return result;
}

CUresult writeOn(CUstream handle, CUdeviceptr address, std::uint64_t value, unsigned flags,
                 bool is64) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    std::vector<Op> ops;
    const CUresult result = makeWrite(*stream, address, value, flags, is64, &ops);
    return result == CUDA_SUCCESS ? submit(stream, std::move(ops)) : result;
  });
}

CUresult waitOn(CUstream handle, CUdeviceptr address, std::uint64_t value, unsigned flags,
                bool is64) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    std::vector<Op> ops;
    const CUresult result = makeWait(*stream, address, value, flags, is64, &ops);
    return result == CUDA_SUCCESS ? submit(stream, std::move(ops)) : result;
  });
}

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                 unsigned int flags) {
  return writeOn(stream, address, value, flags, false);
}
CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                 unsigned int flags) {
  return writeOn(stream, address, value, flags, true);
}
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                unsigned int flags) {
  return waitOn(stream, address, value, flags, false);
}
CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value,
                                unsigned int flags) {
  return waitOn(stream, address, value, flags, true);
}

CUresult cuStreamBatchMemOp_v2(CUstream handle, unsigned int count,
                               CUstreamBatchMemOpParams* params, unsigned int flags) {
  return streamCall(handle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (flags != 0 || count > kMaxBatch || (count > 0 && params == nullptr))
      return CUDA_ERROR_INVALID_VALUE;
    std::vector<Op> ops;
    ops.reserve(count);
    for (unsigned i = 0; i < count; ++i) {
      const auto& write = params[i].writeValue;
      const auto& wait = params[i].waitValue;
      CUresult result = CUDA_SUCCESS;
      switch (params[i].operation) {
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
          result = makeWrite(*stream, write.address, write.value, write.flags, false, &ops);
          break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
          result = makeWrite(*stream, write.address, write.value64, write.flags, true, &ops);
          break;
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
          result = makeWait(*stream, wait.address, wait.value, wait.flags, false, &ops);
          break;
        case CU_STREAM_MEM_OP_WAIT_VALUE_64:
          result = makeWait(*stream, wait.address, wait.value64, wait.flags, true, &ops);
          break;
        case CU_STREAM_MEM_OP_BARRIER:
          break;  // operations of a stream are in order here anyway
        case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
          result = CUDA_ERROR_NOT_SUPPORTED;
          break;
        default:
          result = CUDA_ERROR_INVALID_VALUE;
      }
      if (result != CUDA_SUCCESS) return result;
    }
    return submit(stream, std::move(ops));
  });
}

}  // extern "C"
