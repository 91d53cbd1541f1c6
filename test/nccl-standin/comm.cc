#include "comm.h"

#include <fmt/format.h>

#include <cstring>
#include <map>

#include "driver.h"
#include "launch.h"

namespace standin {
namespace {

std::atomic<std::uint64_t> nextSerial{1};

struct LastError {
  std::mutex mutex;
  char text[1024] = "";
};
LastError& last() {
  static LastError* const made = new LastError;
  return *made;
}

/// The jobs of one owner, in order. The states change only when all are done: the owner is busy
/// until then.
void runInOrder(std::vector<Job>& jobs, std::vector<Outcome>& outcomes) {
  for (Job& job : jobs) outcomes.push_back(job.run());
}

void settle(std::vector<Job>& jobs, const std::vector<Outcome>& outcomes) {
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    report(outcomes[i]);
    if (jobs[i].comm) jobs[i].comm->state = outcomes[i].code;
    // A failed split leaves the parent's connections in an unknown state.
    if (jobs[i].owner != jobs[i].comm) jobs[i].owner->state = outcomes[i].code;
  }
}

}  // namespace

ncclComm* newComm(int rank, int nranks) {
  auto* comm = new ncclComm;
  comm->serial = nextSerial++;
  comm->rank = rank;
  comm->nranks = nranks;
  comm->context = Driver::get().currentContext();
  comm->device = Driver::get().currentDevice();
  return comm;
}

void freeComm(ncclComm* comm) {
  if (comm->work.joinable()) comm->work.join();
  // A split still under way on the parent's thread, or another thread's call that has yet to
  // notice an abort, ends by its own bounds; the operations when the streams reach them.
  const Bound bound(&comm->cancelled, 2 * timeout());
  report(comm->worker.drain(bound, "the communicator's last operations"));
  comm->cancelled = true;
  const Bound last(nullptr, 2 * timeout());
  while (comm->state == ncclInProgress || comm->users > 0) {
    if (Outcome over = last.check("the communicator's last call"); !over) {
      report(over);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  dropBelongings(comm);
  comm->valid = 0;
  reapLaunches(comm->context);
  delete comm;
}

ncclResult_t ensureReady(ncclComm* comm) {
  ncclResult_t state = ncclSuccess;
  if (const ncclResult_t idle = ensureIdle(comm, &state); idle != ncclSuccess) return idle;
  return state;
}

ncclResult_t ensureIdle(ncclComm* comm, ncclResult_t* state) {
  if (!comm || comm->valid != ncclComm::kValid) {
    return report(Outcome::error(ncclInvalidArgument, "no communicator, or one already destroyed"));
  }
  ncclCommGetAsyncError(comm, state);
  if (*state != ncclInProgress) return ncclSuccess;
  return report(Outcome::error(ncclInvalidArgument,
                               "communicator used before its previous operation returned success"));
}

ncclResult_t report(const Outcome& outcome) {
  if (!outcome && !outcome.text.empty()) {
    const std::lock_guard lock(last().mutex);
    std::strncpy(last().text, outcome.text.c_str(), sizeof last().text - 1);
  }
  return outcome.code;
}

const char* lastError() { return last().text; }

ncclResult_t runJobs(std::vector<Job> jobs) {
  std::map<ncclComm*, std::vector<Job>> byOwner;
  bool blocking = true;
  for (Job& job : jobs) {
    blocking = blocking && job.owner->blocking;
    byOwner[job.owner].push_back(job);
  }
  if (!blocking) {
    for (auto& [owner, mine] : byOwner) {
      owner->state = ncclInProgress;
      if (owner->work.joinable()) owner->work.join();
    }
    for (auto& [owner, mine] : byOwner) {
      Outcome started = startThread(
          [mine]() mutable {
            std::vector<Outcome> outcomes;
            runInOrder(mine, outcomes);
            settle(mine, outcomes);
          },
          &owner->work);
      if (!started) settle(mine, std::vector<Outcome>(mine.size(), started));
    }
    return ncclInProgress;
  }
  std::vector<Busy> busy;
  for (Job& job : jobs) {
    busy.emplace_back(job.owner);
    if (job.comm && job.comm != job.owner) busy.emplace_back(job.comm);
  }
  std::map<ncclComm*, std::vector<Outcome>> outcomes;
  for (auto& [owner, mine] : byOwner) outcomes[owner];
  std::vector<std::thread> threads;
  // The first one on this thread.
  for (auto it = byOwner.begin(); it != byOwner.end(); ++it) {
    if (it == byOwner.begin()) continue;
    threads.emplace_back(
        [&mine = it->second, &results = outcomes[it->first]] { runInOrder(mine, results); });
  }
  if (!byOwner.empty()) runInOrder(byOwner.begin()->second, outcomes[byOwner.begin()->first]);
  for (std::thread& thread : threads) thread.join();
  for (auto& [owner, mine] : byOwner) settle(mine, outcomes[owner]);
  busy.clear();
  ncclResult_t result = ncclSuccess;
  for (auto& [owner, mine] : byOwner) {
    const std::vector<Outcome>& results = outcomes[owner];
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (results[i]) continue;
      if (result == ncclSuccess) result = results[i].code;
      if (mine[i].newcomm && mine[i].comm) {
        *mine[i].newcomm = nullptr;
        freeComm(mine[i].comm);
      }
    }
  }
  return result;
}

}  // namespace standin
