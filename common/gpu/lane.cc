#include "common/gpu/lane.h"

namespace hoccl {
namespace {

constexpr std::size_t kPrimeBytes =
    64 << 10;  // large enough not to be inlined into the compute channel

class StreamLane final : public Lane {
 public:
  StreamLane(const Driver* driver, LaneDirection direction)
      : driver_(driver), direction_(direction) {}
  ~StreamLane() override {
    if (stream_) driver_->cuStreamDestroy(stream_);
  }

  Status open() {
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING)));
    CUdeviceptr device = 0;
    void* host = nullptr;
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuMemAlloc(&device, kPrimeBytes)));
    Status status = HOCCL_CU(driver_, cuMemHostAlloc(&host, kPrimeBytes, 0));
    if (status) {
      status = direction_ == LaneDirection::ToDevice
                   ? HOCCL_CU(driver_, cuMemcpyHtoDAsync(device, host, kPrimeBytes, stream_))
                   : HOCCL_CU(driver_, cuMemcpyDtoHAsync(host, device, kPrimeBytes, stream_));
      if (status) status = HOCCL_CU(driver_, cuStreamSynchronize(stream_));
      driver_->cuMemFreeHost(host);
    }
    driver_->cuMemFree(device);
    return status;
  }

  void useScratch(CUdeviceptr scratch) override { scratch_ = scratch; }

  Status submit(const LaneJob& job) override {
    if (direction_ == LaneDirection::Peer) {
      const CUdeviceptr to = job.fromPeer ? job.device : job.peer;
      const CUdeviceptr from = job.fromPeer ? job.peer : job.device;
      HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuMemcpyDtoDAsync(to, from, job.bytes, stream_)));
    } else if (job.staging) {
      const bool out = direction_ == LaneDirection::ToHost;
      HOCCL_RETURN_IF_ERROR(HOCCL_CU(
          driver_, cuMemcpyHtoDAsync(scratch_, out ? job.staging : job.host, job.bytes, stream_)));
      HOCCL_RETURN_IF_ERROR(HOCCL_CU(
          driver_, cuMemcpyDtoHAsync(out ? job.host : job.staging, scratch_, job.bytes, stream_)));
    } else if (direction_ == LaneDirection::ToHost) {
      HOCCL_RETURN_IF_ERROR(
          HOCCL_CU(driver_, cuMemcpyDtoHAsync(job.host, job.device, job.bytes, stream_)));
    } else {
      HOCCL_RETURN_IF_ERROR(
          HOCCL_CU(driver_, cuMemcpyHtoDAsync(job.device, job.host, job.bytes, stream_)));
    }
    unsigned count = 0;
    std::array<CUstreamBatchMemOpParams, 2> operations{};
    for (const FlagWrite& write : job.writes) {
      if (!write.address) continue;
      operations[count].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
      operations[count].writeValue.address = write.address;
      operations[count].writeValue.value64 = write.value;
      operations[count].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // fences: payload first
      ++count;
    }
    if (count == 0) return {};
    return HOCCL_CU(driver_, cuStreamBatchMemOp(stream_, count, operations.data(), 0));
  }

 private:
  const Driver* driver_;
  LaneDirection direction_;
  CUstream stream_ = nullptr;
  CUdeviceptr scratch_ = 0;
};

}  // namespace

Status makeStreamLane(const Driver* driver, LaneDirection direction, std::unique_ptr<Lane>* out) {
  auto lane = std::make_unique<StreamLane>(driver, direction);
  HOCCL_RETURN_IF_ERROR(lane->open());
  *out = std::move(lane);
  return {};
}

}  // namespace hoccl
