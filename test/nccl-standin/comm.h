#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "link.h"
#include "outcome.h"

/// A communicator as the application holds it.
struct ncclComm {
  std::uint64_t valid = kValid;  ///< cleared on destruction, so that a stale handle is noticed
  std::uint64_t serial = 0;      ///< counts the communicators of this process from 1
  int rank = 0;
  int nranks = 0;
  int device = 0;
  void* context = nullptr;  ///< CUDA's; null: every pointer is host memory
  bool blocking = true;
  std::uint64_t magic = 0;
  std::uint64_t children = 0;  ///< splits so far, alike on all ranks
  std::vector<standin::UniqueFd> peers;

  std::atomic<ncclResult_t> state{ncclInProgress};
  std::atomic<bool> aborted{false};
  std::atomic<int> users{0};  ///< threads inside an operation
  std::mutex use;             ///< held while something goes over `peers`
  std::thread work;           ///< of a non-blocking call

  static constexpr std::uint64_t kValid = 0x6d6d6f436c63636e;
};

namespace standin {

/// A new communicator in progress, with device and context of the calling thread.
ncclComm* newComm(int rank, int nranks);
/// Waits for its work, closes its connections, frees it. Work that does not end in bounded time (a
/// group never closed) keeps its communicator: it leaks.
void freeComm(ncclComm* comm);
/// NCCL's check at the top of most functions, with its call of ncclCommGetAsyncError through the
/// PLT.
ncclResult_t ensureReady(ncclComm* comm);
/// Remembers the text for ncclGetLastError (where there is one) and gives the code.
ncclResult_t report(const Outcome& outcome);
const char* lastError();

/// One initialisation or split: runs on `owner`'s thread, one after the other for the same owner
/// (the parent of a split, else the new communicator itself).
struct Job {
  ncclComm* owner;
  ncclComm* comm;       ///< that it makes; may be null
  ncclComm_t* newcomm;  ///< set to NULL when it fails on a blocking communicator; may be null
  std::function<Outcome()> run;
};
/// Runs them all at once. Blocking: the first error. Otherwise ncclInProgress, and the result shows
/// in the communicators' states.
ncclResult_t runJobs(std::vector<Job> jobs);

}  // namespace standin
