#include "tools/bench/layout.h"

#include <set>

namespace hoccl::bench {
namespace {

/// Puts blocks behind one another into one of the two buffers.
void append(std::vector<Block>* blocks, std::uint64_t* end, std::uint64_t bytes, int source,
            int part, bool before) {
  blocks->push_back({*end, bytes, source, part, before});
  *end += bytes;
}

struct Peers {
  int sendTo = -1, receiveFrom = -1;
};

Peers peersOf(Pattern pattern, int rank, int ranks) {
  switch (pattern) {
    case Pattern::Oneway:
      return rank == 0 ? Peers{1, -1} : Peers{-1, 0};
    case Pattern::Ring:
      return {(rank + 1) % ranks, (rank + ranks - 1) % ranks};
    case Pattern::Bidir:
      return {rank ^ 1, rank ^ 1};
  }
  return {};
}

/// One rank's layout while it is being made.
class Maker {
 public:
  Maker(const OperationPlan& plan, int rank, const Shape& shape)
      : plan_(plan),
        rank_(rank),
        bytes_(shape.bytes),
        block_(shape.bytes / static_cast<unsigned>(plan.ranks)) {
    layout_.inPlace = shape.inPlace;
    layout_.callBytes = factsOf(plan.operation).blocks ? block_ : bytes_;
  }

  RankLayout make() {
    switch (plan_.operation) {
      case Operation::SendRecv:
        sendRecv();
        break;
      case Operation::AllGather:
        allGather();
        break;
      case Operation::AlltoAll:
      case Operation::AlltoAllv:
        allToAll();
        break;
      case Operation::Broadcast:
        broadcast();
        break;
      case Operation::Gather:
        gather();
        break;
      case Operation::Scatter:
        scatter();
        break;
    }
    return std::move(layout_);
  }

 private:
  [[nodiscard]] bool inPlace() const { return layout_.inPlace; }
  [[nodiscard]] bool isRoot() const { return rank_ == plan_.root; }
  /// A block to send that lies in the send buffer.
  void sendBlock(std::uint64_t bytes, int part) {
    append(&layout_.send, &layout_.sendBytes, bytes, rank_, part, true);
  }
  void receiveBlock(std::uint64_t bytes, int source, int part, bool before) {
    append(&layout_.receive, &layout_.receiveBytes, bytes, source, part, before);
  }
  void message(std::vector<Message>* messages, int peer, std::uint64_t offset,
               std::uint64_t bytes) {
    // In place a rank has its own block already.
    if (inPlace() && peer == rank_) return;
    messages->push_back({peer, offset, bytes});
  }

  void sendRecv() {
    const Peers peers = peersOf(plan_.pattern, rank_, plan_.ranks);
    if (peers.sendTo >= 0) {
      sendBlock(bytes_, 0);
      message(&layout_.sends, peers.sendTo, 0, bytes_);
    }
    if (peers.receiveFrom >= 0) {
      receiveBlock(bytes_, peers.receiveFrom, 0, false);
      message(&layout_.receives, peers.receiveFrom, 0, bytes_);
    }
  }

  void allGather() {
    if (!inPlace()) sendBlock(block_, 0);
    if (inPlace()) layout_.sendAt = block_ * rank_;
    for (int peer = 0; peer < plan_.ranks; ++peer) {
      receiveBlock(block_, peer, 0, inPlace() && peer == rank_);
      message(&layout_.sends, peer, layout_.sendAt, block_);
      message(&layout_.receives, peer, block_ * peer, block_);
    }
  }

  void allToAll() {
    for (int peer = 0; peer < plan_.ranks; ++peer) {
      const bool skewed = plan_.operation == Operation::AlltoAllv;
      const std::uint64_t out = skewed ? skewedBytes(plan_, rank_, peer, bytes_) : block_;
      const std::uint64_t in = skewed ? skewedBytes(plan_, peer, rank_, bytes_) : block_;
      message(&layout_.sends, peer, layout_.sendBytes, out);
      message(&layout_.receives, peer, layout_.receiveBytes, in);
      sendBlock(out, peer);
      receiveBlock(in, peer, rank_, false);
    }
  }

  void broadcast() {
    receiveBlock(bytes_, plan_.root, 0, inPlace() && isRoot());
    if (isRoot() && !inPlace()) sendBlock(bytes_, 0);
    if (!isRoot() || !inPlace()) message(&layout_.receives, plan_.root, 0, bytes_);
    if (!isRoot()) return;
    for (int peer = 0; peer < plan_.ranks; ++peer) message(&layout_.sends, peer, 0, bytes_);
  }

  void gather() {
    if (!inPlace()) sendBlock(block_, 0);
    if (isRoot()) {
      if (inPlace()) layout_.sendAt = block_ * rank_;
      for (int peer = 0; peer < plan_.ranks; ++peer) {
        receiveBlock(block_, peer, 0, inPlace() && peer == rank_);
        message(&layout_.receives, peer, block_ * peer, block_);
      }
    } else if (inPlace()) {
      // Only the root receives: the other ranks' one buffer holds what they send, and keeps it.
      receiveBlock(block_, rank_, 0, true);
    }
    message(&layout_.sends, plan_.root, layout_.sendAt, block_);
  }

  void scatter() {
    if (isRoot()) {
      if (inPlace()) layout_.receiveAt = block_ * rank_;
      for (int peer = 0; peer < plan_.ranks; ++peer) {
        message(&layout_.sends, peer, block_ * peer, block_);
        if (inPlace()) {
          receiveBlock(block_, rank_, peer, true);
        } else {
          sendBlock(block_, peer);
        }
      }
    }
    if (!isRoot() || !inPlace()) receiveBlock(block_, plan_.root, rank_, false);
    message(&layout_.receives, plan_.root, layout_.receiveAt, block_);
  }

  const OperationPlan& plan_;
  int rank_;
  std::uint64_t bytes_, block_;
  RankLayout layout_;
};

}  // namespace

std::uint64_t RankLayout::bytesOut() const {
  std::set<std::uint64_t> counted;
  std::uint64_t sum = 0;
  for (const Message& message : sends)
    if (counted.insert(message.offset).second) sum += message.bytes;
  return sum;
}

std::uint64_t RankLayout::bytesIn() const {
  std::uint64_t sum = 0;
  for (const Message& message : receives) sum += message.bytes;
  return sum;
}

std::uint64_t skewedBytes(const OperationPlan& plan, int from, int to, std::uint64_t bytes) {
  // The block at distance d weighs (ranks - 1) + (skew - 1) d, hence skew times as much at the
  // largest distance, ranks - 1, as at 0. Cutting at the running sum of the weights makes the
  // blocks add up to the whole exactly.
  const auto ranks = static_cast<std::uint64_t>(plan.ranks);
  const auto more = static_cast<std::uint64_t>(plan.skew - 1);
  const auto weightBelow = [&](std::uint64_t d) {
    return d == 0 ? 0 : d * (ranks - 1) + more * (d * (d - 1) / 2);
  };
  const std::uint64_t elements = bytes / plan.elementBytes;
  // Below 2^40 elements times 2^21 of weight: no overflow.
  const auto cut = [&](std::uint64_t d) { return elements * weightBelow(d) / weightBelow(ranks); };
  const auto distance = static_cast<std::uint64_t>((to - from + plan.ranks) % plan.ranks);
  return (cut(distance + 1) - cut(distance)) * plan.elementBytes;
}

RankLayout layoutOf(const OperationPlan& plan, int rank, const Shape& shape) {
  return Maker(plan, rank, shape).make();
}

}  // namespace hoccl::bench
