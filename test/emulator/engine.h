#pragma once

#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "test/emulator/channel.h"
#include "test/emulator/context.h"
#include "test/emulator/memory.h"
#include "test/emulator/settings.h"

namespace hoccl::emu {

inline constexpr int kSms = 132;  // H200

// FACTS 4: up to here a copy from the host travels inside the compute channel.
inline constexpr std::size_t kInlinedH2D = 24 << 10;
// A channel that holds this many operations makes the next submission wait inside the call.
inline constexpr std::size_t kChannelDepth = 1020;

template <typename T>
T loadAcquire(std::byte* address) {
  return std::atomic_ref<T>(*reinterpret_cast<T*>(address)).load(std::memory_order_acquire);
}

/// A copy, a memset or a kernel.
struct Work {
  Path path = Path::Immediate;
  int physical = 0;      ///< device whose engine carries it out
  int peerPhysical = 0;  ///< P2P: device written to
  int sourcePhysical = 0;
  std::byte* to = nullptr;
  const std::byte* from = nullptr;  ///< null: memset of `pattern`
  std::size_t bytes = 0;
  std::uint32_t pattern = 0;
  unsigned patternSize = 1;
  double latencyNs = 0;        ///< model time before the first byte
  double nsPerByte = 0;        ///< model time
  int sms = 0;                 ///< SMs held (Path::Sm)
  std::byte* until = nullptr;  ///< a kernel that ends when the 64-bit word here is >= untilValue
  std::uint64_t untilValue = 0;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  std::shared_ptr<Region> pins[2];
  std::vector<std::byte> snapshot;  ///< pageable source bytes taken at submission
};

/// One recording of an event.
struct EventRecord {
  bool done = false;
  std::int64_t at = 0;  ///< real nanoseconds
  std::shared_ptr<Stream> stream;
  std::uint64_t sequence = 0;
};

enum class OpKind : std::uint8_t { Nothing, Write, Wait, RecordEvent, WaitEvent, Work, Free };

struct Op {
  OpKind kind = OpKind::Nothing;
  // Write, Wait; Free: the allocation
  std::shared_ptr<Region> region;
  std::byte* address = nullptr;
  std::uint64_t value = 0;
  unsigned waitFlags = 0;
  bool is64 = false;
  // events
  std::shared_ptr<EventRecord> record;
  std::unique_ptr<Work> work;
  // set by the scheduler
  std::uint64_t ticket = 0;    ///< grows with every submission of the process
  Path path = Path::Sm;        ///< kind of its channel
  Channel* channel = nullptr;  ///< null: an event's operation, which takes no place in a channel
  bool heldUp = false;         ///< something else in the channel kept it from beginning
  std::vector<std::pair<std::shared_ptr<Stream>, std::uint64_t>> after;  ///< default-stream order
  std::int64_t submittedAt = 0;
  std::int64_t readyAt = 0;  ///< when everything before it was done, plus the random delay
  std::int64_t seenAt = 0;   ///< Wait: since when it is known to be satisfied; 0: not yet
  bool begun = false, queued = false;
};

struct Capture;

/// An in-order queue; a CUstream points to it.
struct Stream {
  Context* context = nullptr;
  unsigned flags = 0;
  int priority = 0;
  std::uint64_t id = 0;
  // Below: guarded by the scheduler's lock.
  std::deque<Op> queue;
  std::uint64_t submitted = 0, completed = 0;
  std::int64_t lastDoneAt = 0;
  Path channel = Path::Sm;  ///< engine used last; a fresh stream sits on the compute channel
  ChannelUse uses[kPaths];
  bool inBusyList = false;
  std::shared_ptr<Capture> capture;

  [[nodiscard]] bool isLegacy() const { return context->legacy.get() == this; }
  [[nodiscard]] bool isBlocking() const { return (flags & CU_STREAM_NON_BLOCKING) == 0; }
};
using StreamPtr = std::shared_ptr<Stream>;

/// Runs the process's streams on one thread: steps every stream's head, moves bytes slice by slice
/// so that all engines advance together, and reports an operation done at the later of its modelled
/// end and the real end of its bytes. Times are kept per operation, so a late wake-up of the thread
/// does not add to the modelled time of what follows.
class Scheduler {
 public:
  static Scheduler& get();

  /// Appends the operations, in order and at once. An error only for what a stream capture forbids.
  /// `*captured`: the stream is being captured, so they never run.
  CUresult submit(const StreamPtr& stream, std::vector<Op> ops, bool* captured = nullptr);

