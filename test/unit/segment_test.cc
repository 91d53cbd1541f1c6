#include "common/runtime/segment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/base/time.h"

namespace hoccl {
namespace {

constexpr std::uint32_t kSlots = 64;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

/// Zeroed memory as a fresh memfd would be.
struct Memory {
  explicit Memory(std::size_t size)
      : bytes(size), data(static_cast<std::byte*>(std::aligned_alloc(4096, size))) {
    std::memset(data.get(), 0, size);
  }
  std::size_t bytes;
  std::unique_ptr<std::byte, Free> data;
};

OpDescriptor numbered(std::uint32_t producer, std::uint64_t number) {
  OpDescriptor op{};
  op.kind = OpKind::Send;
  op.communicator = producer;
  op.pairSequence = number;
  op.bytes = number * 3 + producer;
  op.buffer.allocationId = ~number;
  return op;
}

TEST(Segment, TakesItsOwnLayout) {
  Memory memory(Segment::bytesFor(kSlots));
  Segment::create(memory.data.get(), kSlots);
  Segment other;
  const Status status = Segment::attach(memory.data.get(), memory.bytes, &other);
  ASSERT_TRUE(status) << status.message();
  EXPECT_EQ(other.launchSlots(), kSlots);
  EXPECT_TRUE(other.empty());
}

TEST(Segment, PartsLieInsideAndApart) {
  for (std::uint32_t slots : {1u, 63u, 64u, 4096u}) {
    const std::size_t bytes = Segment::bytesFor(slots);
    EXPECT_EQ(bytes % 4096, 0u);
    Memory memory(bytes);
    const Segment segment = Segment::create(memory.data.get(), slots);
    const std::byte* end = memory.data.get() + bytes;
    EXPECT_LE(reinterpret_cast<std::byte*>(&segment.launch(slots - 1) + 1), end);
    EXPECT_LE(reinterpret_cast<std::byte*>(&segment.communicator(kMaxCommunicators - 1) + 1),
              reinterpret_cast<std::byte*>(&segment.launch(0)));
    EXPECT_GE(reinterpret_cast<std::byte*>(&segment.communicator(0)),
              memory.data.get() + sizeof(SegmentHeader) + sizeof(OpRingEntry) * kOpRingEntries);
    EXPECT_EQ(segment.base() + segment.offsetOf(segment.launch(slots - 1).finish),
              reinterpret_cast<std::byte*>(&segment.launch(slots - 1).finish));
  }
}

struct Torn {
  const char* what;
  std::function<void(SegmentHeader&, std::size_t* bytes)> tear;
  std::vector<const char*> says;
};

class Rule10 : public ::testing::TestWithParam<Torn> {};

TEST_P(Rule10, TornSegmentIsRefusedAndNamed) {
  Memory memory(Segment::bytesFor(kSlots));
  Segment segment = Segment::create(memory.data.get(), kSlots);
  std::size_t bytes = memory.bytes;
  GetParam().tear(segment.header(), &bytes);
  Segment other;
  const Status status = Segment::attach(memory.data.get(), bytes, &other);
  ASSERT_FALSE(status);
  EXPECT_EQ(other.base(), nullptr) << "bad input must change nothing";
  for (const char* words : GetParam().says) {
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Segment, Rule10,
    ::testing::Values(
        Torn{"ShorterThanHeader",
             [](SegmentHeader&, std::size_t* bytes) { *bytes = 100; },
             {"100 bytes", "header"}},
        Torn{"Magic", [](SegmentHeader& h, std::size_t*) { h.magic = 0x1234; }, {"magic 0x1234"}},
        Torn{"Version",
             [](SegmentHeader& h, std::size_t*) { h.version = 99; },
             {"version 99", "different builds"}},
        Torn{"NoLaunchSlots",
             [](SegmentHeader& h, std::size_t*) { h.launchSlots = 0; },
             {"0 launch slots"}},
        Torn{"MoreLaunchSlots",
             [](SegmentHeader& h, std::size_t*) { h.launchSlots = 1 << 30; },
             {"1073741824 launch slots"}},
        Torn{"Bytes", [](SegmentHeader& h, std::size_t*) { h.bytes = 77; }, {"in 77 bytes"}},
        Torn{"MappedLess",
             [](SegmentHeader&, std::size_t* bytes) { *bytes -= 4096; },
             {"mapped", "64 launch slots"}}),
    [](const ::testing::TestParamInfo<Torn>& info) { return std::string(info.param.what); });

TEST(OpRing, KeepsOrderOverManyRounds) {
  Memory memory(Segment::bytesFor(kSlots));
  const Segment segment = Segment::create(memory.data.get(), kSlots);
  std::uint64_t in = 0, out = 0;
  OpDescriptor op{};
  EXPECT_FALSE(segment.tryPop(&op, false));
  while (out < 5 * kOpRingEntries) {
    for (int i = 0; i < 777; ++i) {
      if (segment.tryPush(numbered(1, in))) ++in;
    }
    for (int i = 0; i < 700 && segment.tryPop(&op, false); ++i) {
      ASSERT_EQ(op.pairSequence, out);
      ASSERT_EQ(op.buffer.allocationId, ~out);
      ++out;
    }
  }
}

TEST(OpRing, FullUntilTheMoverTakesOne) {
  Memory memory(Segment::bytesFor(kSlots));
  const Segment segment = Segment::create(memory.data.get(), kSlots);
  for (std::uint64_t i = 0; i < kOpRingEntries; ++i) ASSERT_TRUE(segment.tryPush(numbered(0, i)));
  EXPECT_FALSE(segment.tryPush(numbered(0, 1)));
  EXPECT_FALSE(segment.tryPush(numbered(0, 2)));
  OpDescriptor op{};
  ASSERT_TRUE(segment.tryPop(&op, false));
  EXPECT_EQ(op.pairSequence, 0u);
  EXPECT_TRUE(segment.tryPush(numbered(0, kOpRingEntries)));
  EXPECT_FALSE(segment.tryPush(numbered(0, 3)));
  for (std::uint64_t i = 1; i <= kOpRingEntries; ++i) {
    ASSERT_TRUE(segment.tryPop(&op, false));
    ASSERT_EQ(op.pairSequence, i);
  }
  EXPECT_TRUE(segment.empty());
  EXPECT_FALSE(segment.tryPop(&op, false));
}

/// A thread that stays in its driver call holds up no other one's operations.
TEST(OpRing, Rule7OperationsBehindAClaimedPlaceAreTaken) {
  Memory memory(Segment::bytesFor(kSlots));
  const Segment segment = Segment::create(memory.data.get(), kSlots);
  OpDescriptor op{};
  for (std::uint64_t round = 0; round < 3 * kOpRingEntries; ++round) {
    std::uint64_t place = 0;
    ASSERT_TRUE(segment.tryClaim(&place));
    ASSERT_TRUE(segment.empty());
    ASSERT_TRUE(segment.tryPush(numbered(1, round)));
    ASSERT_TRUE(segment.tryPush(numbered(2, round)));
    ASSERT_FALSE(segment.empty());
    ASSERT_FALSE(segment.tryPop(&op, false));
    ASSERT_TRUE(segment.tryPop(&op, true));
    ASSERT_EQ(op.communicator, 1u);
    if (round % 2) {
      ASSERT_TRUE(segment.tryPop(&op, true));
      ASSERT_EQ(op.communicator, 2u);
      ASSERT_TRUE(segment.empty());
    }
    segment.fill(place, numbered(0, round));
    ASSERT_TRUE(segment.tryPop(&op, false));
    ASSERT_EQ(op.communicator, 0u);
    ASSERT_EQ(op.pairSequence, round);
    if (round % 2 == 0) {
      ASSERT_TRUE(segment.tryPop(&op, false));
      ASSERT_EQ(op.communicator, 2u);
    }
    ASSERT_FALSE(segment.tryPop(&op, true));
  }
}

TEST(OpRing, AClaimedPlaceEndsARound) {
  Memory memory(Segment::bytesFor(kSlots));
  const Segment segment = Segment::create(memory.data.get(), kSlots);
  OpDescriptor op{};
  std::uint64_t place = 0, further = 0;
  ASSERT_TRUE(segment.tryClaim(&place));
  for (std::uint64_t i = 1; i < kOpRingEntries; ++i) {
    ASSERT_TRUE(segment.tryPush(numbered(1, i)));
    ASSERT_TRUE(segment.tryPop(&op, true));
    ASSERT_EQ(op.pairSequence, i);
  }
  EXPECT_FALSE(segment.tryClaim(&further));
  segment.fill(place, numbered(1, 0));
  ASSERT_TRUE(segment.tryPop(&op, false));
  EXPECT_EQ(op.pairSequence, 0u);
  ASSERT_TRUE(segment.tryPush(numbered(1, kOpRingEntries)));
  ASSERT_TRUE(segment.tryPop(&op, false));
  EXPECT_EQ(op.pairSequence, kOpRingEntries);
}

TEST(OpRing, FourProducersLoseAndTearNothing) {
  constexpr std::uint32_t kProducers = 4;
  constexpr std::uint64_t kEach = 20'000;
  Memory memory(Segment::bytesFor(kSlots));
  const Segment segment = Segment::create(memory.data.get(), kSlots);
  const Deadline deadline = Deadline::afterMs(20'000);
  std::vector<std::thread> producers;
  for (std::uint32_t p = 0; p < kProducers; ++p) {
    producers.emplace_back([&, p] {
      for (std::uint64_t i = 0; i < kEach && !deadline.passed(); ++i) {
        std::uint64_t place = 0;
        while (!segment.tryClaim(&place) && !deadline.passed()) std::this_thread::yield();
        if (i % 100 == p) std::this_thread::yield();
        segment.fill(place, numbered(p, i));
      }
    });
  }
  std::vector<std::uint64_t> next(kProducers, 0);
  std::uint64_t taken = 0;
  bool torn = false;
  while (taken < kProducers * kEach && !deadline.passed() && !torn) {
    OpDescriptor op{};
    if (!segment.tryPop(&op, taken % 3 == 0)) {
      std::this_thread::yield();
      continue;
    }
    ++taken;
    torn = op.communicator >= kProducers || op.pairSequence != next[op.communicator] ||
           op.bytes != op.pairSequence * 3 + op.communicator ||
           op.buffer.allocationId != ~op.pairSequence;
    if (!torn) ++next[op.communicator];
  }
  for (std::thread& producer : producers) producer.join();
  EXPECT_FALSE(torn);
  EXPECT_EQ(taken, kProducers * kEach);
  EXPECT_TRUE(segment.empty());
}

/// Two threads may end a communicator at the same time, and the one that does not wait for the mover
/// must not give the index away under it.
TEST(CommunicatorRecord, IsLeftOnceAndOnlyWhenTheMoverHasClosedIt) {
  CommunicatorRecord record{};
  const auto set = [&](CommunicatorState state) {
    record.state = static_cast<std::uint32_t>(state);
  };
  const auto is = [&](CommunicatorState state) {
    return record.state == static_cast<std::uint32_t>(state);
  };
  set(CommunicatorState::Open);
  EXPECT_FALSE(record.leave());
  EXPECT_TRUE(is(CommunicatorState::Open));
  set(CommunicatorState::Closed);
  EXPECT_TRUE(record.leave());
  EXPECT_TRUE(is(CommunicatorState::Free));
  EXPECT_FALSE(record.leave());
}

TEST(Rule3, FlagsAreReachedByEverythingThatIsNotLess) {
  Flag flag{};
  EXPECT_TRUE(flag.reached(0));
  EXPECT_FALSE(flag.reached(1));
  flag.set(7);
  EXPECT_TRUE(flag.reached(6));
  EXPECT_TRUE(flag.reached(7));
  EXPECT_FALSE(flag.reached(8));
}

}  // namespace
}  // namespace hoccl
