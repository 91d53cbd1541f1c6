#pragma once

// Stand-ins for what the runtime's tests need around the code they look at: copy lanes, a
// connection, a driver table, and a whole mover with its application's side, all in one process and
// without CUDA. "Device memory" is ordinary memory, and a device address is the host address.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <semaphore>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/config.h"
#include "common/base/random.h"
#include "common/base/shared_memory.h"
#include "common/base/time.h"
#include "common/base/unix_socket.h"
#include "common/gpu/driver.h"
#include "common/gpu/lane.h"
#include "common/net/shm/shm_transport.h"
#include "common/net/transport.h"
#include "common/runtime/mover_control.h"
#include "common/runtime/mover_loop.h"
#include "common/runtime/mover_protocol.h"
#include "common/runtime/segment.h"

namespace hoccl::test {

/// Long enough for a loaded machine; a wait that succeeds ends at once.
inline constexpr std::uint64_t kPatienceMs = 20'000;

/// Waits until `condition` holds; false when it does not come in time.
inline bool waitUntil(const std::function<bool()>& condition, std::uint64_t ms = kPatienceMs) {
  const Deadline deadline = Deadline::afterMs(ms);
  for (int round = 0; !condition(); ++round) {
    if (deadline.passed()) return condition();
    if (round > 100) ::usleep(100);
    std::this_thread::yield();
  }
  return true;
}

/// The seed of this run: --gtest_random_seed if given, else a new one. Printed, so that a failure
/// can be run again.
inline std::uint32_t testSeed() {
  std::uint32_t seed = static_cast<std::uint32_t>(GTEST_FLAG_GET(random_seed));
  if (seed == 0) seed = std::random_device()() % 99999 + 1;
  std::printf("[ seed     ] --gtest_random_seed=%u\n", seed);
  return seed;
}

using Rng = std::mt19937;
inline std::uint64_t pick(Rng& rng, std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>(low, high)(rng);
}
inline bool chance(Rng& rng, double probability) {
  return std::bernoulli_distribution(probability)(rng);
}

/// Bytes that tell where they belong: no two transfers and no two offsets look alike for long. This
/// is the word at `offset`, a multiple of 8, of transfer `key`.
inline std::uint64_t patternWord(std::uint64_t key, std::uint64_t offset) {
  const std::uint64_t v = (offset / 8 + 1) * 0x9e3779b97f4a7c15ull ^ key * 0xff51afd7ed558ccdull;
  return v ^ v >> 29;
}
inline std::byte patternAt(std::uint64_t key, std::uint64_t offset) {
  return static_cast<std::byte>(patternWord(key, offset) >> (offset % 8 * 8));
}
/// Bytes [offset, offset + length) of transfer `key`; whole words at a time, which sanitizers like.
inline void writePattern(std::byte* to, std::uint64_t key, std::uint64_t offset,
                         std::uint64_t length) {
  for (std::uint64_t i = 0; i < length;) {
    if ((offset + i) % 8 == 0 && length - i >= 8) {
      const std::uint64_t word = patternWord(key, offset + i);
      std::memcpy(to + i, &word, 8);
      i += 8;
    } else {
      to[i] = patternAt(key, offset + i);
      ++i;
    }
  }
}
inline constexpr std::byte kPoison{0xa5};
inline constexpr std::size_t kGuard = 64;

/// A "device" buffer with guard bytes around it, at an odd address if asked.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::uint64_t bytes, std::size_t shift = 0)
      : bytes_(bytes), shift_(kGuard + shift), memory_(bytes + 2 * kGuard + shift, kPoison) {}
  [[nodiscard]] std::byte* data() { return memory_.data() + shift_; }
  [[nodiscard]] CUdeviceptr address() { return reinterpret_cast<CUdeviceptr>(data()); }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  void fill(std::uint64_t key) { writePattern(data(), key, 0, bytes_); }
  /// Empty if every byte inside is the pattern of `key` and every byte outside untouched.
  [[nodiscard]] std::string check(std::uint64_t key) {
    std::vector<std::byte> expected(bytes_);
    writePattern(expected.data(), key, 0, bytes_);
    const bool same = std::memcmp(expected.data(), data(), bytes_) == 0;
    for (std::uint64_t i = 0; !same && i < bytes_; ++i) {
      if (data()[i] != expected[i]) {
        return fmt::format("byte {} of {} is {:#x}, not {:#x}", i, bytes_,
                           static_cast<unsigned>(data()[i]), static_cast<unsigned>(expected[i]));
      }
    }
    return checkGuards();
  }
  [[nodiscard]] std::string checkGuards() {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (i == shift_) i += bytes_;
      if (memory_[i] != kPoison) return fmt::format("guard byte {} was written", i);
    }
    return {};
  }
  /// Empty if nothing was written at all.
  [[nodiscard]] std::string untouched() {
    for (std::byte b : memory_) {
      if (b != kPoison) return "a byte was written";
    }
    return {};
  }

 private:
  std::uint64_t bytes_;
  std::size_t shift_;
  std::vector<std::byte> memory_;
};

