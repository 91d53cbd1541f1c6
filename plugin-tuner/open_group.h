#pragma once

#include <nccl.h>

#include <memory>
#include <vector>

#include "plugin-tuner/launcher.h"
#include "plugin-tuner/passed_calls.h"

namespace hoccl {

/// A communicator whose creation NCCL finishes at the outermost ncclGroupEnd.
struct Creation {
  ncclComm_t* handle = nullptr;  ///< null: this rank only answers the roll call of a split
  AgreementKey key;
  Tail root;
  bool hasRoot = false;
  const char* whyNoRoot = nullptr;  ///< where it is not the unique id's
  std::shared_ptr<const RollCall> rollCall;
};

/// One thread's open group.
struct OpenGroup {
  int depth = 0;
  bool real = false;  ///< an operation or creation in it stays with NCCL
  ncclResult_t failed =
      ncclSuccess;       ///< the first call in it that failed: then none of it is launched
  bool refused = false;  ///< HOCCL failed a call, of which NCCL knows nothing
  Launcher launcher;
  std::vector<PassedCall> passed;  ///< its calls that NCCL makes between ranks that steer
  std::vector<Creation> creations;
};
/// This thread's.
OpenGroup& openGroup();

ncclResult_t groupStart();
ncclResult_t groupEnd();
/// As with NCCL the group is over afterwards and nothing of it has happened, unless `info` is null.
ncclResult_t groupSimulateEnd(ncclSimInfo_t* info);

/// A call that fails inside a group fails the group. Returns `result`, which is NCCL's.
ncclResult_t noteResult(ncclResult_t result);
/// The same of a call that HOCCL has answered.
ncclResult_t noteAnswer(ncclResult_t result);
/// Fails the communicators of a launch that could not be made, since their peers count it; logs
/// why.
Status launchFailed(const Status& status);

}  // namespace hoccl
