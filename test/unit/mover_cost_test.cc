// What the mover's loop costs: no round while it sleeps, no allocation once it is warm, no import
// of an allocation twice. Two movers in one process, over fake copy engines.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "common/runtime/segment.h"
#include "test/unit/fake_driver.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fakes.h"
#include "test/unit/mover_harness.h"

// Counts what the loop's thread allocates; the other threads may.
namespace {
void* countedAllocation(std::size_t bytes) {
  if (auto* counter = hoccl::test::allocationCounter) counter->fetch_add(1);
  if (void* memory = std::malloc(bytes ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* countedAllocation(std::size_t bytes, std::align_val_t alignment) {
  if (auto* counter = hoccl::test::allocationCounter) counter->fetch_add(1);
  const auto align = static_cast<std::size_t>(alignment);
  if (void* memory = std::aligned_alloc(align, (bytes + align) / align * align)) return memory;
  throw std::bad_alloc();
}
}  // namespace
void* operator new(std::size_t bytes) { return countedAllocation(bytes); }
void* operator new[](std::size_t bytes) { return countedAllocation(bytes); }
void* operator new(std::size_t bytes, std::align_val_t a) { return countedAllocation(bytes, a); }
void* operator new[](std::size_t bytes, std::align_val_t a) { return countedAllocation(bytes, a); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return countedAllocation(bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return countedAllocation(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace hoccl {
namespace {

using test::DeviceBuffer;
using test::fakeImports;
using test::freshAllocation;
using test::receiveFrom;
using test::refTo;
using test::sendTo;
using test::TestMover;
using test::Two;
using test::waitUntil;
using Options = TestMover::Options;
using Ticket = TestMover::Ticket;

TEST(MoverLoop, Rule11AnIdleLoopSleepsUntilItIsRung) {
  Two two;
  DeviceBuffer from(70'001), to(70'001);
  for (std::uint64_t i = 0; i < 3; ++i) {
    from.fill(i);
    SegmentHeader& header = two.a->segment.header();
    std::uint64_t wakeups = 0;
    // Asleep: rung for by the flag, and no round goes by.
    ASSERT_TRUE(waitUntil([&] {
      if (!header.moverSleeps.load()) return false;
      wakeups = header.loopWakeups.load();
      ::usleep(100'000);
      return header.moverSleeps.load() == 1 && header.loopWakeups.load() == wakeups;
    })) << "the loop does not come to rest";
    const Ticket receive = two.b->launch({receiveFrom(0, i, to)});
    const Ticket send = two.a->launch({sendTo(1, i, from)});
    ASSERT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive));
    EXPECT_GT(header.loopWakeups.load(), wakeups);
    EXPECT_EQ(to.check(i), "");
  }
}

TEST(MoverLoop, TheLoopAllocatesNothingOnceItIsWarm) {
  Options options;
  options.launchSlots = 8;
  Two two(options);
  constexpr int kBuffers = 4;
  std::vector<std::unique_ptr<DeviceBuffer>> from, to, own;
  std::vector<BufferRef> fromRefs, toRefs, ownRefs;
  const std::uint64_t sizes[kBuffers] = {65'536, 70'001, 300'003, 1'000'001};
  for (std::uint64_t bytes : sizes) {
    from.push_back(std::make_unique<DeviceBuffer>(bytes));
    to.push_back(std::make_unique<DeviceBuffer>(bytes));
    own.push_back(std::make_unique<DeviceBuffer>(bytes));
    from.back()->fill(bytes);
    fromRefs.push_back(refTo(*from.back(), freshAllocation()));
    toRefs.push_back(refTo(*to.back(), freshAllocation()));
    ownRefs.push_back(refTo(*own.back(), freshAllocation()));
  }
  std::uint64_t sequence = 0;
  auto transfers = [&](int count) {
    for (int i = 0; i < count; ++i) {
      std::vector<TestMover::OpSpec> sends, receives;
      for (int k = 0; k < kBuffers; ++k) {
        const auto at = static_cast<std::size_t>(k);
        sends.push_back({OpKind::Send, 0, 1, sizes[k], sequence, fromRefs[at]});
        sends.push_back({OpKind::Mirror, 0, 1, sizes[k], sequence, ownRefs[at]});
        receives.push_back({OpKind::Recv, 0, 0, sizes[k], sequence, toRefs[at]});
        ++sequence;
      }
      // Groups of all, and single ones whose end the lane shows.
      const Ticket a = two.a->launch(sends), b = two.b->launch(receives);
      ASSERT_TRUE(two.a->waitFor(a) && two.b->waitFor(b));
      const Ticket c = two.a->launch({{OpKind::Send, 0, 1, sizes[0], sequence, fromRefs[0]}});
      const Ticket d = two.b->launch({{OpKind::Recv, 0, 0, sizes[0], sequence, toRefs[0]}});
      ++sequence;
      ASSERT_TRUE(two.a->waitFor(c) && two.b->waitFor(d));
    }
  };
  transfers(16);  // each launch slot has been used by either kind
  EXPECT_GT(two.a->allocations.load(), 0u) << "the counter does not count";
  const std::uint64_t beforeA = two.a->allocations, beforeB = two.b->allocations;
  transfers(20);
  EXPECT_EQ(two.a->allocations - beforeA, 0u) << "in " << 20 * (kBuffers + 1) << " sends";
  EXPECT_EQ(two.b->allocations - beforeB, 0u) << "in " << 20 * (kBuffers + 1) << " receives";
  for (std::size_t k = 0; k < kBuffers; ++k) {
    EXPECT_EQ(to[k]->check(sizes[k]), "");
    EXPECT_EQ(own[k]->check(sizes[k]), "");
  }
}

TEST(MoverLoop, Rule8ImportsAreReusedAndBounded) {
  Options options;
  options.importCache = 4;
  Two two(options);
  const std::uint32_t opened = fakeImports().opened, closed = fakeImports().closed;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  std::vector<BufferRef> refs;
  for (int i = 0; i < 8; ++i) {
    buffers.push_back(std::make_unique<DeviceBuffer>(70'001));
    buffers.back()->fill(static_cast<std::uint64_t>(i));
    refs.push_back(refTo(*buffers.back(), freshAllocation()));
  }
  DeviceBuffer to(70'001);
  const BufferRef target = refTo(to, freshAllocation());
  std::uint64_t sequence = 0;
  auto transfer = [&](std::size_t i) {
    const Ticket receive = two.b->launch({{OpKind::Recv, 0, 0, to.bytes(), sequence, target}});
    const Ticket send = two.a->launch({{OpKind::Send, 0, 1, to.bytes(), sequence, refs[i]}});
    ++sequence;
    ASSERT_TRUE(two.a->waitFor(send) && two.b->waitFor(receive));
    EXPECT_EQ(to.check(i), "");
  };
  for (int round = 0; round < 5; ++round) {
    for (std::size_t i = 0; i < 3; ++i) transfer(i);
  }
  EXPECT_EQ(fakeImports().opened - opened, 4u) << "each allocation is mapped once";
  for (std::size_t i = 3; i < 8; ++i) transfer(i);
  EXPECT_EQ(fakeImports().opened - opened, 9u);
  EXPECT_TRUE(waitUntil([&] { return fakeImports().closed - closed == 4; }))
      << fakeImports().closed - closed << " were unmapped";
  transfer(0);
  EXPECT_EQ(fakeImports().opened - opened, 10u) << "what was evicted is mapped anew";
}

}  // namespace
}  // namespace hoccl
