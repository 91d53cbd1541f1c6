#pragma once

// Copy lanes without a GPU: lanes whose jobs the test ends itself, and the copy engines of one fake
// GPU, a thread that ends the jobs of all its lanes.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <semaphore>
#include <thread>
#include <vector>

#include "common/base/flag.h"
#include "common/base/status.h"
#include "common/gpu/lane.h"
#include "common/runtime/spsc_queue.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fakes.h"

namespace hoccl::test {

inline void setFlagAt(const FlagWrite& write) {
  if (write.address) reinterpret_cast<Flag*>(write.address)->set(write.value);
}

inline void copyOf(LaneDirection direction, const LaneJob& job) {
  auto* device = job.staging ? job.staging : reinterpret_cast<std::byte*>(job.device);
  if (direction == LaneDirection::ToHost) {
    std::memcpy(job.host, device, job.bytes);
  } else if (direction == LaneDirection::Peer) {
    auto* peer = reinterpret_cast<std::byte*>(job.peer);
    std::memcpy(job.fromPeer ? device : peer, job.fromPeer ? peer : device, job.bytes);
    peerCopies().fetch_add(1, std::memory_order_release);
  } else {
    std::memcpy(device, job.host, job.bytes);
  }
}

/// A lane whose jobs end when the test says so. One thread.
class ManualLane final : public Lane {
 public:
  explicit ManualLane(LaneDirection direction) : direction_(direction) {}
  Status submit(const LaneJob& job) override {
    if (fail) return Status::error(Code::Cuda, "fake lane refuses");
    jobs_.push_back(job);
    ++submitted;
    return {};
  }
  void useScratch(CUdeviceptr) override {}
  /// Ends the oldest job; false when there is none.
  bool completeOne() {
    if (jobs_.empty()) return false;
    const LaneJob job = jobs_.front();
    jobs_.pop_front();
    copyOf(direction_, job);
    for (const FlagWrite& write : job.writes) setFlagAt(write);
    return true;
  }
  [[nodiscard]] std::size_t pending() const { return jobs_.size(); }

  bool fail = false;
  std::uint64_t submitted = 0;

 private:
  LaneDirection direction_;
  std::deque<LaneJob> jobs_;
};

/// The copy engines of one fake GPU: a thread that ends the jobs of its lanes, in order within a
/// lane, in random order among lanes, and can be held.
class CopyEngines {
 public:
  explicit CopyEngines(std::uint32_t seed) : rng_(seed) {}
  ~CopyEngines() {
    stop_.store(true);
    work_.release();
    if (thread_.joinable()) thread_.join();
  }
  /// Once all lanes are there.
  void start() {
    thread_ = std::thread([this] { run(); });
  }
  /// A new lane; it must not outlive this object.
  std::unique_ptr<Lane> lane(LaneDirection direction) {
    queues_.push_back(std::make_unique<Queue>(direction));
    return std::make_unique<QueueLane>(this, queues_.back().get());
  }
  void hold(bool held) {
    held_.store(held);
    work_.release();
  }
  /// Copies into the device alone.
  void holdIn(bool held) {
    inHeld_.store(held);
    work_.release();
  }
  /// Jobs to let through although held.
  void letThrough(std::uint64_t jobs) {
    tickets_.fetch_add(jobs);
    work_.release();
  }

  std::atomic<std::uint64_t> submitted{0}, ended{0};
  std::atomic<std::uint64_t> shortest{~0ull};
  std::atomic<std::uint32_t> jitterUs{0};   ///< longest random pause before a job
  std::atomic<std::uint32_t> betweenUs{0};  ///< pause between a job's first and second flag
  std::atomic<bool> refuse{false};          ///< every further submission fails

 private:
  struct Queue {
    explicit Queue(LaneDirection d) : direction(d) {}
    LaneDirection direction;
    SpscQueue<LaneJob> jobs{256};
  };
  class QueueLane final : public Lane {
   public:
    QueueLane(CopyEngines* engines, Queue* queue) : engines_(engines), queue_(queue) {}
    Status submit(const LaneJob& job) override {
      if (engines_->refuse.load()) return Status::error(Code::Cuda, "fake engines refuse");
      LaneJob copy = job;
      engines_->submitted.fetch_add(1);
      if (job.bytes < engines_->shortest.load()) engines_->shortest.store(job.bytes);
      if (!queue_->jobs.tryPush(copy)) return Status::error(Code::Internal, "lane overrun");
      engines_->work_.release();
      return {};
    }
    void useScratch(CUdeviceptr) override {}

   private:
    CopyEngines* engines_;
    Queue* queue_;
  };

  void run() {
    while (!stop_.load()) {
      (void)work_.try_acquire_for(std::chrono::milliseconds(50));
      while (!stop_.load() && one()) {
      }
    }
  }
  bool one() {
    if (held_.load() && tickets_.load() == 0) return false;
    const std::size_t first = pick(rng_, 0, queues_.size() - 1);
    for (std::size_t i = 0; i < queues_.size(); ++i) {
      Queue& queue = *queues_[(first + i) % queues_.size()];
      LaneJob job;
      if (queue.direction == LaneDirection::ToDevice && inHeld_.load()) continue;
      if (!queue.jobs.tryPop(&job)) continue;
      if (held_.load()) tickets_.fetch_sub(1);
      if (const std::uint32_t jitter = jitterUs.load()) {
        ::usleep(static_cast<useconds_t>(pick(rng_, 0, jitter)));
      }
      copyOf(queue.direction, job);
      setFlagAt(job.writes[0]);
      if (const std::uint32_t between = betweenUs.load(); between && job.writes[0].address) {
        ::usleep(between);
      }
      setFlagAt(job.writes[1]);
      ended.fetch_add(1);
      return true;
    }
    return false;
  }

  Rng rng_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::counting_semaphore<> work_{0};
  std::atomic<bool> stop_{false}, held_{false}, inHeld_{false};
  std::atomic<std::uint64_t> tickets_{0};
  std::thread thread_;
};

}  // namespace hoccl::test
