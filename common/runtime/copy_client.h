#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "common/base/config.h"
#include "common/base/fd.h"
#include "common/base/shared_memory.h"
#include "common/gpu/driver.h"
#include "common/runtime/copy_segment.h"

namespace hoccl {

/// The application's side of a mover that only copies (`hoccl-mover --copies`): between staging
/// slots and the application's device memory, for whoever moves the slots' bytes on. After `start`
/// it makes no CUDA call. Any thread, except where said.
class CopyClient {
 public:
  /// Starts a mover for the context's GPU, with `stagingBytes` of slots, half of them for each
  /// direction. Waits for it, HOCCL_TIMEOUT_MS at most.
  static Status start(const Driver* driver, CUcontext context, const Config& config,
                      std::unique_ptr<CopyClient>* out);
  ~CopyClient();
  CopyClient(const CopyClient&) = delete;
  CopyClient& operator=(const CopyClient&) = delete;

  // --- Imports: memory that copies may name. Neither call waits or makes a system call; the mover
  // hears of them at the next `flush` and maps them then, while copies of them wait there.
  Status importHandle(CUdeviceptr base, std::uint64_t bytes, const CUipcMemHandle& handle,
                      std::uint64_t* id);
  Status importSegment(CUdeviceptr base, std::uint64_t bytes, UniqueFd segment, std::uint64_t* id);
  /// The mover unmaps it when its copies are over; copies asked for later fail. Waits until nothing
  /// is mapped, or the mover is dead, or HOCCL_TIMEOUT_MS.
  void drop(std::span<const std::uint64_t> ids);

  // --- Slots.
  enum class Direction { ToHost, ToDevice };
  static constexpr std::uint32_t kNoSlot = ~0u;
  /// A free slot of that direction, or kNoSlot. Those that hold a slot for something that may take
  /// long must leave half of them to those that do not (`spare`).
  [[nodiscard]] std::uint32_t take(Direction direction, bool spare);
  /// Its copy, if any, may still be under way; the slot is then given out again when it is over.
  void giveBack(std::uint32_t slot);
  [[nodiscard]] std::byte* memory(std::uint32_t slot) const { return segment_.staging(slot); }
  /// Has the slot copied, in the direction it was taken for. Its holder only, once at a time.
  void copy(std::uint32_t slot, std::span<const CopyPiece> pieces);
  /// The slot's copy is over.
  [[nodiscard]] bool over(std::uint32_t slot) const;
  /// Once it is over: why it was not made.
  [[nodiscard]] Status outcome(std::uint32_t slot) const;

  /// False once the mover has ended; looks at most every few milliseconds. What is pending then
  /// stays so.
  [[nodiscard]] bool alive();
  /// Why it is not.
  [[nodiscard]] Status whyDead() const;
  /// Tells the mover of imports it has not heard of.
  void flush();

  [[nodiscard]] CUdevice device() const { return device_; }
  [[nodiscard]] CUcontext context() const { return context_; }
  [[nodiscard]] const std::string& gpuUuid() const { return gpuUuid_; }
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] std::uint32_t slots() const { return segment_.slots(); }
  [[nodiscard]] const CopyHeader& counters() const { return segment_.header(); }

 private:
  CopyClient() = default;
  struct Waiting {
    CopyMessage message;
    UniqueFd segment;
  };
  struct Pool {
    std::vector<std::uint32_t> free;
    std::vector<std::uint32_t> parting;  ///< given back while their copy was under way
    std::uint32_t total = 0;
  };
  Status greet(std::uint64_t timeoutMs);
  Status import(CopyMessage message, UniqueFd segment, std::uint64_t* id);
  void queue(CopyMessage message, UniqueFd segment);
  void flushHeld();
  void ring();
  [[nodiscard]] Pool& poolOf(std::uint32_t slot) {
    return pools_[slot < segment_.slots() / 2 ? 0 : 1];
  }

  CUcontext context_ = nullptr;
  CUdevice device_ = 0;
  std::string gpuUuid_;
  std::uint64_t timeoutMs_ = 0;
  SharedMemory memory_;
  CopySegment segment_;
  UniqueFd bell_, socket_, pidfd_;
  pid_t pid_ = -1;

  std::mutex control_;  ///< the socket and what waits for it
  std::deque<Waiting> outbox_;
  std::atomic<bool> waiting_{false};  ///< something is in it
  std::uint64_t nextImport_ = 1;
  std::vector<bool> used_ = std::vector<bool>(kMaxCopyImports);  ///< places of imports
  std::uint32_t imports_ = 0;
  bool silent_ = false;  ///< the last drop ran out of time

  std::mutex slots_;
  Pool pools_[2];                     ///< by direction
  std::vector<std::uint64_t> turns_;  ///< by slot: of its last copy
  std::atomic<bool> dead_{false};
  std::atomic<std::uint64_t> lookedNs_{0};
};

}  // namespace hoccl
