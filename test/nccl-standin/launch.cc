#include "launch.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "driver.h"
#include "staging.h"

namespace standin {
namespace {

/// What a failed operation leaves in staged output: never the right bytes of one before it.
constexpr int kSpoilt = 0xdb;
constexpr std::chrono::microseconds kShortestNap{10}, kLongestNap{500};

/// NCCLSTANDIN_MOVE=0: operations are recorded and move nothing.
bool moves() {
  static const bool value = [] {
    const char* text = std::getenv("NCCLSTANDIN_MOVE");
    return !text || std::strcmp(text, "0") != 0;
  }();
  return value;
}

Outcome fail(ncclComm* comm, Outcome outcome) {
  outcome.text = fmt::format("rank {} of {}: {}", comm->rank, comm->nranks, outcome.text);
  ncclResult_t none = ncclSuccess;
  // A revoked communicator's operations end as asked for.
  if (!comm->revoked) comm->error.compare_exchange_strong(none, outcome.code);
  report(outcome);
  return outcome;
}

/// A stream that takes part in a launch.
struct StreamUse {
  void* context;
  void* stream;
  Gate* gate;
  std::uint64_t sequence;
  std::atomic<int> open{0};  ///< batches that are not done
};

/// What a launch has for one communicator.
struct Batch {
  ncclComm* comm;
  std::vector<Staged> operations;
  std::vector<StreamUse*> streams;
  std::promise<Outcome> done;
};

/// The operations of one group. Each stream gets: copies of the input to the host, `started`, a
/// wait for `finished`, copies of the output to the device, `drained`. All starts come before all
/// waits, so that no stream of a group waits for one behind it.
class Launch {
 public:
  Outcome add(Operation op);
  Outcome issue();
  std::deque<Batch>& batches() { return batches_; }
  [[nodiscard]] bool usesStreams() const { return !streams_.empty(); }
  /// The worker's part.
  void run(Batch& batch);
  void finish(Batch& batch, Outcome outcome);
  [[nodiscard]] bool drained() const;
  /// Only where no stream can still use it.
  void giveBack();

 private:
  Batch& batchOf(ncclComm* comm);
  Outcome useStream(Batch& batch, void* stream);
  Outcome view(const Operation& op, const void* pointer, std::size_t bytes, Host* out);

