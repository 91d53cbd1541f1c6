#include "operation.h"

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "driver.h"
#include "reduce.h"

namespace standin {
namespace {

/// NCCLSTANDIN_MOVE=0: operations are recorded and move nothing.
bool moves() {
  static const bool value = [] {
    const char* text = std::getenv("NCCLSTANDIN_MOVE");
    return !text || std::strcmp(text, "0") != 0;
  }();
  return value;
}

bool isPointToPoint(Kind kind) { return kind == Kind::Send || kind == Kind::Receive; }

/// Bytes a rank gives and gets. Where only the root gives or gets, others have none.
std::size_t bytesIn(const Operation& op) {
  const std::size_t bytes = op.count * typeSize(op.type);
  if (op.kind == Kind::Receive) return 0;
  if (op.kind == Kind::Broadcast && op.comm->rank != op.peer) return 0;
  return op.kind == Kind::ReduceScatter ? bytes * op.comm->nranks : bytes;
}

std::size_t bytesOut(const Operation& op) {
  const std::size_t bytes = op.count * typeSize(op.type);
  if (op.kind == Kind::Send) return 0;
  if (op.kind == Kind::Reduce && op.comm->rank != op.peer) return 0;
  return op.kind == Kind::AllGather ? bytes * op.comm->nranks : bytes;
}

/// Host memory for an operation's buffer: the buffer itself, or a copy of device memory.
struct Host {
  char* data = nullptr;
  std::size_t bytes = 0;
  std::vector<char> own;
};

/// An operation with its data on the host.
struct Staged {
  Operation op;
  Host in, out;
  std::vector<char> scratch;  ///< the result of a reduction where `out` may overlap `in`
};

Bound boundOf(ncclComm* comm) { return Bound(&comm->aborted); }

Outcome view(const Operation& op, const void* pointer, std::size_t bytes, bool filled, Host* host) {
  host->bytes = bytes;
  if (!bytes) return {};
  if (!pointer) return Outcome::error(ncclInvalidArgument, "a null buffer");
  if (!Driver::get().isDevicePointer(op.comm->context, pointer)) {
    host->data = static_cast<char*>(const_cast<void*>(pointer));
    return {};
  }
  host->own.resize(bytes);
  host->data = host->own.data();
  if (!filled) return {};
  return Driver::get().copyToHost(op.comm->context, op.stream, host->data, pointer, bytes,
                                  boundOf(op.comm));
}

Outcome stage(Staged& staged) {
  const Operation& op = staged.op;
  if (Outcome idle = Driver::get().waitIdle(op.comm->context, op.stream, boundOf(op.comm)); !idle) {
    return idle;
  }
  if (Outcome done = view(op, op.in, bytesIn(op), true, &staged.in); !done) return done;
  return view(op, op.out, bytesOut(op), false, &staged.out);
}

Outcome unstage(Staged& staged) {
  if (staged.out.own.empty()) return {};
  return Driver::get().copyToDevice(staged.op.comm->context, staged.op.stream, staged.op.out,
                                    staged.out.data, staged.out.bytes, boundOf(staged.op.comm));
}

/// The transfers of one collective on one communicator.
class Collective {
 public:
  explicit Collective(Staged& staged)
      : staged_(staged),
        op_(staged.op),
        comm_(*staged.op.comm),
        in_(staged.in.data),
        out_(staged.out.data),
        bytes_(op_.count * typeSize(op_.type)) {}

  Outcome run() {
    switch (op_.kind) {
      case Kind::AllGather:
        return allGather();
      case Kind::Broadcast:
        return broadcast(op_.peer, in_, bytes_);
      case Kind::Reduce:
        return reduceTo(op_.peer, op_.count);
      case Kind::AllReduce: {
        if (Outcome done = reduceTo(0, op_.count); !done) return done;
        return broadcast(0, out_, bytes_);
      }
      case Kind::ReduceScatter:
        return reduceScatter();
      default:
        return Outcome::error(ncclInternalError, "not a collective");
    }
  }

 private:
  Transfer send(int peer, const void* data, std::size_t bytes) const {
    return {peer, true, const_cast<void*>(data), bytes, static_cast<std::uint32_t>(op_.kind)};
  }
  Transfer receive(int peer, void* data, std::size_t bytes) const {
    return {peer, false, data, bytes, static_cast<std::uint32_t>(op_.kind)};
  }
  Outcome go(std::vector<Transfer> transfers) const {
    return exchange(comm_.rank, comm_.peers, std::move(transfers), Bound(&comm_.aborted));
  }

  Outcome allGather() {
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < comm_.nranks; ++peer) {
      if (peer == comm_.rank) continue;
      transfers.push_back(send(peer, in_, bytes_));
      transfers.push_back(receive(peer, out_ + peer * bytes_, bytes_));
    }
    char* const own = out_ + comm_.rank * bytes_;
    if (bytes_ && own != in_) std::memmove(own, in_, bytes_);
    return go(std::move(transfers));
  }

  Outcome broadcast(int root, const char* from, std::size_t bytes) {
    std::vector<Transfer> transfers;
    if (comm_.rank != root) {
      transfers.push_back(receive(root, out_, bytes));
    } else {
      if (bytes && out_ != from) std::memmove(out_, from, bytes);
      for (int peer = 0; peer < comm_.nranks; ++peer) {
        if (peer != root) transfers.push_back(send(peer, out_, bytes));
      }
    }
    return go(std::move(transfers));
  }

