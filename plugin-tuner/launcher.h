#pragma once

#include <nccl.h>

#include <cstdint>
#include <vector>

#include "common/gpu/driver.h"
#include "common/runtime/segment.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {

/// One steered operation of the group being built.
struct PendingOp {
  SteeredComm* comm = nullptr;
  CUstream stream = nullptr;
  OpDescriptor descriptor{};
};

/// A set of steered operations of one outermost group, issued in three steps, so that operations
/// left with NCCL can go between: starts, then the real ncclGroupEnd, then waits. Belongs to one
/// thread and keeps its memory between uses: the launch path allocates nothing.
class Launcher {
 public:
  Launcher();
  /// A new operation, all zero, to be filled in.
  PendingOp& add() { return ops_.emplace_back(); }
  [[nodiscard]] bool empty() const { return ops_.empty(); }
  [[nodiscard]] const std::vector<PendingOp>& ops() const { return ops_; }
  void clear();
  /// Whether a communicator of these operations has been aborted meanwhile.
  [[nodiscard]] bool aborted() const;

  /// Starts, hands the operations to their movers, and waits. `current` is the
  /// context the caller has made current, if it knows.
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
  };
  Status prepare();
  Status begin(bool waitToo, CUcontext current);
  Status issue(StreamLaunch& launch, bool start, bool wait, CUcontext current);
  void handOver();
  void giveUp();

  const Driver* driver_ = nullptr;
  std::vector<PendingOp> ops_;
  std::vector<StreamLaunch> streams_;
  bool waiting_ = false;                   ///< the stream waits already
  std::vector<MoverClient::Slot*> slots_;  ///< scratch
};

}  // namespace hoccl
