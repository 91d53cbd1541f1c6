#pragma once

#include <cuda.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <thread>

namespace hoccl::emu {

struct Stream;
class ChannelSet;

/// A device's primary context in this process; a CUcontext points to it. Lives as long as the
/// process.
struct Context {
  Context();
  ~Context();
  int ordinal = 0;
  int physical = 0;
  std::shared_ptr<Stream> legacy;        ///< stream 0 and CU_STREAM_LEGACY; set at the first retain
  std::unique_ptr<ChannelSet> channels;  ///< set at the first retain, like `legacy`
  std::atomic<unsigned> retained{0};
  std::mutex mutex;  ///< guards the members below, and changes of `retained`
  unsigned flags = 0;
  std::set<int> peers;                                           ///< ordinals this one may reach
  std::map<std::thread::id, std::shared_ptr<Stream>> perThread;  ///< CU_STREAM_PER_THREAD

  CUcontext handle() { return reinterpret_cast<CUcontext>(this); }
};

/// cuInit was called in this process (a forked child must not use its parent's driver).
bool initialised();
/// Number of devices visible to this process.
int deviceCount();
/// The context of an ordinal, active or not; null if there is no such device.
Context* contextOf(int ordinal);
/// The context behind a handle; null if it is none or was released.
Context* contextFrom(CUcontext handle);
/// The calling thread's current context; null if none.
Context* currentContext();
/// True if kernels and copies of `from` may use memory of `to` (ordinals).
bool peerEnabled(int from, int to);

/// Runs one driver call: nothing before cuInit, and no exception leaves the C interface.
template <typename Body>
CUresult driverCall(Body&& body) {
  if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  } catch (...) {
    return CUDA_ERROR_UNKNOWN;
  }
}

/// The same for calls that need a current context, which they get as argument.
template <typename Body>
CUresult contextCall(Body&& body) {
  return driverCall([&]() -> CUresult {
    Context* context = currentContext();
    if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (context->retained == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return body(*context);
  });
}

}  // namespace hoccl::emu