  /// Everybody's `in` at the root, combined in the order of ranks; lies in `scratch` there.
  Outcome gatherAndCombine(int root, std::size_t count) {
    const std::size_t bytes = count * typeSize(op_.type);
    if (comm_.rank != root) return go({send(root, in_, bytes)});
    std::vector<std::vector<char>> parts(comm_.nranks);
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < comm_.nranks; ++peer) {
      parts[peer].resize(bytes);
      if (peer != root) transfers.push_back(receive(peer, parts[peer].data(), bytes));
    }
    if (bytes) std::memcpy(parts[root].data(), in_, bytes);
    if (Outcome done = go(std::move(transfers)); !done) return done;
    for (int peer = 1; peer < comm_.nranks; ++peer) {
      combine(parts[0].data(), parts[peer].data(), count, op_.type, op_.reduction);
    }
    finish(parts[0].data(), count, op_.type, op_.reduction, comm_.nranks);
    staged_.scratch = std::move(parts[0]);
    return {};
  }

  Outcome reduceTo(int root, std::size_t count) {
    if (Outcome done = gatherAndCombine(root, count); !done) return done;
    if (comm_.rank == root && bytes_) std::memcpy(out_, staged_.scratch.data(), bytes_);
    return {};
  }

  Outcome reduceScatter() {
    if (Outcome done = gatherAndCombine(0, op_.count * comm_.nranks); !done) return done;
    if (comm_.rank != 0) return go({receive(0, out_, bytes_)});
    std::vector<Transfer> transfers;
    for (int peer = 1; peer < comm_.nranks; ++peer) {
      transfers.push_back(send(peer, staged_.scratch.data() + peer * bytes_, bytes_));
    }
    if (bytes_) std::memcpy(out_, staged_.scratch.data(), bytes_);
    return go(std::move(transfers));
  }

  Staged& staged_;
  const Operation& op_;
  ncclComm& comm_;
  char* in_;
  char* out_;
  std::size_t bytes_;
};

Outcome runOnComm(ncclComm* comm, const std::vector<Staged*>& mine) {
  const std::lock_guard lock(comm->use);
  std::vector<Transfer> transfers;
  for (Staged* staged : mine) {
    if (!isPointToPoint(staged->op.kind)) continue;
    const bool sends = staged->op.kind == Kind::Send;
    const Host& host = sends ? staged->in : staged->out;
    transfers.push_back(
        {staged->op.peer, sends, host.data, host.bytes, static_cast<std::uint32_t>(Kind::Send)});
  }
  Outcome outcome = exchange(comm->rank, comm->peers, std::move(transfers), boundOf(comm));
  for (Staged* staged : mine) {
    if (outcome && !isPointToPoint(staged->op.kind)) outcome = Collective(*staged).run();
  }
  return outcome;
}

/// Keeps the communicator from being freed by an abort on another thread.
class Busy {
 public:
  explicit Busy(ncclComm* comm) : comm_(comm) { ++comm_->users; }
  Busy(Busy&& other) noexcept : comm_(std::exchange(other.comm_, nullptr)) {}
  Busy& operator=(Busy&&) = delete;
  ~Busy() {
    if (comm_) --comm_->users;
  }

 private:
  ncclComm* comm_;
};

Outcome fail(ncclComm* comm, Outcome outcome) {
  outcome.text = fmt::format("rank {} of {}: {}", comm->rank, comm->nranks, outcome.text);
  if (comm->state == ncclSuccess) comm->state = outcome.code;
  return outcome;
}

}  // namespace

std::size_t typeSize(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

Outcome execute(std::vector<Operation> operations) {
  if (!moves()) return {};
  std::vector<Busy> busy;
  for (const Operation& op : operations) busy.emplace_back(op.comm);
  std::vector<Staged> all;
  for (Operation& op : operations) {
    // Captured work runs when the graph is launched, and the stand-in does not: recorded only.
    if (Driver::get().isCapturing(op.comm->context, op.stream)) continue;
    all.push_back({std::move(op), {}, {}, {}});
  }
  std::map<ncclComm*, std::vector<Staged*>> byComm;
  for (Staged& staged : all) {
    if (Outcome done = stage(staged); !done) return fail(staged.op.comm, std::move(done));
    byComm[staged.op.comm].push_back(&staged);
  }
  std::map<ncclComm*, Outcome> outcomes;
  std::vector<std::thread> threads;
  for (auto& [comm, mine] : byComm) outcomes[comm];
  for (auto it = byComm.begin(); it != byComm.end(); ++it) {
    if (it == byComm.begin()) continue;
    threads.emplace_back(
        [it, &outcome = outcomes[it->first]] { outcome = runOnComm(it->first, it->second); });
  }
  if (!byComm.empty()) {
    outcomes[byComm.begin()->first] = runOnComm(byComm.begin()->first, byComm.begin()->second);
  }
  for (std::thread& thread : threads) thread.join();
  Outcome result;
  for (auto& [comm, outcome] : outcomes) {
    if (!outcome) result = fail(comm, outcome);
  }
  for (Staged& staged : all) {
    if (!result) break;
    if (Outcome done = unstage(staged); !done) result = fail(staged.op.comm, std::move(done));
  }
  return result;
}

}  // namespace standin
