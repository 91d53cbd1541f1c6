// Memory: allocation, registration, windows.
#include <cstdlib>
#include <mutex>
#include <set>
#include <vector>

#include "call_log.h"
#include "comm.h"
#include "driver.h"

namespace standin {

/// What ncclCommRegister's handle points at.
struct Registration {
  void* buffer;
  std::size_t size;
};

namespace {

constexpr std::size_t kHostAlignment = 4096;
constexpr std::size_t kSyncBytes = 4096;

/// What a window handle points at.
struct Window {
  Registration* registration;
  bool symmetric;
};

/// What ncclMemAlloc took from the host, for ncclMemFree.
struct HostMemory {
  std::mutex mutex;
  std::set<void*> pointers;
};
HostMemory& hostMemory() {
  static HostMemory* const made = new HostMemory;
  return *made;
}

}  // namespace

void dropBelongings(ncclComm* comm) {
  std::vector<void*> windows;
  {
    const std::lock_guard lock(comm->belongings);
    windows.assign(comm->windows.begin(), comm->windows.end());
  }
  // Through the PLT, as NCCL drops its own window and the application's.
  for (void* window : windows) ncclCommWindowDeregister(comm, static_cast<ncclWindow_t>(window));
  if (comm->syncMemory) ncclMemFree(comm->syncMemory);
  for (Registration* registration : comm->registrations) delete registration;
}

bool inSymmetricWindow(ncclComm* comm, const void* pointer) {
  const std::lock_guard lock(comm->belongings);
  for (const void* each : comm->windows) {
    const auto* window = static_cast<const Window*>(each);
    const auto* begin = static_cast<const char*>(window->registration->buffer);
    if (window->symmetric && pointer >= begin && pointer < begin + window->registration->size) {
      return true;
    }
  }
  return false;
}

}  // namespace standin

using standin::record;

extern "C" {

ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t size, void** handle) {
  record("ncclCommRegister", {.comm = comm, .bytes = size});
  if (const ncclResult_t ready = standin::ensureReady(comm); ready != ncclSuccess) return ready;
  if (!handle || !buffer) return ncclInvalidArgument;
  auto* made = new standin::Registration{buffer, size};
  const std::lock_guard lock(comm->belongings);
  comm->registrations.insert(made);
  *handle = made;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void* handle) {
  record("ncclCommDeregister", {.comm = comm});
  ncclResult_t state = ncclSuccess;
  if (const ncclResult_t idle = standin::ensureIdle(comm, &state); idle != ncclSuccess) return idle;
  auto* registration = static_cast<standin::Registration*>(handle);
  const std::lock_guard lock(comm->belongings);
  if (!comm->registrations.erase(registration)) return ncclInvalidArgument;
  delete registration;
  return ncclSuccess;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buffer, size_t size,
                                    ncclWindow_t* window, int flags) {
  record("ncclCommWindowRegister", {.comm = comm, .bytes = size});
  if (const ncclResult_t ready = standin::ensureReady(comm); ready != ncclSuccess) return ready;
  if (!window || !buffer || (flags & ~NCCL_WIN_COLL_SYMMETRIC) != 0) return ncclInvalidArgument;
  *window = nullptr;
  if (flags & NCCL_WIN_COLL_SYMMETRIC && !comm->syncMemory) {
    // NCCL's copy-engine collectives allocate a window of their own.
    if (const ncclResult_t made = ncclMemAlloc(&comm->syncMemory, standin::kSyncBytes);
        made != ncclSuccess) {
      return made;
    }
  }
  void* registration = nullptr;
  if (const ncclResult_t made = ncclCommRegister(comm, buffer, size, &registration);
      made != ncclSuccess) {
    return made;
  }
  auto* made = new standin::Window{static_cast<standin::Registration*>(registration),
                                   (flags & NCCL_WIN_COLL_SYMMETRIC) != 0};
  const std::lock_guard lock(comm->belongings);
  comm->windows.insert(made);
  *window = reinterpret_cast<ncclWindow_t>(made);
  return ncclSuccess;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  record("ncclCommWindowDeregister", {.comm = comm});
  ncclResult_t state = ncclSuccess;
  if (const ncclResult_t idle = standin::ensureIdle(comm, &state); idle != ncclSuccess) return idle;
  if (!window) return ncclSuccess;
  {
    const std::lock_guard lock(comm->belongings);
    if (!comm->windows.erase(window)) return ncclInvalidArgument;
  }
  auto* known = reinterpret_cast<standin::Window*>(window);
  const ncclResult_t result = ncclCommDeregister(comm, known->registration);
  delete known;
  return result;
}

ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  record("ncclMemAlloc", {.bytes = size});
  if (!pointer) return ncclInvalidArgument;
  *pointer = nullptr;
  if (size == 0) return ncclSuccess;
  if ((*pointer = standin::Driver::get().allocate(size))) return ncclSuccess;
  if (standin::Driver::get().currentContext()) return ncclUnhandledCudaError;
  if (posix_memalign(pointer, standin::kHostAlignment, size) != 0) return ncclSystemError;
  auto& host = standin::hostMemory();
  const std::lock_guard lock(host.mutex);
  host.pointers.insert(*pointer);
  return ncclSuccess;
}

ncclResult_t ncclMemFree(void* pointer) {
  record("ncclMemFree");
  if (!pointer) return ncclSuccess;
  auto& host = standin::hostMemory();
  const std::lock_guard lock(host.mutex);
  if (host.pointers.erase(pointer)) {
    std::free(pointer);
    return ncclSuccess;
  }
  return standin::Driver::get().release(pointer) ? ncclSuccess : ncclInvalidArgument;
}
}
