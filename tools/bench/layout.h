#pragma once

#include <cstdint>
#include <vector>

#include "common/base/status.h"
#include "tools/bench/operations.h"
#include "tools/bench/options.h"

namespace hoccl::bench {

/// An operation as all ranks of a set perform it.
struct OperationPlan {
  Operation operation = Operation::SendRecv;
  int ranks = 0;
  int root = 0;
  Pattern pattern = Pattern::Oneway;  ///< sendrecv's
  int skew = 1;                       ///< alltoallv's: largest block / smallest block of a rank
  unsigned elementBytes = 1;
};

/// One size of an operation, in place or not. `bytes` as the size column means it: whole elements,
/// and where the operation has blocks, whole elements of each. `inPlace` only for operations that
/// have an in-place form.
struct Shape {
  std::uint64_t bytes = 0;
  bool inPlace = false;
};

/// A stretch of a buffer that holds bytes of one rank.
struct Block {
  std::uint64_t offset = 0, bytes = 0;
  int source = 0;  ///< whose bytes
  int part = 0;    ///< which of that rank's blocks: the receiver's rank, 0 where all get the same
  bool before = false;  ///< the bytes are there before the operation, too; else the poison is
};

/// One side of a send/recv of the operation. `offset` is in the buffer of that side.
struct Message {
  int peer = 0;
  std::uint64_t offset = 0, bytes = 0;
};

/// What one rank brings to an operation of one size, and what it must have afterwards. In place
/// there is only the receive buffer, and the blocks to send lie in it.
struct RankLayout {
  bool inPlace = false;
  std::vector<Block> send, receive;               ///< without gaps, in the order of their offsets
  std::uint64_t sendBytes = 0, receiveBytes = 0;  ///< of the two buffers
  std::uint64_t callBytes = 0;              ///< what the collective function's count stands for
  std::uint64_t sendAt = 0, receiveAt = 0;  ///< where in the buffers its two pointers point
  /// The operation as send/recv, those to the rank itself included: what is issued where there is
  /// no function for it, and what the bare copies consist of.
  std::vector<Message> sends, receives;

  /// Bytes that a staged transfer copies out of and into this rank's GPU: of blocks that several
  /// ranks receive the first copy serves all.
  [[nodiscard]] std::uint64_t bytesOut() const;
  [[nodiscard]] std::uint64_t bytesIn() const;
};

RankLayout layoutOf(const OperationPlan& plan, int rank, const Shape& shape);

/// Bytes that rank `from` sends rank `to` in an alltoallv of `bytes`. Blocks grow evenly with the
/// distance (to - from) modulo ranks, from a rank's block for itself up to `skew` times that, cut
/// at whole elements, so that every rank sends and receives `bytes` in all.
std::uint64_t skewedBytes(const OperationPlan& plan, int from, int to, std::uint64_t bytes);

}  // namespace hoccl::bench
