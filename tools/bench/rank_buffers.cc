#include "tools/bench/rank_buffers.h"

#include <cstdio>
#include <vector>

namespace hoccl::bench {
namespace {

// Past the end of the receive buffer.
constexpr std::uint64_t kGuardBytes = 4096;
// No rank receives a block of this name.
constexpr int kGuardPart = -1;

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

BufferSource deviceMemory(const Driver* driver) {
  return [driver](std::uint64_t bytes, std::unique_ptr<Buffer>* out) {
    auto buffer = std::make_unique<DeviceBuffer>();
    const Status status = buffer->allocate(driver, bytes);
    *out = std::move(buffer);
    return status;
  };
}

Status RankBuffers::allocate(const BufferSource& source, std::uint64_t sendBytes,
                             std::uint64_t receiveBytes, std::uint64_t offset) {
  offset_ = offset;
  if (sendBytes > 0) HOCCL_RETURN_IF_ERROR(source(offset + sendBytes, &send_));
  return source(offset + receiveBytes + kGuardBytes, &receive_);
}

void RankBuffers::release() {
  send_.reset();
  receive_.reset();
}

void* RankBuffers::sendBase(const RankLayout& layout) const {
  if (layout.inPlace) return receiveBase();
  return send_ ? pointer(send_->at(offset_)) : nullptr;
}

void* RankBuffers::receiveBase() const { return pointer(receive_->at(offset_)); }

BytePattern RankBuffers::guardPattern(std::uint64_t number) const {
  return BytePattern::of(rank_, kGuardPart, number);
}

Status RankBuffers::prepare(const RankLayout& layout, std::uint64_t number) {
  const auto fill = [&](const Buffer* buffer, const std::vector<Block>& blocks) -> Status {
    for (const Block& block : blocks)
      HOCCL_RETURN_IF_ERROR(device_->upload(buffer->at(offset_ + block.offset), block.bytes,
                                            BytePattern::of(block.source, block.part, number),
                                            !block.before));
    return {};
  };
  HOCCL_RETURN_IF_ERROR(fill(send_.get(), layout.send));
  HOCCL_RETURN_IF_ERROR(fill(receive_.get(), layout.receive));
  return device_->upload(receive_->at(offset_ + layout.receiveBytes), kGuardBytes,
                         guardPattern(number), false);
}

Status RankBuffers::verify(const RankLayout& layout, std::uint64_t number, std::uint64_t* wrong) {
  *wrong = 0;
  std::uint64_t here = 0, first = 0;
  for (const Block& block : layout.receive) {
    HOCCL_RETURN_IF_ERROR(device_->countWrong(receive_->at(offset_ + block.offset), block.bytes,
                                              BytePattern::of(block.source, block.part, number),
                                              &here, &first));
    if (here > 0 && *wrong == 0)
      std::fprintf(stderr,
                   "hoccl bench: rank %d: %llu wrong bytes of %llu from rank %d, the first at "
                   "%llu of the receive buffer\n",
                   rank_, static_cast<unsigned long long>(here),
                   static_cast<unsigned long long>(block.bytes), block.source,
                   static_cast<unsigned long long>(block.offset + first));
    *wrong += here;
  }
  HOCCL_RETURN_IF_ERROR(device_->countWrong(receive_->at(offset_ + layout.receiveBytes),
                                            kGuardBytes, guardPattern(number), &here, &first));
  if (here > 0)
    std::fprintf(stderr,
                 "hoccl bench: rank %d: %llu bytes written behind the receive buffer of %llu "
                 "bytes, the first %llu behind its end\n",
                 rank_, static_cast<unsigned long long>(here),
                 static_cast<unsigned long long>(layout.receiveBytes),
                 static_cast<unsigned long long>(first));
  *wrong += here;
  return {};
}

}  // namespace hoccl::bench
