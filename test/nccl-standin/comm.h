#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "bootstrap.h"
#include "link.h"
#include "outcome.h"
#include "reduce.h"
#include "worker.h"

namespace standin {
struct Registration;
}

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

  // Used by one job or by the worker, one after the other.
  standin::Reception reception;
  std::vector<std::uint32_t> ports;  ///< of all ranks' receptions
  std::uint64_t children = 0;        ///< splits so far, alike on all ranks
  std::vector<standin::UniqueFd> peers;

  /// Of initialisation, and of what a non-blocking call has begun.
  std::atomic<ncclResult_t> state{ncclInProgress};
  /// The first error of an operation.
  std::atomic<ncclResult_t> error{ncclSuccess};
  std::atomic<bool> aborted{false};    ///< nothing of it goes on
  std::atomic<bool> cancelled{false};  ///< no operation of it goes on: aborted, revoked or shrunk
  std::atomic<bool> revoked{false};
  std::atomic<bool> finalized{false};
  std::atomic<int> users{0};  ///< threads inside a call that goes on
  std::thread work;           ///< of a non-blocking call

  std::mutex belongings;  ///< held for what follows
  std::map<int, standin::Scale> operators;
  int nextOperator = ncclNumOps;
  std::set<standin::Registration*> registrations;
  std::set<void*> windows;
  void* syncMemory = nullptr;  ///< behind the first symmetric window, as with NCCL
  bool copyEngines = false;    ///< the line about them is written

  standin::Worker worker;  ///< last: ends before what it uses

  static constexpr std::uint64_t kValid = 0x6d6d6f436c63636e;
};

namespace standin {

/// A new communicator in progress, with device and context of the calling thread.
ncclComm* newComm(int rank, int nranks);
/// Waits for its work, closes its connections, frees it. Operations that do not end in bounded time
/// are cancelled; a call that does not (a group never closed) keeps its communicator: it leaks.
void freeComm(ncclComm* comm);
/// Frees what the application has registered and left.
void dropBelongings(ncclComm* comm);
/// Whether the memory lies in a symmetric window of the communicator.
bool inSymmetricWindow(ncclComm* comm, const void* pointer);
/// NCCL's check at the top of most functions, with its call of ncclCommGetAsyncError through the
/// PLT.
ncclResult_t ensureReady(ncclComm* comm);
/// The same where an error of an earlier operation, which `state` tells, is no hindrance.
ncclResult_t ensureIdle(ncclComm* comm, ncclResult_t* state);
/// Remembers the text for ncclGetLastError (where there is one) and gives the code.
ncclResult_t report(const Outcome& outcome);
const char* lastError();

/// Keeps the communicator from being freed by an abort on another thread.
class Busy {
 public:
  explicit Busy(ncclComm* comm) : comm_(comm) { ++comm_->users; }
  Busy(Busy&& other) noexcept : comm_(std::exchange(other.comm_, nullptr)) {}
  Busy& operator=(Busy&&) = delete;
  ~Busy() {
    if (comm_) --comm_->users;
  }

 private:
  ncclComm* comm_;
};

/// One initialisation, split or flush: runs on `owner`'s thread, one after the other for the same
/// owner (the parent of a split, else the new communicator itself).
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
