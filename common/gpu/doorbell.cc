#include "common/gpu/doorbell.h"

#include <atomic>

namespace hoccl {
namespace {

class StreamDoorbell final : public Doorbell {
 public:
  explicit StreamDoorbell(const Driver* driver) : driver_(driver) {}
  ~StreamDoorbell() override {
    if (stream_) driver_->cuStreamDestroy(stream_);
    if (heard_) driver_->cuMemFreeHost(heard_);
  }

  Status open() {
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING)));
    void* memory = nullptr;
    HOCCL_RETURN_IF_ERROR(
        HOCCL_CU(driver_, cuMemHostAlloc(&memory, sizeof *heard_, CU_MEMHOSTALLOC_DEVICEMAP)));
    heard_ = new (memory) std::atomic<std::uint64_t>(0);
    return HOCCL_CU(driver_, cuMemHostGetDevicePointer(&address_, memory, 0));
  }

  Status ring(bool* rang) override {
    *rang = heard_->load(std::memory_order_relaxed) >= rung_;
    if (!*rang) return {};
    return HOCCL_CU(driver_, cuStreamWriteValue64(stream_, address_, ++rung_, 0));
  }

 private:
  const Driver* driver_;
  CUstream stream_ = nullptr;
  std::atomic<std::uint64_t>* heard_ = nullptr;  ///< number of the last ring that the GPU has done
  CUdeviceptr address_ = 0;                      ///< of `heard_`
  std::uint64_t rung_ = 0;
};

}  // namespace

Status makeStreamDoorbell(const Driver* driver, std::unique_ptr<Doorbell>* out) {
  auto doorbell = std::make_unique<StreamDoorbell>(driver);
  HOCCL_RETURN_IF_ERROR(doorbell->open());
  *out = std::move(doorbell);
  return {};
}

}  // namespace hoccl
