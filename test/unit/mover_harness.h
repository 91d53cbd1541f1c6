#pragma once

// The harness around the mover loop: a whole mover with its application's side in one process
// (loop, control thread, shm transport, fake engines and driver), two of them, or one and a played
// peer.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/config.h"
#include "common/base/fd.h"
#include "common/base/random.h"
#include "common/base/shared_memory.h"
#include "common/base/status.h"
#include "common/base/unix_socket.h"
#include "common/gpu/doorbell.h"
#include "common/gpu/host_registration.h"
#include "common/net/shm/shm_transport.h"
#include "common/net/transport.h"
#include "common/runtime/link.h"
#include "common/runtime/mover_control.h"
#include "common/runtime/mover_events.h"
#include "common/runtime/mover_loop.h"
#include "common/runtime/mover_protocol.h"
#include "common/runtime/segment.h"
#include "test/unit/fake_driver.h"
#include "test/unit/fake_lanes.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fake_peer.h"
#include "test/unit/fakes.h"

namespace hoccl::test {

// --- One mover -----------------------------------------------------------------------------------

/// Set by a test that counts what the loop's thread allocates.
inline thread_local std::atomic<std::uint64_t>* allocationCounter = nullptr;

/// A doorbell that counts. What the loop's thread finds at each ring the test may look at.
class FakeDoorbell final : public Doorbell {
 public:
  struct Seen {
    std::atomic<std::uint64_t> rings{0};
    std::atomic<bool> refuses{false};
    std::atomic<int> busy{0};    ///< so often the last ring is still under way
    std::function<void()> look;  ///< set before the loop starts
  };
  explicit FakeDoorbell(Seen* seen) : seen_(seen) {}
  Status ring(bool* rang) override {
    if (seen_->refuses) return Status::error(Code::Cuda, "fake doorbell refuses");
    if (seen_->look) seen_->look();
    *rang = false;
    if (seen_->busy > 0) {
      --seen_->busy;
      return {};
    }
    seen_->rings.fetch_add(1);
    *rang = true;
    return {};
  }

 private:
  Seen* seen_;
};

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
    std::uint64_t importIdleMs = 0;
    std::uint64_t p2p = 1;
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
    config.importIdleMs = options.importIdleMs;
    config.p2p = options.p2p;
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
      d.peer[i] = engines.lane(LaneDirection::Peer);
    }
    d.doorbell = std::make_unique<FakeDoorbell>(&doorbell);
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
        SharedMemory::create("hoccl-peers", peerTableBytes(peers.size()), &table));
    std::memcpy(table.data(), peers.data(), peers.size() * sizeof(PeerRecord));
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
    counts[index] = pairCountsOf(table.data(), peers.size());
    tables_.push_back(std::move(table));
    return {};
  }

  /// Gives the mover a span of one segment, as its application does, and pins it once.
  Status addSpan(std::uint32_t slot, std::uint64_t bytes, BufferRef* span) {
    AddSpan request{};
    request.magic = kMoverMagic;
    request.id = spanId(slot, segment.header().spans[slot].open());
    request.base = 0x7f0000000000 + (static_cast<std::uint64_t>(slot) << 32);
    request.bytes = request.pieceBytes[0] = bytes;
    request.pieces = 1;
    const UniqueFd memory(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int fd = memory.get();
    MoverReply reply{};
    std::size_t replied = 0;
    std::vector<UniqueFd> none;
    HOCCL_RETURN_IF_ERROR(
        sendWithFdsWithin(application_.get(), &request, bytesOf(request), {&fd, 1}, kPatienceMs));
    HOCCL_RETURN_IF_ERROR(
        recvWithFdsWithin(application_.get(), &reply, sizeof reply, &replied, &none, kPatienceMs));
    if (replied != sizeof reply || !reply.ok) {
      return Status::error(Code::System, getText(reply.text));
    }
    *span = {};
    span->kind = BufferKind::Span;
    span->allocationId = request.id;
    span->allocationBase = request.base;
    span->allocationBytes = bytes;
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
      d.counted = 3;
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
  FakeDoorbell::Seen doorbell;
  Segment segment;
  std::atomic<std::uint64_t> allocations{0};
  std::map<std::uint32_t, PairCounts*> counts;  ///< by communicator, then by rank

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
  std::vector<SharedMemory> tables_;
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

// --- Operations and communicators ----------------------------------------------------------------

/// An allocation identity that no mover has seen.
inline std::uint64_t freshAllocation() {
  static std::atomic<std::uint64_t> next{1};
  return next.fetch_add(1);
}
inline TestMover::OpSpec sendTo(std::int32_t peer, std::uint64_t sequence, DeviceBuffer& buffer,
                                std::uint32_t communicator = 0) {
  return {OpKind::Send,   communicator, peer,
          buffer.bytes(), sequence,     refTo(buffer, freshAllocation())};
}
inline TestMover::OpSpec receiveFrom(std::int32_t peer, std::uint64_t sequence,
                                     DeviceBuffer& buffer, std::uint32_t communicator = 0) {
  return {OpKind::Recv,   communicator, peer,
          buffer.bytes(), sequence,     refTo(buffer, freshAllocation())};
}

/// The own block, which the send of the same launch with that number takes to `peer`.
inline TestMover::OpSpec mirrorOf(std::int32_t peer, std::uint64_t sequence, DeviceBuffer& buffer,
                                  std::uint32_t communicator = 0) {
  return {OpKind::Mirror, communicator, peer,
          buffer.bytes(), sequence,     refTo(buffer, freshAllocation())};
}

inline bool contains(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

inline constexpr std::uint64_t kId = 0xc0ffee;  ///< of communicator index 0

/// Two movers, ranks 0 and 1 of communicator 0.
struct Two {
  explicit Two(const TestMover::Options& options = {}) : Two(options, options) {}
  Two(const TestMover::Options& ofA, const TestMover::Options& ofB)
      : a(std::make_unique<TestMover>(ofA)), b(std::make_unique<TestMover>(ofB)) {
    add(0, kId);
  }
  void add(std::uint32_t index, std::uint64_t id) {
    const std::vector<PeerRecord> peers{a->place("hostA", 111), b->place("hostB", 222)};
    for (auto& [mover, rank] : {std::pair{a.get(), 0}, std::pair{b.get(), 1}}) {
      const Status status = mover->addCommunicator(index, id, rank, peers);
      EXPECT_TRUE(status) << status.message();
    }
  }
  std::unique_ptr<TestMover> a, b;
};

/// A mover, rank 0, with a scripted peer, rank 1 of communicator 0.
struct Scripted {
  explicit Scripted(const TestMover::Options& options = {}) : mover(options) {
    const Status status =
        mover.addCommunicator(0, kId, 0, {mover.place("hostA", 111), peer.place("hostB", 222)});
    EXPECT_TRUE(status) << status.message();
  }
  ScriptedPeer peer;
  TestMover mover;
};

}  // namespace hoccl::test
