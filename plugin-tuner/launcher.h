#pragma once

#include <nccl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "common/gpu/driver.h"
#include "common/runtime/segment.h"
#include "common/runtime/staging_pool.h"
#include "plugin-tuner/own_blocks.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {

/// A copy that the application's own stream makes between a buffer no mover can map and a block of
/// staging memory (application-side copies).
struct AppCopy {
  StagingPool::Block* block = nullptr;
  CUdeviceptr buffer = 0;
  std::uint64_t offset = 0;  ///< in the block's data
  std::uint64_t bytes = 0;
  bool out = false;   ///< from the buffer, before the start; else into it, after the wait
  bool host = false;  ///< the buffer lies in host memory
};

/// One steered operation of the group being built.
struct PendingOp {
  SteeredComm* comm = nullptr;
  CUstream stream = nullptr;
  OpDescriptor descriptor{};
  SpanSlot* span = nullptr;  ///< pinned for it, until it is handed over
  CUdeviceptr address = 0;   ///< of the bytes, where no application-side copy stands between
  bool staysOwn = false;     ///< of the rank with itself, and its communicator's are not copied
};

/// A set of steered operations of one outermost group, issued in three steps, so that operations
/// left with NCCL can go between: starts, then the real ncclGroupEnd, then waits. Belongs to one
/// thread and keeps its memory between uses: the launch path allocates nothing.
class Launcher {
 public:
  Launcher();
  ~Launcher();
  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;
  /// A new operation, all zero, to be filled in.
  PendingOp& add() { return ops_.emplace_back(); }
  [[nodiscard]] bool empty() const { return ops_.empty(); }
  [[nodiscard]] const std::vector<PendingOp>& ops() const { return ops_; }
  /// A block that this launch uses on one stream; it is free again when the stream is through, or
  /// when the launch is not made.
  void add(SteeredComm* comm, CUstream stream, StagingPool::Block* block) {
    blocks_.push_back({comm, stream, block, false, false});
  }
  [[nodiscard]] bool holdsBlocks() const { return !blocks_.empty(); }
  /// A copy of a block added before.
  void add(SteeredComm* comm, CUstream stream, const AppCopy& copy) {
    copies_.push_back({comm, stream, copy});
    for (StagedBlock& each : blocks_) each.comesIn |= each.block == copy.block && !copy.out;
  }
  /// A block that a stream of this launch copies by itself.
  void add(const OwnBlock& block) { ownBlocks_.push_back(block); }
  void clear();
  /// Whether a communicator of these operations has been aborted meanwhile.
  [[nodiscard]] bool aborted() const;

  /// Starts, hands the operations to their movers, and waits. `current` is the
  /// context the caller has made current, or whose streams name it themselves.
  Status launch(CUcontext current = nullptr);
  /// The same in two halves.
  Status start();
  Status wait();

 private:
  /// All operations on one stream of one mover.
  struct StreamLaunch {
    MoverClient* mover = nullptr;
    StreamWaits* waits = nullptr;
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    MoverClient::Slot slot;
    bool issued = false;

    /// Whether an operation, block or copy belongs to it.
    template <typename Each>
    [[nodiscard]] bool has(const Each& each) const {
      return each.comm->mover == mover && each.stream == stream;
    }
  };
  struct StagedBlock {
    SteeredComm* comm;
    CUstream stream;
    StagingPool::Block* block;
    bool onStream;  ///< the stream or a mover may be using it
    bool comesIn;   ///< copied out of after the wait
  };
  struct StagedCopy {
    SteeredComm* comm;
    CUstream stream;
    AppCopy copy;
  };
  Status copyOut(const StreamLaunch& launch);
  Status copyOwnBlocks(const StreamLaunch& launch);
  void noteLaunch(const StreamLaunch& launch);
  Status copyIn(const StreamLaunch& launch);
  Status copyAllIn();
  [[nodiscard]] bool copies(const StreamLaunch& launch, bool out) const;
  Status joinStreams(bool before);
  Status event(CUcontext context, CUevent* out);
  Status enqueue(const AppCopy& copy, CUstream stream) const;
  Status prepare();
  Status begin(bool waitToo, CUcontext current);
  Status issue(StreamLaunch& launch, bool start, bool wait, CUcontext current);
  void claim();
  void handOver();
  void handOverNothing();
  void giveUp();

  const Driver* driver_ = nullptr;
  std::vector<PendingOp> ops_;
  std::vector<StreamLaunch> streams_;
  std::vector<StagedBlock> blocks_;
  std::vector<StagedCopy> copies_;
  std::vector<OwnBlock> ownBlocks_;
  std::vector<std::pair<CUcontext, CUevent>> events_;  ///< kept; few; other threads' after this one
  bool waiting_ = false;                               ///< the stream waits already
  std::vector<MoverClient::Slot*> slots_;              ///< scratch
  std::optional<std::uint64_t> place_;                 ///< in the op ring, of the only operation
};

}  // namespace hoccl
