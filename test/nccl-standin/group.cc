#include "group.h"

#include <utility>

#include "launch.h"

namespace standin {
namespace {

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;
  std::vector<Job> jobs;
  std::vector<Operation> operations;
};
thread_local Group group;

}  // namespace

int groupDepth() { return group.depth; }

void groupBegin() { ++group.depth; }

ncclResult_t groupFinish() {
  if (group.depth == 0) {
    return report(Outcome::error(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart"));
  }
  if (--group.depth > 0) return ncclSuccess;
  Group ended = std::move(group);
  group = {};
  ncclResult_t result = ended.error;
  if (result != ncclSuccess) {
    // As with NCCL, nothing of a group with an error is done.
    for (Job& job : ended.jobs) {
      if (!job.comm) continue;
      job.comm->state = result;
      if (job.newcomm && job.owner->blocking) {
        *job.newcomm = nullptr;
        freeComm(job.comm);
      }
    }
    return result;
  }
  if (!ended.jobs.empty()) result = runJobs(std::move(ended.jobs));
  if (result != ncclSuccess && result != ncclInProgress) return result;
  if (!ended.operations.empty()) {
    const ncclResult_t done = report(execute(std::move(ended.operations)));
    if (done != ncclSuccess) result = done;
  }
  return result;
}

ncclResult_t groupSimulate(float* microseconds) {
  constexpr float kLatencyUs = 10, kUsPerByte = 1e-4;
  *microseconds = kLatencyUs;
  for (const Operation& op : group.operations) {
    *microseconds += kUsPerByte * static_cast<float>(bytesIn(op) + bytesOut(op));
  }
  if (group.depth == 1) group.operations.clear();
  return groupFinish();
}

ncclResult_t submit(Job job) {
  if (group.depth == 0) return runJobs({std::move(job)});
  group.jobs.push_back(std::move(job));
  return ncclSuccess;
}

ncclResult_t submit(Operation operation) {
  if (group.depth == 0) return report(execute({std::move(operation)}));
  group.operations.push_back(std::move(operation));
  return ncclSuccess;
}

ncclResult_t failInGroup(ncclResult_t code) {
  if (group.depth > 0 && group.error == ncclSuccess) group.error = code;
  return code;
}

}  // namespace standin
