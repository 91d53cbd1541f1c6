#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm.h"
#include "outcome.h"

namespace standin {

/// Refuses a call's arguments, and with it the group around it.
ncclResult_t invalid(const std::string& text);
/// An error where the caller did not start from NCCL_CONFIG_INITIALIZER, or asks for what there is
/// not.
ncclResult_t checkConfig(const char* function, const ncclConfig_t* config);
bool wantsBlocking(const ncclConfig_t* config, bool otherwise);

/// A call that makes a communicator from unique ids, recorded under the function's name.
ncclResult_t initRank(const char* function, ncclComm_t* newcomm, int nranks,
                      const std::vector<ncclUniqueId>& ids, int rank, const ncclConfig_t* config,
                      const int* device);

/// A communicator that inherits from its parent, but for the ranks.
ncclComm* newChild(const ncclComm& parent, const ncclConfig_t* config);
/// The child of those `members` (ranks of the parent, ascending, this one among them) that have
/// this rank's color. `child` is null where this rank has none.
Outcome makeChild(ncclComm* parent, ncclComm* child, const std::vector<int>& members, int color,
                  int key);
/// The child of all the parent's ranks and new ones, which meet by the id that one of the parent's
/// ranks has.
Outcome growParent(ncclComm* parent, ncclComm* child, const std::optional<ncclUniqueId>& id);

}  // namespace standin
