#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "link.h"
#include "outcome.h"

namespace standin {

/// A thread that takes no signals of the application's.
Outcome startThread(std::function<void()> body, std::thread* out);

/// Does the operations of one communicator, one after the other in the order of the calls, as NCCL
/// orders its kernels. Its thread makes no CUDA call: none of the application's can hold it up. It
/// starts with the first piece of work.
class Worker {
 public:
  Worker() = default;
  /// Ends the thread; what is queued is done first.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  Outcome push(std::function<void()> work);
  /// Returns when all work pushed before is done, or with the bound's error.
  Outcome drain(const Bound& bound, const char* what);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t pushed_ = 0, done_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace standin
