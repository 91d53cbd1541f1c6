#include "common/runtime/staging_pool.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/runtime/mover_client.h"

namespace hoccl {
namespace {

constexpr std::uint64_t kLeast = 1 << 20;
constexpr std::uint64_t kHeader = 4096;  ///< the flag, and the data begins on a page
constexpr useconds_t kFullNapUs = 20;

/// Tells staging memory from the driver's allocations, which count up from a small number.
std::uint64_t nextId() {
  static std::atomic<std::uint64_t> last{1ull << 63};
  return ++last;
}

}  // namespace

std::uint64_t stagingBlockBytes(std::uint64_t bytes) {
  if (bytes <= kLeast) return kLeast;
  const std::uint64_t quarter = std::bit_floor(bytes) / 4;
  return (bytes + quarter - 1) / quarter * quarter;
}

/// The smallest free block, if it is not much larger than asked for.
StagingPool::Block* StagingPool::takeFree(std::uint64_t bytes, bool* anyLargeEnough,
                                          std::uint64_t* used) {
  Block* best = nullptr;
  for (const auto& block : blocks_) {
    const bool free = block->free();
    if (!free) *used += block->bytes;
    if (block->bytes < bytes || block->lost) continue;
    *anyLargeEnough = true;
    if (free && (!best || block->bytes < best->bytes)) best = block.get();
  }
  // A small operation in a large block would make a large one wait, or the pool grow by another.
  const std::uint64_t fitting = stagingBlockBytes(bytes);
  if (!best || (best->bytes / 4 > fitting && *used + fitting <= limit_)) return nullptr;
  ++best->turn;
  best->launch.store(nullptr, std::memory_order_relaxed);
  return best;
}

Status StagingPool::makeBlock(std::uint64_t bytes, Block** out) {
  auto block = std::make_unique<Block>();
  block->id = nextId();
  block->bytes = bytes;
  HOCCL_RETURN_IF_ERROR(SharedMemory::create("hoccl-staging", kHeader + bytes, &block->memory));
  auto* base = static_cast<std::byte*>(block->memory.data());
  block->data = base + kHeader;
  block->done = reinterpret_cast<Flag*>(base);
  ContextGuard guard(driver_, context_);
  RelaxedCapture relaxed(driver_);
  HOCCL_RETURN_IF_ERROR(
      HostRegistration::create(driver_, base, block->memory.size(), &block->registration));
  block->doneAddress = block->registration.deviceAddress(*block->done);
  const Status given = mover_->addStaging(block->id, block->memory);
  block->memory.closeFd();
  block->turn = 1;
  // Kept even so: to unpin it could wait for the device.
  block->lost = !given;
  blocks_.push_back(std::move(block));
  *out = blocks_.back().get();
  return given;
}

Status StagingPool::take(std::uint64_t bytes, bool mayWait, const std::function<bool()>& cancelled,
                         Block** out) {
  const Deadline patience = Deadline::afterMs(kPatienceMs);
  for (;;) {
    {
      std::lock_guard lock(mutex_);
      bool anyLargeEnough = false;
      std::uint64_t used = 0;
      if (Block* block = takeFree(bytes, &anyLargeEnough, &used)) {
        *out = block;
        return {};
      }
      const std::uint64_t size = stagingBlockBytes(bytes);
      const bool impatient = mayWait && anyLargeEnough && patience.passed();
      if (used + size <= limit_ || !anyLargeEnough || !mayWait || impatient) {
        if (impatient && used + size > limit_) {
          logWarn(
              "application-side copies take more than HOCCL_APP_COPY_BYTES={}: {} bytes are in "
              "use, and none came free within {} ms",
              limit_, used, kPatienceMs);
        }
        return makeBlock(size, out).inContext(
            fmt::format("no pinned memory for an application-side copy of {} bytes ({} bytes of "
                        "HOCCL_APP_COPY_BYTES={} in use)",
                        bytes, used, limit_));
      }
    }
    if (mover_->segment().header().moverDead.load(std::memory_order_relaxed)) {
      return Status::error(Code::Remote, "the mover has ended");
    }
    if (cancelled && cancelled()) {
      return Status::error(Code::Aborted, "the communicator was aborted");
    }
    ::usleep(kFullNapUs);
  }
}

Status StagingPool::scratch(Block* block) {
  if (block->scratch) return {};
  ContextGuard guard(driver_, context_);
  RelaxedCapture relaxed(driver_);
  return HOCCL_CU(driver_, cuMemAlloc(&block->scratch, kScratchBytes))
      .inContext("no device memory for copies out of and into host memory");
}

}  // namespace hoccl
