#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "common/base/flag.h"
#include "common/base/shared_memory.h"
#include "common/base/status.h"
#include "common/gpu/host_registration.h"
#include "common/runtime/segment.h"

namespace hoccl {

class MoverClient;

/// Pinned host memory that an application and its mover share, for buffers the mover cannot map:
/// the application's own stream copies between the buffer and a block, the mover between the block
/// and its links. A block is as large as the whole operation, so that no copy of the application's
/// ever waits for a peer. Blocks are used again and never given back: unpinning can wait for the
/// device.
class StagingPool {
 public:
  struct Block {
    std::uint64_t id = 0;  ///< BufferRef::allocationId
    std::uint64_t bytes = 0;
    std::byte* data = nullptr;
    /// Where the stream writes `turn` once it is through with the block.
    CUdeviceptr doneAddress = 0;
    std::uint64_t turn = 0;
    /// Of a block that only sends: the launch whose end is the block's, so that nothing has to
    /// stand behind the stream's wait. Set last, with `sequence` before it.
    std::atomic<const LaunchFlags*> launch{nullptr};
    std::uint64_t sequence = 0;
    bool lost = false;  ///< whether anything still uses it is not known
    /// Device memory of kScratchBytes, for buffers in host memory: a copy from host to host is made
    /// in two. Null until scratch() has been asked for.
    CUdeviceptr scratch = 0;

    SharedMemory memory;
    HostRegistration registration;
    Flag* done = nullptr;

    [[nodiscard]] bool free() const {
      if (lost) return false;
      const LaunchFlags* flags = launch.load(std::memory_order_acquire);
      return done->reached(turn) || (flags && flags->free(sequence));
    }
  };
  static constexpr std::uint64_t kScratchBytes = 4 << 20;
  static constexpr std::uint64_t kPatienceMs = 5000;

  /// `limit`: bytes in use beyond which a request waits for a block to come free, where it may and
  /// one that is large enough exists; no longer than kPatienceMs, since what it waits for may need
  /// the calling thread.
  StagingPool(const Driver* driver, CUcontext context, MoverClient* mover, std::uint64_t limit)
      : driver_(driver), context_(context), mover_(mover), limit_(limit) {}

  /// A block of at least `bytes`, until the stream has written its turn, or giveBack. Any thread;
  /// takes a lock, makes memory where there is none, which takes milliseconds and may wait as
  /// `limit` says. Error: memory cannot be pinned, the mover is dead, or `cancelled` says so.
  /// `mayWait`: the caller holds no block of a launch not made yet, for which others might be
  /// waiting.
  Status take(std::uint64_t bytes, bool mayWait, const std::function<bool()>& cancelled,
              Block** out);
  /// Gives `block` its scratch. Error: no device memory.
  Status scratch(Block* block);
  /// A block that no stream will touch.
  static void giveBack(Block* block) { block->done->set(block->turn); }

 private:
  Block* takeFree(std::uint64_t bytes, bool* anyLargeEnough, std::uint64_t* used);
  Status makeBlock(std::uint64_t bytes, Block** out);

  const Driver* driver_;
  CUcontext context_;
  MoverClient* mover_;
  std::uint64_t limit_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

/// Bytes of the block for an operation of `bytes`: of the sizes 4, 5, 6 and 7 times a power of two
/// the next one, at least 1 MiB, so that a few sizes serve all operations and less than a quarter
/// is lost.
std::uint64_t stagingBlockBytes(std::uint64_t bytes);

}  // namespace hoccl
