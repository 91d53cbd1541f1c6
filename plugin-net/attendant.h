#pragma once

// A thread that looks after connections with queue pairs while nobody calls them: it makes new
// queue pairs for ones that have failed (which may wait), and answers a peer that has lost one.
// Without it a peer would wait for an answer until this side's next call, which may never come. One
// thread for all connections of the process; there is none while there are no such connections.
//
// It and the caller take turns without waiting: who does not get the turn comes again.

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace hoccl::net_plugin {

class Attended {
 public:
  Attended() = default;
  Attended(const Attended&) = delete;
  Attended& operator=(const Attended&) = delete;

 protected:
  virtual ~Attended() = default;
  /// Everything below is called by the thread, between `join` and `leave`; the first three in its
  /// turn.
  virtual void attend() = 0;
  /// There is something to do, and time matters.
  [[nodiscard]] virtual bool uneasy() const = 0;
  [[nodiscard]] virtual int controlFd() = 0;  ///< readable: the peer says something; -1: none
  [[nodiscard]] virtual int workFd() = 0;     ///< readable: `work` has something to do
  virtual void work() = 0;                    ///< may wait; at any time

  void join();
  /// The thread does not touch this any more. Before anything is taken down.
  void leave();

  /// The caller's turn, for one call.
  class Turn {
   public:
    /// `await`: until it is had, which takes the thread's microseconds; else there may be none.
    explicit Turn(Attended& attended, bool await = false)
        : attended_(attended), mine_(take(attended, await)) {
      if (mine_) attended_.turns_.fetch_add(1, std::memory_order_relaxed);
    }
    ~Turn() {
      if (mine_) attended_.taken_.store(false, std::memory_order_release);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    explicit operator bool() const { return mine_; }

   private:
    static bool take(Attended& attended, bool await) {
      while (attended.taken_.exchange(true, std::memory_order_acquire)) {
        if (!await) return false;
        std::this_thread::yield();
      }
      return true;
    }
    Attended& attended_;
    const bool mine_;
  };

 private:
  friend class Attendant;
  std::atomic<bool> taken_{false};
  std::atomic<std::uint64_t> turns_{0};
  std::shared_ptr<struct Entry> entry_;
};

}  // namespace hoccl::net_plugin