  /// The stream's submitted operations are all done.
  bool idle(const StreamPtr& stream);
  void wait(const StreamPtr& stream);
  /// Waits for what all streams of the context have now.
  void wait(Context* context);
  bool recordDone(const EventRecord& record);
  void wait(const std::shared_ptr<EventRecord>& record);
  /// Waits until no queued operation uses the region.
  void waitUnused(const std::shared_ptr<Region>& region);
  /// As cuMemFree does (FACTS 3): all other submissions of the process stand still until the
  /// context's pending work is done and `body` has run.
  template <typename Body>
  void whileQuiet(Context* context, Body&& body) {
    std::unique_lock gate(gate_);
    wait(context);
    body();
  }

  /// As the first launch of a lazily loaded kernel does (FACTS 3): waits for the context's pending
  /// work; what the process submits meanwhile is accepted and begins only after `body`.
  template <typename Body>
  void whileStarved(Context* context, Body&& body) {
    std::uint64_t barrier = 0;
    const Targets pending = raiseBarrier(context, &barrier);
    wait(pending, "the first launch of a kernel, which loads it,");
    body();
    dropBarrier(barrier);
  }

  std::string pending() {
    std::lock_guard lock(mutex_);
    return describePending();
  }
  /// For state that the scheduler's lock guards (captures).
  std::mutex& lock() { return mutex_; }

 private:
  /// Streams and how many of their operations must be done.
  using Targets = std::vector<std::pair<StreamPtr, std::uint64_t>>;
  struct Transfer {
    StreamPtr stream;
    Op* op;
    std::size_t finished = 0;  ///< bytes of finished chunks
    std::size_t chunk = 0;     ///< bytes of the running chunk
    std::size_t moved = 0;     ///< of those, already moved
    std::int64_t chunkReadyAt = 0;
    std::int64_t engineFreeAt = 0;  ///< it waited for its engine until then
    std::int64_t deadline = 0;      ///< modelled end of the chunk
    std::int64_t moveFrom = 0;      ///< when its bytes may move
    std::int64_t movedAt = 0;
    bool first = true;
  };
  struct Engine {
    int slots = 1;  ///< Sm: free SMs
    std::deque<std::unique_ptr<Transfer>> waiting;
  };

  Scheduler();
  void run();
  void addDefaultStreamOrder(const StreamPtr& stream, Op* op);
  bool step(const StreamPtr& stream, std::int64_t now);
  bool begin(const StreamPtr& stream, Op* op);
  static Path channelOf(const Stream& stream, const Op& op);
  void waitForRoom(const StreamPtr& stream, const Op& op);
  static void leaveChannel(Op* op, std::int64_t at);
  void enterChannel(const StreamPtr& stream, Op* op);
  Targets raiseBarrier(Context* context, std::uint64_t* barrier);
  void dropBarrier(std::uint64_t barrier);
  void lookAhead(Stream* stream, std::int64_t now);
  void finish(const StreamPtr& stream, std::int64_t at);
  void startTransfers();
  void startChunk(Transfer* transfer);
  bool advanceTransfers(std::unique_lock<std::mutex>& lock);
  bool endChunk(std::size_t index);
  void sleep(std::unique_lock<std::mutex>& lock);
  Engine& engineOf(const Work& work);
  Targets pendingOf(Context* context);
  void wait(const Targets& targets, const char* what);
  template <typename Done>
  void waitFor(const char* what, Done&& done);
  /// With the lock held.
  std::string describePending();

  std::shared_mutex gate_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  bool started_ = false, kicked_ = false, finishedSome_ = false;
  int waiters_ = 0;
  std::vector<StreamPtr> busy_;
  std::uint64_t lastTicket_ = 0;
  std::multiset<std::uint64_t> barriers_;  ///< operations with a later ticket do not begin
  Engine engines_[kMaxDevices][kPaths];
  std::vector<std::unique_ptr<Transfer>> running_;
  std::int64_t nextTimer_ = 0;
  bool polling_ = false;
  std::int64_t lastProgress_ = 0;
  std::mt19937_64 random_;
};

/// The stream behind a handle of the calling thread's context (0, legacy and per-thread included);
/// null if the handle is unknown.
StreamPtr streamFrom(CUstream handle, Context& current);
/// Forgets the streams of a context that is released.
void dropStreamsOf(Context* context);

/// A call on a stream, with the current context and the stream as arguments.
template <typename Body>
CUresult streamCall(CUstream handle, Body&& body) {
  return contextCall([&](Context& context) -> CUresult {
    const StreamPtr stream = streamFrom(handle, context);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return body(context, stream);
  });
}

}  // namespace hoccl::emu
