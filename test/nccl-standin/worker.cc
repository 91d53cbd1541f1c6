#include "worker.h"

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <system_error>
#include <utility>

namespace standin {
namespace {

/// A bound is looked at so often.
constexpr std::chrono::milliseconds kPatience{10};

}  // namespace

Outcome startThread(std::function<void()> body, std::thread* out) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Outcome outcome;
  try {
    *out = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    outcome = Outcome::error(ncclSystemError, fmt::format("no thread: {}", error.what()));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return outcome;
}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Outcome Worker::push(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) {
    if (Outcome started = startThread([this] { run(); }, &thread_); !started) return started;
  }
  queue_.push_back(std::move(work));
  ++pushed_;
  changed_.notify_all();
  return {};
}

Outcome Worker::drain(const Bound& bound, const char* what) {
  std::unique_lock lock(mutex_);
  const std::uint64_t all = pushed_;
  while (done_ < all) {
    if (Outcome over = bound.check(what); !over) return over;
    changed_.wait_for(lock, kPatience);
  }
  return {};
}

void Worker::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    {
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
    }
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

}  // namespace standin
