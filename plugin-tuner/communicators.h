#pragma once

#include <nccl.h>

#include <vector>

#include "plugin-tuner/open_group.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {

/// The intercepted functions about communicators; each does what NCCL's of that name does.
ncclResult_t getUniqueId(ncclUniqueId* id);
ncclResult_t commInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t commInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                ncclConfig_t* config);
ncclResult_t commInitRankScalable(ncclComm_t* comm, int ranks, int rank, int idCount,
                                  ncclUniqueId* ids, ncclConfig_t* config);
ncclResult_t commInitAll(ncclComm_t* comms, int count, const int* devices);
ncclResult_t commSplit(ncclComm_t parent, int color, int key, ncclComm_t* comm,
                       ncclConfig_t* config);
ncclResult_t commShrink(ncclComm_t parent, int* excluded, int excludedCount, ncclComm_t* comm,
                        ncclConfig_t* config, int flags);
ncclResult_t commGetUniqueId(ncclComm_t parent, ncclUniqueId* id);
ncclResult_t commGrow(ncclComm_t parent, int ranks, const ncclUniqueId* id, int rank,
                      ncclComm_t* comm, ncclConfig_t* config);
ncclResult_t commRevoke(ncclComm_t comm, int flags);
ncclResult_t commFinalize(ncclComm_t comm);
ncclResult_t commDestroy(ncclComm_t comm);
ncclResult_t commAbort(ncclComm_t comm);
ncclResult_t commGetAsyncError(ncclComm_t comm, ncclResult_t* error);
const char* getLastError(ncclComm_t comm);

/// Registers a communicator NCCL has created and begins to agree about it. Null if there are too
/// many.
SteeredComm* adoptCommunicator(ncclComm_t handle, const Creation& creation);
/// Waits for the verdict on communicators that were created blocking. Bounded by the agreement.
ncclResult_t finishSetups(const std::vector<SteeredComm*>& comms);

}  // namespace hoccl