  std::deque<Batch> batches_;
  std::deque<StreamUse> streams_;
  std::vector<Block> blocks_;
};

Batch& Launch::batchOf(ncclComm* comm) {
  for (Batch& batch : batches_) {
    if (batch.comm == comm) return batch;
  }
  Batch& batch = batches_.emplace_back();
  batch.comm = comm;
  return batch;
}

Outcome Launch::useStream(Batch& batch, void* stream) {
  void* const context = batch.comm->context;
  StreamUse* use = nullptr;
  for (StreamUse& known : streams_) {
    if (known.context == context && known.stream == stream) use = &known;
  }
  if (!use) {
    Gate* gate = nullptr;
    if (Outcome taken = takeGate(&gate); !taken) return taken;
    use = &streams_.emplace_back();
    use->context = context;
    use->stream = stream;
    use->gate = gate;
    use->sequence = gate->sequence;
  }
  for (const StreamUse* known : batch.streams) {
    if (known == use) return {};
  }
  batch.streams.push_back(use);
  ++use->open;
  return {};
}

Outcome Launch::view(const Operation& op, const void* pointer, std::size_t bytes, Host* out) {
  out->bytes = bytes;
  if (!bytes) return {};
  if (!pointer) return Outcome::error(ncclInvalidArgument, "a null buffer");
  if (!op.comm->context || !Driver::get().isDevicePointer(pointer)) {
    out->data = static_cast<char*>(const_cast<void*>(pointer));
    return {};
  }
  Block block;
  if (Outcome taken = takeBlock(bytes, &block); !taken) return taken;
  blocks_.push_back(block);
  out->data = block.data;
  out->staged = true;
  return {};
}

Outcome Launch::add(Operation op) {
  ncclComm* const comm = op.comm;
  const Driver::Scope scope(comm->context);
  // Captured work runs when the graph is launched, and the stand-in does not: recorded only.
  if (comm->context && Driver::get().isCapturing(op.stream)) return {};
  Staged staged{std::move(op), {}, {}, {}};
  Outcome viewed = view(staged.op, staged.op.in, bytesIn(staged.op), &staged.in);
  if (viewed) viewed = view(staged.op, staged.op.out, bytesOut(staged.op), &staged.out);
  if (viewed && staged.op.scale && staged.op.scale->where) {
    viewed = view(staged.op, staged.op.scale->where, typeSize(staged.op.type), &staged.scalar);
  }
  Batch& batch = batchOf(comm);
  if (viewed && comm->context) viewed = useStream(batch, staged.op.stream);
  if (!viewed) return fail(comm, std::move(viewed));
  batch.operations.push_back(std::move(staged));
  return {};
}

Outcome Launch::issue() {
  const Driver& driver = Driver::get();
  const auto fetch = [&](const Operation& op, const Host& host, const void* from) {
    return host.staged ? driver.copyToHost(op.stream, host.data, from, host.bytes) : Outcome{};
  };
  for (const Batch& batch : batches_) {
    const Driver::Scope scope(batch.comm->context);
    for (const Staged& staged : batch.operations) {
      const Operation& op = staged.op;
      if (Outcome done = fetch(op, staged.in, op.in); !done) return done;
      if (!op.scale) continue;
      if (Outcome done = fetch(op, staged.scalar, op.scale->where); !done) return done;
    }
  }
  for (const StreamUse& use : streams_) {
    const Driver::Scope scope(use.context);
    if (Outcome done = driver.write(use.stream, &use.gate->started, use.sequence); !done) {
      return done;
    }
  }
  for (const StreamUse& use : streams_) {
    const Driver::Scope scope(use.context);
    if (Outcome done = driver.await(use.stream, &use.gate->finished, use.sequence); !done) {
      return done;
    }
  }
  for (const Batch& batch : batches_) {
    const Driver::Scope scope(batch.comm->context);
    for (const Staged& staged : batch.operations) {
      const Host& out = staged.out;
      if (!out.staged) continue;
      if (Outcome done = driver.copyToDevice(staged.op.stream, staged.op.out, out.data, out.bytes);
          !done) {
        return done;
      }
    }
  }
  for (const StreamUse& use : streams_) {
    const Driver::Scope scope(use.context);
    if (Outcome done = driver.write(use.stream, &use.gate->drained, use.sequence); !done) {
      return done;
    }
  }
  return {};
}

/// Until the batch's streams have come to it. As with NCCL that takes as long as it takes.
Outcome awaitStreams(const Batch& batch) {
  for (const StreamUse* use : batch.streams) {
    auto nap = kShortestNap;
    while (load(use->gate->started) < use->sequence) {
      if (batch.comm->cancelled) {
        return Outcome::error(ncclInternalError, "aborted while waiting for its stream");
      }
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestNap);
    }
  }
  return {};
}

void Launch::run(Batch& batch) {
  ncclComm* const comm = batch.comm;
  Outcome outcome;
  if (comm->error != ncclSuccess) {
    outcome = Outcome::error(comm->error, "an operation before this one failed");
  } else if (comm->cancelled) {
    outcome = Outcome::error(ncclInternalError, "aborted before it began");
  } else {
    outcome = awaitStreams(batch);
    if (outcome) outcome = moveData(comm, batch.operations);
    if (!outcome) outcome = fail(comm, std::move(outcome));
  }
  finish(batch, std::move(outcome));
}

void Launch::finish(Batch& batch, Outcome outcome) {
  for (Staged& staged : batch.operations) {
    if (!outcome && staged.out.staged) std::memset(staged.out.data, kSpoilt, staged.out.bytes);
  }
  for (StreamUse* use : batch.streams) {
    if (--use->open == 0) store(use->gate->finished, use->sequence);
  }
  batch.done.set_value(std::move(outcome));
}

bool Launch::drained() const {
  for (const StreamUse& use : streams_) {
    if (load(use.gate->drained) < use.sequence) return false;
  }
  return true;
}

void Launch::giveBack() {
  for (const StreamUse& use : streams_) give(use.gate);
  for (const Block& block : blocks_) give(block);
  streams_.clear();
  blocks_.clear();
}

/// Launches whose streams may still be on them.
struct Pending {
  std::mutex mutex;
  std::list<std::shared_ptr<Launch>> launches;
};
Pending& pending() {
  static Pending* const made = new Pending;
  return *made;
}

}  // namespace

void reapLaunches(void* context) {
  std::list<std::shared_ptr<Launch>> over;
  {
    const std::lock_guard lock(pending().mutex);
    for (auto it = pending().launches.begin(); it != pending().launches.end();) {
      const auto next = std::next(it);
      if ((*it)->drained()) over.splice(over.end(), pending().launches, it);
      it = next;
    }
  }
  for (const auto& launch : over) launch->giveBack();
  if (!context) return;
  const Driver::Scope scope(context);
  trimBlocks();
}

Outcome execute(std::vector<Operation> operations) {
  if (!moves() || operations.empty()) return {};
  reapLaunches(operations.front().comm->context);
  const auto launch = std::make_shared<Launch>();
  for (Operation& op : operations) {
    if (Outcome added = launch->add(std::move(op)); !added) {
      launch->giveBack();
      return added;
    }
  }
  if (Outcome issued = launch->issue(); !issued) {
    // What the streams have got of it stays theirs: gates and blocks are not used again.
    for (Batch& batch : launch->batches()) launch->finish(batch, fail(batch.comm, issued));
    return issued;
  }
  if (launch->usesStreams()) {
    const std::lock_guard lock(pending().mutex);
    pending().launches.push_back(launch);
  }
  std::vector<std::future<Outcome>> awaited;
  std::vector<Busy> busy;
  for (Batch& batch : launch->batches()) {
    if (!batch.comm->context) awaited.push_back(batch.done.get_future());
    busy.emplace_back(batch.comm);
  }
  for (Batch& batch : launch->batches()) {
    Outcome pushed = batch.comm->worker.push([launch, &batch] { launch->run(batch); });
    if (!pushed) launch->finish(batch, fail(batch.comm, std::move(pushed)));
  }
  busy.clear();
  Outcome result;
  for (std::future<Outcome>& future : awaited) {
    if (Outcome done = future.get(); !done) result = std::move(done);
  }
  return result;
}

}  // namespace standin
