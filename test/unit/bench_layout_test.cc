// What lies where before and after each operation, and that all ranks' parts fit together.
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "tools/bench/layout.h"
#include "tools/bench/pattern.h"

namespace hoccl::bench {
namespace {

/// One rank's buffers in host memory.
struct Memory {
  std::vector<std::uint8_t> send, receive;
};

std::vector<RankLayout> layoutsOf(const OperationPlan& plan, const Shape& shape) {
  std::vector<RankLayout> layouts;
  for (int rank = 0; rank < plan.ranks; ++rank) layouts.push_back(layoutOf(plan, rank, shape));
  return layouts;
}

BytePattern patternOf(const Block& block) { return BytePattern::of(block.source, block.part, 7); }

std::uint64_t wrongBytes(const RankLayout& layout, const Memory& memory) {
  std::uint64_t wrong = 0, first = 0;
  for (const Block& block : layout.receive)
    wrong +=
        patternOf(block).countWrong(0, block.bytes, memory.receive.data() + block.offset, &first);
  return wrong;
}

Memory prepared(const RankLayout& layout) {
  Memory memory{std::vector<std::uint8_t>(layout.sendBytes),
                std::vector<std::uint8_t>(layout.receiveBytes)};
  for (const Block& block : layout.send)
    patternOf(block).fill(0, block.bytes, memory.send.data() + block.offset);
  for (const Block& block : layout.receive)
    patternOf(block).fill(0, block.bytes, memory.receive.data() + block.offset, !block.before);
  return memory;
}

/// Every shape that a test of all operations covers.
struct Case {
  OperationPlan plan;
  Shape shape;
};

std::vector<Case> allCases() {
  std::vector<Case> cases;
  for (int i = 0; i < kOperations; ++i)
    for (const int ranks : {2, 3, 8})
      for (const int root : {0, ranks - 1})
        for (const bool inPlace : {false, true}) {
          const OperationFacts& facts = operationAt(i);
          if ((inPlace && !facts.inPlace) || (root > 0 && !facts.rooted)) continue;
          OperationPlan plan{facts.operation, ranks, root, Pattern::Ring, 3, 4};
          const std::uint64_t blocks = facts.blocks ? static_cast<unsigned>(ranks) : 1;
          cases.push_back({plan, {blocks * 4 * 251, inPlace}});
        }
  return cases;
}

std::string nameOf(const Case& one) {
  return std::string(factsOf(one.plan.operation).name) + ", " + std::to_string(one.plan.ranks) +
         " ranks, root " + std::to_string(one.plan.root) +
         (one.shape.inPlace ? ", in place" : ", out of place");
}

TEST(BenchOperations, BusFactorsAreThoseOfNcclTests) {
  EXPECT_EQ(busFactor(Operation::SendRecv, 4), 1);
  EXPECT_EQ(busFactor(Operation::Broadcast, 4), 1);
  for (const Operation operation : {Operation::AllGather, Operation::AlltoAll, Operation::AlltoAllv,
                                    Operation::Gather, Operation::Scatter}) {
    EXPECT_EQ(busFactor(operation, 2), 0.5);
    EXPECT_EQ(busFactor(operation, 4), 0.75);
    EXPECT_EQ(busFactor(operation, 8), 0.875);
  }
}

TEST(BenchOperations, AreFoundByName) {
  Operation found{};
  ASSERT_TRUE(operationByName("alltoallv", &found));
  EXPECT_EQ(found, Operation::AlltoAllv);
  const Status status = operationByName("allreduce", &found);
  ASSERT_FALSE(status);
  EXPECT_NE(status.message().find("allreduce: known are sendrecv, allgather"), std::string::npos)
      << status.message();
}

TEST(BenchLayout, SizesMeanWhatNcclTestsMeans) {
  const auto layout = [](Operation operation, int rank) {
    return layoutOf({operation, 3, 1, Pattern::Ring, 1, 1}, rank, {300, false});
  };
  EXPECT_EQ(layout(Operation::SendRecv, 0).sendBytes, 300u);
  EXPECT_EQ(layout(Operation::AllGather, 0).sendBytes, 100u);
  EXPECT_EQ(layout(Operation::AllGather, 0).receiveBytes, 300u);
  EXPECT_EQ(layout(Operation::AlltoAll, 0).sendBytes, 300u);
  EXPECT_EQ(layout(Operation::AlltoAll, 0).receiveBytes, 300u);
  EXPECT_EQ(layout(Operation::Broadcast, 0).sendBytes, 0u);
  EXPECT_EQ(layout(Operation::Broadcast, 1).sendBytes, 300u);
  EXPECT_EQ(layout(Operation::Broadcast, 0).receiveBytes, 300u);
  EXPECT_EQ(layout(Operation::Gather, 0).sendBytes, 100u);
  EXPECT_EQ(layout(Operation::Gather, 0).receiveBytes, 0u);
  EXPECT_EQ(layout(Operation::Gather, 1).receiveBytes, 300u);
  EXPECT_EQ(layout(Operation::Scatter, 0).receiveBytes, 100u);
  EXPECT_EQ(layout(Operation::Scatter, 0).sendBytes, 0u);
  EXPECT_EQ(layout(Operation::Scatter, 1).sendBytes, 300u);
}

TEST(BenchLayout, BlocksLieBehindOneAnother) {
  for (const Case& one : allCases())
    for (const RankLayout& layout : layoutsOf(one.plan, one.shape))
      for (const auto& [blocks, bytes] : {std::pair{layout.send, layout.sendBytes},
                                          std::pair{layout.receive, layout.receiveBytes}}) {
        std::uint64_t end = 0;
        for (const Block& block : blocks) {
          EXPECT_EQ(block.offset, end) << nameOf(one);
          end += block.bytes;
        }
        EXPECT_EQ(end, bytes) << nameOf(one);
      }
}

TEST(BenchLayout, TheMessagesTurnWhatIsBeforeIntoWhatMustBe) {
  for (const Case& one : allCases()) {
    const auto layouts = layoutsOf(one.plan, one.shape);
    std::vector<Memory> memories;
    std::uint64_t received = 0, poisoned = 0;
    for (const RankLayout& layout : layouts) {
      memories.push_back(prepared(layout));
      poisoned += wrongBytes(layout, memories.back());
      received += layout.bytesIn();
    }
    // Every byte that an operation has to bring is wrong before it, and no other.
    EXPECT_EQ(poisoned, received) << nameOf(one);
    EXPECT_GT(received, 0u) << nameOf(one);
    for (std::size_t to = 0; to < layouts.size(); ++to) {
      std::map<int, std::size_t> taken;  // by peer: the next of its messages to this rank
      for (const Message& message : layouts[to].receives) {
        const auto from = static_cast<std::size_t>(message.peer);
        std::vector<Message> mine;
        for (const Message& sent : layouts[from].sends)
          if (sent.peer == static_cast<int>(to)) mine.push_back(sent);
        const std::size_t index = taken[message.peer]++;
        ASSERT_LT(index, mine.size()) << nameOf(one) << ": nothing sent for it";
        ASSERT_EQ(mine[index].bytes, message.bytes) << nameOf(one);
        const auto& source = layouts[from].inPlace ? memories[from].receive : memories[from].send;
        std::memcpy(memories[to].receive.data() + message.offset,
                    source.data() + mine[index].offset, message.bytes);
      }
      for (std::size_t from = 0; from < layouts.size(); ++from) {
        std::size_t sent = 0;
        for (const Message& message : layouts[from].sends)
          sent += message.peer == static_cast<int>(to);
        EXPECT_EQ(sent, taken[static_cast<int>(from)]) << nameOf(one) << ": sent, not received";
      }
    }
    for (std::size_t rank = 0; rank < layouts.size(); ++rank)
      EXPECT_EQ(wrongBytes(layouts[rank], memories[rank]), 0u) << nameOf(one) << " rank " << rank;
    // One wrong byte anywhere is one wrong byte.
    Memory& last = memories.back().receive.empty() ? memories.front() : memories.back();
    const RankLayout& lastLayout =
        memories.back().receive.empty() ? layouts.front() : layouts.back();
    if (last.receive.empty()) continue;
    last.receive[last.receive.size() / 2] ^= 1;
    EXPECT_EQ(wrongBytes(lastLayout, last), 1u) << nameOf(one);
  }
}

TEST(BenchLayout, TheCallsPointersAreNcclsInPlaceForms) {
  const auto layout = [](Operation operation, int rank) {
    return layoutOf({operation, 3, 1, Pattern::Ring, 1, 1}, rank, {300, true});
  };
  // ncclAllGather: sendbuff == recvbuff + rank * sendcount.
  EXPECT_EQ(layout(Operation::AllGather, 2).sendAt, 200u);
  EXPECT_EQ(layout(Operation::AllGather, 2).callBytes, 100u);
  // ncclGather: at the root the same; ncclScatter: recvbuff == sendbuff + rank * recvcount there.
  EXPECT_EQ(layout(Operation::Gather, 1).sendAt, 100u);
  EXPECT_EQ(layout(Operation::Scatter, 1).receiveAt, 100u);
  EXPECT_EQ(layout(Operation::Scatter, 1).receiveBytes, 300u);
  EXPECT_EQ(layout(Operation::Scatter, 0).receiveAt, 0u);
  EXPECT_EQ(layout(Operation::Broadcast, 1).callBytes, 300u);
}

TEST(BenchLayout, SkewAddsUp) {
  OperationPlan plan{Operation::AlltoAllv, 3, 0, Pattern::Ring, 2, 1};
  // Distances 0, 1, 2 weigh 2, 3, 4.
  EXPECT_EQ(skewedBytes(plan, 0, 0, 9000), 2000u);
  EXPECT_EQ(skewedBytes(plan, 0, 1, 9000), 3000u);
  EXPECT_EQ(skewedBytes(plan, 0, 2, 9000), 4000u);
  EXPECT_EQ(skewedBytes(plan, 2, 0, 9000), 3000u);
  plan.ranks = 2;
  EXPECT_EQ(skewedBytes(plan, 1, 1, 3000), 1000u);
  EXPECT_EQ(skewedBytes(plan, 1, 0, 3000), 2000u);
  plan.skew = 1;
  EXPECT_EQ(skewedBytes(plan, 1, 0, 3000), 1500u);
  for (const int ranks : {2, 3, 5, 8, 64})
    for (const int skew : {1, 2, 7, 1000}) {
      const OperationPlan many{Operation::AlltoAllv, ranks, 0, Pattern::Ring, skew, 4};
      const std::uint64_t bytes = 4u * 1013 * static_cast<unsigned>(ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        const RankLayout layout = layoutOf(many, rank, {bytes, false});
        EXPECT_EQ(layout.sendBytes, bytes) << ranks << " ranks, skew " << skew;
        EXPECT_EQ(layout.receiveBytes, bytes) << ranks << " ranks, skew " << skew;
        for (const Block& block : layout.send) EXPECT_EQ(block.bytes % 4, 0u);
      }
    }
  // Sizes near the largest allowed do not overflow.
  const OperationPlan largest{Operation::AlltoAllv, 64, 0, Pattern::Ring, 1000, 1};
  EXPECT_EQ(layoutOf(largest, 63, {1ull << 40, false}).sendBytes, 1ull << 40);
}

TEST(BenchLayout, BareCopiesOfTwoRanks) {
  struct Expected {
    Operation operation;
    bool inPlace;
    std::uint64_t out0, in0, out1, in1;
  };
  // Bytes each rank copies out of and into its GPU for 1000; a block that two ranks receive goes
  // out once, and out of place a rank's own block is copied as well.
  for (const Expected& e : {Expected{Operation::SendRecv, false, 1000, 0, 0, 1000},
                            Expected{Operation::AllGather, false, 500, 1000, 500, 1000},
                            Expected{Operation::AllGather, true, 500, 500, 500, 500},
                            Expected{Operation::AlltoAll, false, 1000, 1000, 1000, 1000},
                            Expected{Operation::Broadcast, false, 1000, 1000, 0, 1000},
                            Expected{Operation::Broadcast, true, 1000, 0, 0, 1000},
                            Expected{Operation::Gather, false, 500, 1000, 500, 0},
                            Expected{Operation::Gather, true, 0, 500, 500, 0},
                            Expected{Operation::Scatter, false, 1000, 500, 0, 500},
                            Expected{Operation::Scatter, true, 500, 0, 0, 500}}) {
    const OperationPlan plan{e.operation, 2, 0, Pattern::Oneway, 1, 1};
    const auto layouts = layoutsOf(plan, {1000, e.inPlace});
    const std::string name = nameOf({plan, {1000, e.inPlace}});
    EXPECT_EQ(layouts[0].bytesOut(), e.out0) << name;
    EXPECT_EQ(layouts[0].bytesIn(), e.in0) << name;
    EXPECT_EQ(layouts[1].bytesOut(), e.out1) << name;
    EXPECT_EQ(layouts[1].bytesIn(), e.in1) << name;
  }
}

}  // namespace
}  // namespace hoccl::bench
