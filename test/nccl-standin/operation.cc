#include "operation.h"

#include <cstring>
#include <utility>

namespace standin {
namespace {

bool isPointToPoint(Kind kind) { return kind == Kind::Send || kind == Kind::Receive; }

/// The transfers of one collective on one communicator.
class Collective {
 public:
  explicit Collective(const Staged& staged)
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
    return exchange(comm_.rank, comm_.peers, std::move(transfers), Bound(&comm_.cancelled));
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

  /// Everybody's `in` at the root, combined in the order of ranks; lies in `result_` there.
  Outcome gatherAndCombine(int root, std::size_t count) {
    const std::size_t bytes = count * typeSize(op_.type);
    std::vector<char> scaled;
    const char* mine = in_;
    if (op_.scale && bytes) {
      scaled.assign(in_, in_ + bytes);
      const char* by = staged_.scalar.data ? staged_.scalar.data : op_.scale->value;
      multiply(scaled.data(), by, count, op_.type);
      mine = scaled.data();
    }
    if (comm_.rank != root) return go({send(root, mine, bytes)});
    std::vector<std::vector<char>> parts(comm_.nranks);
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < comm_.nranks; ++peer) {
      parts[peer].resize(bytes);
      if (peer != root) transfers.push_back(receive(peer, parts[peer].data(), bytes));
    }
    if (bytes) std::memcpy(parts[root].data(), mine, bytes);
    if (Outcome done = go(std::move(transfers)); !done) return done;
    for (int peer = 1; peer < comm_.nranks; ++peer) {
      combine(parts[0].data(), parts[peer].data(), count, op_.type, reduction());
    }
    finish(parts[0].data(), count, op_.type, reduction(), comm_.nranks);
    result_ = std::move(parts[0]);
    return {};
  }

  Outcome reduceTo(int root, std::size_t count) {
    if (Outcome done = gatherAndCombine(root, count); !done) return done;
    if (comm_.rank == root && bytes_) std::memcpy(out_, result_.data(), bytes_);
    return {};
  }

  Outcome reduceScatter() {
    if (Outcome done = gatherAndCombine(0, op_.count * comm_.nranks); !done) return done;
    if (comm_.rank != 0) return go({receive(0, out_, bytes_)});
    std::vector<Transfer> transfers;
    for (int peer = 1; peer < comm_.nranks; ++peer) {
      transfers.push_back(send(peer, result_.data() + peer * bytes_, bytes_));
    }
    if (bytes_) std::memcpy(out_, result_.data(), bytes_);
    return go(std::move(transfers));
  }

  [[nodiscard]] ncclRedOp_t reduction() const { return op_.scale ? ncclSum : op_.reduction; }

  const Staged& staged_;
  const Operation& op_;
  ncclComm& comm_;
  char* in_;
  char* out_;
  std::size_t bytes_;
  std::vector<char> result_;  ///< of a reduction; `out` may overlap `in`
};

}  // namespace

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

Outcome moveData(ncclComm* comm, const std::vector<Staged>& operations) {
  std::vector<Transfer> transfers;
  for (const Staged& staged : operations) {
    if (!isPointToPoint(staged.op.kind)) continue;
    const bool sends = staged.op.kind == Kind::Send;
    const Host& host = sends ? staged.in : staged.out;
    transfers.push_back(
        {staged.op.peer, sends, host.data, host.bytes, static_cast<std::uint32_t>(Kind::Send)});
  }
  Outcome outcome =
      exchange(comm->rank, comm->peers, std::move(transfers), Bound(&comm->cancelled));
  for (const Staged& staged : operations) {
    if (outcome && !isPointToPoint(staged.op.kind)) outcome = Collective(staged).run();
  }
  return outcome;
}

}  // namespace standin