// --- Lanes ---------------------------------------------------------------------------------------

inline void setFlagAt(const FlagWrite& write) {
  if (write.address) reinterpret_cast<Flag*>(write.address)->set(write.value);
}

inline void copyOf(LaneDirection direction, const LaneJob& job) {
  auto* device = reinterpret_cast<std::byte*>(job.device);
  if (direction == LaneDirection::ToHost) {
    std::memcpy(job.host, device, job.bytes);
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
  std::atomic<bool> stop_{false}, held_{false};
  std::atomic<std::uint64_t> tickets_{0};
  std::thread thread_;
};

// --- A connection inside one thread --------------------------------------------------------------

/// Two ends of a connection in one thread. With shared slots both ends' slots are the same memory;
/// otherwise `pump` carries writes and credits, in order, some of them late.
struct FakeWire {
  struct Settings {
    std::uint32_t slots = 4;
    std::uint64_t slotBytes = 128 << 10;
    std::size_t ringMessages = 64;
    bool shared = true;
    double refuse = 0;  ///< how often tryWrite says "later"
    double late = 0;    ///< how often pump leaves a write or credit for the next time
  };

  class End final : public Connection {
   public:
    End(FakeWire* wire, int side) : wire_(wire), side_(side) {}
    [[nodiscard]] const char* transport() const override { return "fake"; }
    [[nodiscard]] PeerId peer() const override {
      return {0, static_cast<std::uint64_t>(2 - side_)};
    }
    [[nodiscard]] const Staging& staging() const override { return wire_->staging[side_]; }
    [[nodiscard]] bool sharedSlots() const override { return wire_->settings.shared; }
    [[nodiscard]] bool trySend(const Message& message) override {
      auto& ring = wire_->messages[side_];
      if (ring.size() >= wire_->settings.ringMessages) {
        ++wire_->ringFull;
        return false;
      }
      ring.push_back(message);
      return true;
    }
    [[nodiscard]] bool tryReceive(Message* message) override {
      auto& ring = wire_->messages[1 - side_];
      if (ring.empty()) return false;
      *message = ring.front();
      ring.pop_front();
      return true;
    }
    [[nodiscard]] bool tryWrite(std::uint32_t slot, std::uint64_t bytes,
                                std::uint64_t turn) override {
      if (chance(wire_->rng, wire_->settings.refuse)) {
        ++wire_->writesRefused;
        return false;
      }
      ++wire_->writesTaken;
      wire_->writes.push_back({side_, slot, bytes, turn});
      return true;
    }
    [[nodiscard]] bool peerGone() const override { return false; }
    void nudge() override {}
    [[nodiscard]] int watchFd() const override { return -1; }
    void watch() override {}

   private:
    FakeWire* wire_;
    int side_;
  };

  struct Write {
    int side;
    std::uint32_t slot;
    std::uint64_t bytes, turn;
  };

  FakeWire(const Settings& s, std::uint32_t seed) : settings(s), rng(seed) {
    // out and in of each side; shared: the in of one side is the out of the other.
    for (int side = 0; side < 2; ++side) makeSlots(&staging[side].out, &staging[side]);
    for (int side = 0; side < 2; ++side) {
      if (settings.shared) {
        staging[side].in = staging[1 - side].out;
      } else {
        makeSlots(&staging[side].in, &staging[side]);
      }
      staging[side].slotBytes = settings.slotBytes;
    }
  }

  /// Without shared slots: carries what is on its way.
  void pump() {
    if (settings.shared) return;
    while (!writes.empty() && !chance(rng, settings.late)) {
      const Write w = writes.front();
      writes.pop_front();
      const Slot& from = staging[w.side].out[w.slot];
      const Slot& to = staging[1 - w.side].in[w.slot];
      std::memcpy(to.data, from.data, w.bytes);
      to.ready->set(w.turn);
    }
    for (int side = 0; side < 2; ++side) {
      for (std::uint32_t i = 0; i < settings.slots; ++i) {
        if (chance(rng, settings.late)) continue;
        const std::uint64_t credit = staging[side].in[i].credit->value.load();
        Flag& there = *staging[1 - side].out[i].credit;
        if (there.value.load() < credit) there.set(credit);
      }
    }
  }

  Settings settings;
  Rng rng;
  Staging staging[2];
  std::deque<Message> messages[2];  ///< by sending side
  std::deque<Write> writes;
  std::uint64_t writesTaken = 0, writesRefused = 0, ringFull = 0;

 private:
  void makeSlots(std::vector<Slot>* out, Staging*) {
    for (std::uint32_t i = 0; i < settings.slots; ++i) {
      memory_.push_back(std::make_unique<std::byte[]>(settings.slotBytes));
      flags_.push_back(std::make_unique<Flag[]>(2));
      flags_.back()[0].value.store(0);
      flags_.back()[1].value.store(0);
      out->push_back({memory_.back().get(), &flags_.back()[0], &flags_.back()[1]});
    }
  }
  std::vector<std::unique_ptr<std::byte[]>> memory_;
  std::vector<std::unique_ptr<Flag[]>> flags_;
};

// --- A driver table ------------------------------------------------------------------------------

/// What the fake driver's imports and registrations do (all movers share it); a buffer's handle
/// names the buffer itself and the result.
struct FakeImports {
  std::atomic<bool> held{false};  ///< cuIpcOpenMemHandle does not return
  std::atomic<std::uint32_t> opened{0}, closed{0};
  std::atomic<std::uint32_t> registered{0};  ///< host regions registered now
};
inline FakeImports& fakeImports() {
  static FakeImports imports;
  return imports;
}

struct FakeHandle {
  CUdeviceptr address;
  CUresult result;
};

/// The calls that the control thread and HostRegistration make, done without a GPU.
inline const Driver* fakeDriver() {
  static const Driver table = [] {
    Driver d;
    d.cuGetErrorName = [](CUresult, const char** text) {
      *text = "CUDA_ERROR_FAKE";
      return CUDA_SUCCESS;
    };
    d.cuGetErrorString = [](CUresult, const char** text) {
      *text = "the fake driver was told to fail";
      return CUDA_SUCCESS;
    };
    d.cuCtxSetCurrent = [](CUcontext) { return CUDA_SUCCESS; };
    d.cuMemHostRegister = [](void*, size_t, unsigned) {
      fakeImports().registered.fetch_add(1);
      return CUDA_SUCCESS;
    };
    d.cuMemHostUnregister = [](void*) {
      fakeImports().registered.fetch_sub(1);
      return CUDA_SUCCESS;
    };
    d.cuMemHostGetDevicePointer = [](CUdeviceptr* out, void* host, unsigned) {
      *out = reinterpret_cast<CUdeviceptr>(host);
      return CUDA_SUCCESS;
    };
    d.cuIpcOpenMemHandle = [](CUdeviceptr* out, CUipcMemHandle handle, unsigned) {
      while (fakeImports().held.load()) ::usleep(200);
      FakeHandle fake;
      std::memcpy(&fake, &handle, sizeof fake);
      fakeImports().opened.fetch_add(1);
      *out = fake.address;
      return fake.result;
    };
    d.cuIpcCloseMemHandle = [](CUdeviceptr) {
      fakeImports().closed.fetch_add(1);
      return CUDA_SUCCESS;
    };
    return d;
  }();
  return &table;
}

/// A buffer as the application describes it, in an allocation of its own.
inline BufferRef refTo(DeviceBuffer& buffer, std::uint64_t allocationId,
                       CUresult result = CUDA_SUCCESS) {
  BufferRef ref{};
  ref.allocationId = allocationId;
  ref.allocationBase = buffer.address() - 1;  // so that the offset counts
  ref.allocationBytes = buffer.bytes() + 1;
  ref.offset = 1;
  const FakeHandle handle{buffer.address() - 1, result};
  std::memcpy(ref.ipcHandle, &handle, sizeof handle);
  return ref;
}

// --- A mover with its application's side ---------------------------------------------------------

/// Set by a test that counts what the loop's thread allocates.
inline thread_local std::atomic<std::uint64_t>* allocationCounter = nullptr;

/// One mover (loop, control thread, shm transport, fake engines) and the segment's application
/// side.
class TestMover {
 public:
  struct Options {
    std::uint32_t launchSlots = 64;
    std::uint32_t slots = 4;
    std::uint64_t slotBytes = 128 << 10;
    std::uint32_t laneDepth = 4;
    std::uint32_t importCache = 1024;
    bool startLoop = true;
    std::uint32_t seed = 1;
  };
  struct OpSpec {
    OpKind kind;
    std::uint32_t communicator;
    std::int32_t peer;
    std::uint64_t bytes;
    std::uint64_t pairSequence;
    BufferRef buffer;
  };
  struct Ticket {
    std::vector<std::pair<std::uint32_t, std::uint64_t>> streams;  ///< slot, sequence
  };

  TestMover() : TestMover(Options{}) {}
  explicit TestMover(const Options& options) : engines(options.seed) {
    Config config = Config::defaults();
    config.spinUs = 20;
    config.pollMaxUs = 100;
    config.slots = options.slots;
    config.slotBytes = options.slotBytes;
    config.laneDepth = options.laneDepth;
    config.importCache = options.importCache;
    config.timeoutMs = 5000;
    check(SharedMemory::create("hoccl-test", Segment::bytesFor(options.launchSlots), &memory_));
    segment = Segment::create(memory_.data(), options.launchSlots);
    loopEvent_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    controlEvent_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    queues_.loopEventFd = loopEvent_.get();
    queues_.controlEventFd = controlEvent_.get();
    check(random64(&self_.high));
    check(random64(&self_.low));
    check(makeShmTransport(self_, {options.slots, options.slotBytes}, &transport_));
    check(makeSocketPair(&application_, &moverEnd_));
    control_ =
        std::make_unique<MoverControl>(MoverControl::Dependencies{.driver = fakeDriver(),
                                                                  .context = nullptr,
                                                                  .queues = &queues_,
                                                                  .transport = transport_.get(),
                                                                  .self = self_,
                                                                  .application = moverEnd_.get(),
                                                                  .applicationPidfd = UniqueFd()},
                                       config);
    MoverLoop::Dependencies d;
    d.segment = segment;
    d.segmentRegistration = &registration_;
    d.queues = &queues_;
    for (std::size_t i = 0; i < SharedLanes::kCount; ++i) {
      d.out[i] = engines.lane(LaneDirection::ToHost);
      d.in[i] = engines.lane(LaneDirection::ToDevice);
    }
    engines.start();
    loop_ = std::make_unique<MoverLoop>(std::move(d), config);
    controlThread_ = std::thread([this] { control_->run(); });
    if (options.startLoop) startLoop();
  }
  ~TestMover() { stop(); }

  void startLoop() {
    loopThread_ = std::thread([this] {
      allocationCounter = &allocations;
      loop_->run();
      allocationCounter = nullptr;
    });
  }
  /// As when the application ends. The loop quiesces its copies; bounded by its own timeout.
  void stop() {
    application_.reset();
    if (loopThread_.joinable()) loopThread_.join();
    control_->requestStop();
    if (controlThread_.joinable()) controlThread_.join();
    loop_.reset();  // its connections end here: the peers notice
    while (true) {
      ControlRequest request;
      if (!queues_.toControl.tryPop(&request)) break;
    }
  }

  /// Where peers find this mover, with the host name and process their messages will show.
  [[nodiscard]] PeerRecord place(const std::string& host, std::uint64_t pid) const {
    PeerRecord record{};
    record.mover = self_;
    record.pid = pid;
    setText(record.address, transport_->address());
    setText(record.host, host);
    return record;
  }
  Status addCommunicator(std::uint32_t index, std::uint64_t id, std::int32_t rank,
                         const std::vector<PeerRecord>& peers) {
    segment.communicator(index).errorCode.store(0);
    segment.communicator(index).closes.store(0);
    SharedMemory table;
    HOCCL_RETURN_IF_ERROR(
        SharedMemory::create("hoccl-peers", peers.size() * sizeof(PeerRecord), &table));
    std::memcpy(table.data(), peers.data(), table.size());
    const AddCommunicator request{kMoverMagic, index, rank, id, peers.size()};
    const int fd = table.fd();
    MoverReply reply{};
    std::size_t bytes = 0;
    std::vector<UniqueFd> none;
    HOCCL_RETURN_IF_ERROR(
        sendWithFdsWithin(application_.get(), &request, sizeof request, {&fd, 1}, kPatienceMs));
    HOCCL_RETURN_IF_ERROR(
        recvWithFdsWithin(application_.get(), &reply, sizeof reply, &bytes, &none, kPatienceMs));
    if (bytes != sizeof reply || !reply.ok) return Status::error(Code::System, getText(reply.text));
    return {};
  }

  /// One launch of `ops` over `streams` streams, whose starts are written at once unless told not
  /// to.
  Ticket launch(const std::vector<OpSpec>& ops, std::uint32_t streams = 1, bool start = true) {
    Ticket ticket;
    for (std::uint32_t i = 0; i < streams; ++i) ticket.streams.push_back(takeSlot());
    if (start) {
      for (auto [slot, sequence] : ticket.streams) segment.launch(slot).start.set(sequence);
    }
    OpDescriptor d{};
    d.launchSlot = ticket.streams[0].first;
    d.launchSequence = ticket.streams[0].second;
    d.launchOps = static_cast<std::uint32_t>(ops.size());
    d.launchStreams = streams;
    for (std::uint32_t i = 1; i < streams; ++i) {
      OpDescriptor extra = d;
      extra.kind = OpKind::ExtraStream;
      extra.pairSequence = ticket.streams[i].first;
      extra.bytes = ticket.streams[i].second;
      push(extra);
    }
    for (const OpSpec& op : ops) {
      d.kind = op.kind;
      d.communicator = op.communicator;
      d.peer = op.peer;
      d.bytes = op.bytes;
      d.pairSequence = op.pairSequence;
      d.buffer = op.buffer;
      push(d);
    }
    ring();
    return ticket;
  }
  void start(const Ticket& ticket, std::size_t stream) {
    segment.launch(ticket.streams[stream].first).start.set(ticket.streams[stream].second);
    ring();
  }
  [[nodiscard]] bool finished(const Ticket& ticket, std::size_t stream) const {
    return segment.launch(ticket.streams[stream].first)
        .finish.reached(ticket.streams[stream].second);
  }
  [[nodiscard]] bool finished(const Ticket& ticket) const {
    for (std::size_t i = 0; i < ticket.streams.size(); ++i) {
      if (!finished(ticket, i)) return false;
    }
    return true;
  }
  [[nodiscard]] bool waitFor(const Ticket& ticket, std::uint64_t ms = kPatienceMs) const {
    return waitUntil([&] { return finished(ticket); }, ms);
  }
  void end(std::uint32_t communicator, OpKind kind) {
    OpDescriptor d{};
    d.kind = kind;
    d.communicator = communicator;
    push(d);
    ring();
  }
  void push(const OpDescriptor& d) {
    EXPECT_TRUE(waitUntil([&] {
      if (segment.tryPush(d)) return true;
      ring();
      return false;
    })) << "the op ring stays full";
  }
  void ring() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!segment.header().moverSleeps.load(std::memory_order_relaxed)) return;
    const std::uint64_t one = 1;
    [[maybe_unused]] ssize_t put = ::write(loopEvent_.get(), &one, sizeof one);
  }
  [[nodiscard]] Code code(std::uint32_t communicator) const {
    return static_cast<Code>(segment.communicator(communicator).errorCode.load());
  }
  [[nodiscard]] std::string errorText(std::uint32_t communicator) const {
    return code(communicator) == Code::Ok ? ""
                                          : getText(segment.communicator(communicator).errorText);
  }
  [[nodiscard]] bool waitForClose(std::uint32_t communicator, std::uint64_t count = 1) const {
    return waitUntil([&] { return segment.communicator(communicator).closes.load() >= count; });
  }
  [[nodiscard]] const PeerId& id() const { return self_; }

  CopyEngines engines;
  Segment segment;
  std::atomic<std::uint64_t> allocations{0};

 private:
  static void check(const Status& status) {
    if (!status) ADD_FAILURE() << status.message();
  }
  /// As MoverClient does: any slot whose last launch has both started and finished.
  std::pair<std::uint32_t, std::uint64_t> takeSlot() {
    std::pair<std::uint32_t, std::uint64_t> taken{0, ++sequence_};
    last_.resize(segment.launchSlots());
    const bool found = waitUntil(
        [&] {
          for (std::uint32_t i = 0; i < segment.launchSlots(); ++i) {
            const std::uint32_t index = (nextSlot_ + i) % segment.launchSlots();
            const LaunchFlags& flags = segment.launch(index);
            if (!flags.free(last_[index])) continue;
            taken.first = index;
            return true;
          }
          return false;
        },
        stuck_ ? 0 : kPatienceMs);
    EXPECT_TRUE(found) << "no launch slot becomes free";
    stuck_ = !found;  // a test that goes on does not wait as long again
    last_[taken.first] = taken.second;
    nextSlot_ = taken.first + 1;
    return taken;
  }

  SharedMemory memory_;
  HostRegistration registration_;  ///< as constructed, it maps every address to itself
  UniqueFd loopEvent_, controlEvent_, application_, moverEnd_;
  MoverQueues queues_;
  PeerId self_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<MoverControl> control_;
  std::unique_ptr<MoverLoop> loop_;
  std::thread controlThread_, loopThread_;
  std::vector<std::uint64_t> last_;
  std::uint64_t sequence_ = 0;
  std::uint32_t nextSlot_ = 0;
  bool stuck_ = false;
};

