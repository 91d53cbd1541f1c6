#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace e2e::soak {

/// The same numbers on every rank and machine (splitmix64). Two generators with one different
/// argument have nothing to do with each other.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t subject, std::uint64_t number = 0);
  std::uint64_t next();
  /// 0 to `end` - 1.
  std::size_t below(std::size_t end) { return static_cast<std::size_t>(next() % end); }
  bool oneIn(std::size_t times) { return below(times) == 0; }
  bool percent(std::size_t of) { return below(100) < of; }

 private:
  std::uint64_t state_;
};

enum class What { Pair, Self, AllGather, AlltoAll, Gather, Scatter, Broadcast, Bcast, AllReduce };
const char* nameOf(What what);
constexpr bool isPointToPoint(What what) { return what == What::Pair || what == What::Self; }

/// One operation, as all ranks know it. Ranks are those of its communicator.
struct Operation {
  std::uint64_t number = 0;
  What what = What::Pair;
  std::size_t communicator = 0;
  std::size_t bytes = 0;  ///< of one block
  int root = 0;           ///< the sender of a Pair, the one rank of a Self
  int peer = 0;           ///< the receiver of a Pair
  bool inPlace = false;
  [[nodiscard]] std::string text() const;
};

/// What one rank has of an operation, in blocks of `bytes`. With `shared`, input and output are
/// parts of one buffer of `expected.size()` blocks.
struct Share {
  bool reads = false, writes = false, shared = false;
  std::vector<std::uint64_t> input;  ///< the pattern of each block that is put in
  /// The patterns whose sum (byte by byte) is in each block afterwards.
  std::vector<std::vector<std::uint64_t>> expected;
  std::size_t inputAt = 0, outputAt = 0;  ///< blocks, within a shared buffer
};
Share shareOf(const Operation& op, int rank, int ranks);

struct Group {
  std::uint64_t number = 0;
  bool grouped = true;  ///< between ncclGroupStart and ncclGroupEnd; else one operation alone
  std::vector<Operation> operations;
};

/// What all ranks do in the same order, a pure function of the seed: four ranks, three
/// communicators of each rank at most.
class Plan {
 public:
  static constexpr int kRanks = 4;
  /// The bytes of a buffer, whatever blocks it has.
  static constexpr std::size_t kLargestBuffer = 2 << 20;
  static constexpr std::size_t kMostOperations = 8;
  static constexpr std::size_t kSmallestSteered = 64 << 10;  ///< HOCCL_MIN_BYTES

  Plan(std::uint64_t seed, int nodes);
  /// World ranks of each communicator by its rank: all, two of two, and three in reversed order.
  [[nodiscard]] const std::vector<std::vector<int>>& members() const { return members_; }
  [[nodiscard]] std::uint64_t seed() const { return seed_; }
  Group next();
  /// Whether HOCCL's rule sends it over the movers: enough bytes; every rank has a GPU of its own.
  [[nodiscard]] bool steered(const Operation& op) const;

 private:
  Operation operation(Random& random);
  [[nodiscard]] bool apart(std::size_t communicator, int a, int b) const;

  std::uint64_t seed_;
  int ranksOfANode_;
  std::vector<std::vector<int>> members_;
  std::uint64_t groups_ = 0, operations_ = 0;
};

}  // namespace e2e::soak