/// A peer played by the test: takes one connection and says what it is told to say.
class ScriptedPeer {
 public:
  explicit ScriptedPeer(const StagingGeometry& geometry = {4, 128 << 10}) {
    EXPECT_TRUE(random64(&self_.high));
    EXPECT_TRUE(random64(&self_.low));
    Status status = makeShmTransport(self_, geometry, &transport_);
    EXPECT_TRUE(status) << status.message();
  }
  [[nodiscard]] PeerRecord place(const std::string& host, std::uint64_t pid) const {
    PeerRecord record{};
    record.mover = self_;
    record.pid = pid;
    setText(record.address, transport_->address());
    setText(record.host, host);
    return record;
  }
  /// Waits for the mover's connection.
  [[nodiscard]] bool accept() {
    std::unique_ptr<Handshake> handshake;
    return waitUntil([&] {
      if (!handshake) handshake = transport_->accept();
      if (!handshake) return false;
      Handshake::State state = handshake->advance();
      if (state == Handshake::State::Pending && handshake->peer()) {
        handshake->decide(Handshake::Decision::Accept, "");
        state = handshake->advance();
      }
      if (state == Handshake::State::Done) connection = handshake->take();
      return connection != nullptr;
    });
  }
  void die() { connection.reset(); }
  [[nodiscard]] bool send(const Message& message) { return connection->trySend(message); }
  /// The next message of that type; others are dropped.
  [[nodiscard]] bool receive(MessageType type, Message* message, std::uint64_t ms = kPatienceMs) {
    return waitUntil(
        [&] {
          while (connection->tryReceive(message)) {
            if (message->type == type) return true;
          }
          return false;
        },
        ms);
  }
  /// A Chunk message of the pair (source → destination); turn 1 unless the slot was used before.
  [[nodiscard]] static Message chunk(std::uint64_t communicator, std::int32_t source,
                                     std::int32_t destination, std::uint64_t sequence,
                                     std::uint32_t slot, std::uint64_t bytes, std::uint64_t offset,
                                     std::uint64_t length, std::uint64_t turn = 1) {
    Message m{};
    m.type = MessageType::Chunk;
    m.slot = slot;
    m.communicator = communicator;
    m.source = source;
    m.destination = destination;
    m.pairSequence = sequence;
    m.bytes = bytes;
    m.offset = offset;
    m.length = length;
    m.turn = turn;
    return m;
  }
  /// Fills the slot of a chunk with the pattern of `key` and shows it.
  void deliver(const Message& m, std::uint64_t key) {
    const Slot& slot = connection->staging().out[m.slot];
    writePattern(slot.data, key, m.offset, m.length);
    slot.ready->set(m.turn);
  }

  std::unique_ptr<Connection> connection;

 private:
  PeerId self_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace hoccl::test
