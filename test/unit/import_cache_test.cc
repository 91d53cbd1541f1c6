#include "common/runtime/import_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace hoccl {
namespace {

constexpr std::uint64_t kAllocation = 1 << 20;

/// Allocation number `id`, where no other of these lies.
BufferRef allocation(std::uint64_t id) {
  BufferRef ref{};
  ref.allocationId = id;
  ref.allocationBase = 0x7f0000000000 + id * kAllocation;
  ref.allocationBytes = kAllocation;
  return ref;
}

Import* mapped(ImportCache& cache, std::uint64_t id) {
  bool fresh = false;
  Import* import = cache.acquire(allocation(id), &fresh);
  EXPECT_TRUE(fresh) << id;
  import->state = Import::State::Ready;
  import->address = 0x1000 + id;
  return import;
}

TEST(ImportCache, StagingMemoryStaysAndDoesNotCount) {
  ImportCache cache(1);
  bool fresh = false;
  for (std::uint64_t id = 100; id < 110; ++id) {
    BufferRef ref = allocation(id);
    ref.kind = BufferKind::Staging;
    Import* staging = cache.acquire(ref, &fresh);
    staging->state = Import::State::Ready;
    cache.release(staging);
  }
  EXPECT_TRUE(cache.empty());
  Import* only = mapped(cache, 1);
  cache.release(only);
  EXPECT_FALSE(cache.crowded());
  EXPECT_EQ(cache.markIdle(cache.now()), 1u) << "the one that is no staging memory";
  CUdeviceptr address = 0;
  EXPECT_TRUE(cache.evict(&address));
  EXPECT_EQ(address, 0x1001u);
  EXPECT_FALSE(cache.evict(&address));
  EXPECT_TRUE(cache.empty());
  for (std::uint64_t id = 100; id < 110; ++id) EXPECT_NE(cache.find(id), nullptr);
}

/// A span of `pieces` allocations from number `first` on, in a slot; its generation is 1.
BufferRef span(std::uint32_t slot, std::uint64_t first, std::uint64_t pieces) {
  BufferRef ref = allocation(first);
  ref.kind = BufferKind::Span;
  ref.allocationId = spanId(slot, 1);
  ref.allocationBytes = pieces * kAllocation;
  return ref;
}

TEST(Rule8, ASpanGoesOnlyWhenNoOperationIsOnItsWay) {
  std::vector<SpanSlot> slots(kSpanSlots);
  ImportCache cache(16, slots.data());
  const std::uint64_t generation = slots[5].open();  // pinned by the operation that wanted it
  cache.add(span(5, 1, 2), 0x5000);
  Import* import = cache.find(spanId(5, 1));
  ASSERT_NE(import, nullptr);
  EXPECT_EQ(import->state, Import::State::Ready);
  EXPECT_EQ(cache.markIdle(cache.now()), 0u) << "pinned";
  cache.markStale(import);
  EXPECT_TRUE(cache.pinned());
  CUdeviceptr gone = 0;
  BufferRef which{};
  EXPECT_FALSE(cache.evict(&gone, &which));
  EXPECT_FALSE(slots[5].closed(generation));
  ++import->pins;  // the operation has come
  EXPECT_FALSE(cache.pinned());
  ASSERT_TRUE(cache.evict(&gone, &which));
  EXPECT_EQ(gone, 0x5000u);
  EXPECT_EQ(which.allocationId, spanId(5, 1));
  EXPECT_TRUE(slots[5].closed(generation)) << "no operation may come any more";
  EXPECT_FALSE(slots[5].over(generation)) << "that is said when it is unmapped";
  EXPECT_FALSE(cache.crowded());
}

TEST(Rule8, SpansShareSegmentsAndGoByTheirRange) {
  std::vector<SpanSlot> slots(kSpanSlots);
  ImportCache cache(16, slots.data());
  for (std::uint32_t slot : {0u, 1u, 2u}) {
    slots[slot].open();
    slots[slot].unpin();
    cache.add(span(slot, 10 + slot, 2), 0x1000 + slot);  // 10-11, 11-12, 12-13
  }
  EXPECT_FALSE(cache.crowded()) << "neighbours that overlap are no sign of a free";
  const std::uint64_t base = allocation(13).allocationBase;
  cache.markSpans(base, kAllocation);
  const Import* marked = cache.markedSpan(base, kAllocation);
  ASSERT_NE(marked, nullptr);
  EXPECT_EQ(marked->buffer.allocationId, spanId(2, 1));
  CUdeviceptr gone = 0;
  ASSERT_TRUE(cache.evict(&gone));
  EXPECT_EQ(gone, 0x1002u);
  EXPECT_EQ(cache.markedSpan(base, kAllocation), nullptr);
  // An allocation of another kind in their place means that they have been freed.
  cache.release(mapped(cache, 11));
  EXPECT_TRUE(cache.evict(&gone));
  EXPECT_TRUE(cache.evict(&gone));
  EXPECT_FALSE(cache.evict(&gone));
  EXPECT_EQ(cache.find(spanId(0, 1)), nullptr);
  EXPECT_EQ(cache.find(spanId(1, 1)), nullptr);
}

TEST(Rule8, SpansCountAmongTheImportsAndLeaveSlotsFree) {
  std::vector<SpanSlot> slots(kSpanSlots);
  for (const std::size_t capacity : {std::size_t{4}, std::size_t{1} << 20}) {
    ImportCache cache(capacity, slots.data());
    for (std::uint32_t slot = 0; slot < kSpanSlots; ++slot) {
      slots[slot].word = 0;
      slots[slot].open();
      slots[slot].unpin();
      cache.add(span(slot, slot, 1), 0x1000 + slot);
    }
    CUdeviceptr gone = 0;
    std::size_t left = kSpanSlots;
    while (cache.crowded() && cache.evict(&gone)) --left;
    EXPECT_EQ(left, std::min<std::size_t>(capacity, kSpanSlots / 2));
  }
}

TEST(ImportCache, MapsAnAllocationOnce) {
  ImportCache cache(4);
  bool fresh = false;
  Import* first = cache.acquire(allocation(1), &fresh);
  EXPECT_TRUE(fresh);
  EXPECT_EQ(first->state, Import::State::Pending);
  EXPECT_EQ(cache.acquire(allocation(1), &fresh), first);
  EXPECT_FALSE(fresh);
  cache.release(first);
  cache.release(first);
  EXPECT_EQ(cache.acquire(allocation(1), &fresh), first);
  EXPECT_FALSE(fresh) << "idle imports stay";
  EXPECT_EQ(cache.find(1), first);
  EXPECT_EQ(cache.find(2), nullptr);
}

TEST(Rule8, TheLeastRecentlyUsedGoesFirstAndTheNumberIsBounded) {
  constexpr std::uint64_t kCapacity = 8;
  ImportCache cache(kCapacity);
  std::set<CUdeviceptr> alive;
  for (std::uint64_t id = 0; id < 100; ++id) {
    cache.release(mapped(cache, id));
    alive.insert(0x1000 + id);
    if (id >= 1 && id < 50) {  // number 1 is used again and again, so it stays
      bool fresh = false;
      cache.release(cache.acquire(allocation(1), &fresh));
      ASSERT_FALSE(fresh);
    }
    CUdeviceptr gone = 0;
    while (cache.crowded() && cache.evict(&gone)) {
      EXPECT_EQ(alive.erase(gone), 1u) << gone;
      if (id < 50) {
        EXPECT_NE(gone, 0x1001u);
      }
    }
    EXPECT_LE(alive.size(), kCapacity);
    EXPECT_FALSE(cache.crowded());
  }
  for (std::uint64_t id = 92; id < 100; ++id) EXPECT_NE(cache.find(id), nullptr);
}

TEST(ImportCache, NothingInUseOrPendingIsEvicted) {
  ImportCache cache(1);
  Import* used = mapped(cache, 1);
  bool fresh = false;
  Import* pending = cache.acquire(allocation(2), &fresh);
  cache.release(pending);  // nobody waits for it any more, but the mapping is under way
  CUdeviceptr gone = 0;
  ASSERT_TRUE(cache.crowded());
  EXPECT_FALSE(cache.evict(&gone));
  pending->state = Import::State::Ready;
  pending->address = 0x2000;
  ASSERT_TRUE(cache.evict(&gone));
  EXPECT_EQ(gone, 0x2000u);
  EXPECT_EQ(cache.find(1), used);
  EXPECT_FALSE(cache.crowded());
  EXPECT_FALSE(cache.evict(&gone)) << "one is allowed";
}

TEST(ImportCache, AFailedImportCanBeEvicted) {
  ImportCache cache(1);
  Import* bad = mapped(cache, 1);
  bad->state = Import::State::Failed;
  bad->address = 0;
  cache.release(bad);
  cache.release(mapped(cache, 2));
  CUdeviceptr gone = 99;
  ASSERT_TRUE(cache.evict(&gone));
  EXPECT_EQ(gone, 0u);
  EXPECT_EQ(cache.find(1), nullptr);
}

TEST(Rule8, AnAllocationInAnothersPlaceMakesThatOneStale) {
  struct Case {
    std::int64_t shift;
    std::uint64_t bytes;
    bool overlaps;
  };
  const auto whole = static_cast<std::int64_t>(kAllocation);
  for (const Case& c : {Case{0, kAllocation, true}, Case{whole - 1, kAllocation, true},
                        Case{1 - whole, kAllocation, true}, Case{whole, kAllocation, false},
                        Case{-whole, kAllocation, false}, Case{4096, 4096, true},
                        Case{-4096, 3 * kAllocation, true}}) {
    ImportCache cache(16);
    Import* old = mapped(cache, 1000);
    BufferRef fresh = allocation(1000);
    fresh.allocationId = 5;
    fresh.allocationBase += static_cast<std::uint64_t>(c.shift);
    fresh.allocationBytes = c.bytes;
    bool isFresh = false;
    Import* now = cache.acquire(fresh, &isFresh);
    EXPECT_TRUE(isFresh);
    now->state = Import::State::Ready;
    EXPECT_EQ(old->stale, c.overlaps) << c.shift;
    EXPECT_FALSE(now->stale);
    EXPECT_EQ(cache.crowded(), c.overlaps);
    CUdeviceptr gone = 0;
    EXPECT_FALSE(cache.evict(&gone)) << "an operation still holds it";
    cache.release(old);
    EXPECT_EQ(cache.evict(&gone), c.overlaps);
    if (c.overlaps) {
      EXPECT_EQ(gone, 0x1000u + 1000);
    }
    EXPECT_FALSE(cache.crowded());
    EXPECT_EQ(cache.find(5), now);
  }
}

TEST(Rule8, WhatIsIdleIsMarkedAndTakenOut) {
  ImportCache cache(8);
  cache.release(mapped(cache, 1));
  const std::uint64_t since = cache.now();
  Import* used = mapped(cache, 2);
  cache.release(mapped(cache, 3));
  bool fresh = false;
  cache.release(cache.acquire(allocation(4), &fresh));  // still being mapped
  EXPECT_EQ(cache.markIdle(since), 1u) << "only what was not used since";
  CUdeviceptr gone = 0;
  ASSERT_TRUE(cache.evict(&gone));
  EXPECT_EQ(gone, 0x1001u);
  EXPECT_FALSE(cache.evict(&gone));
  EXPECT_EQ(cache.markIdle(cache.now()), 1u) << "neither what is used nor what is being mapped";
  ASSERT_TRUE(cache.evict(&gone));
  EXPECT_EQ(gone, 0x1003u);
  cache.markStale(used);
  cache.markStale(used);
  EXPECT_FALSE(cache.evict(&gone)) << "stale, but used";
  cache.release(used);
  ASSERT_TRUE(cache.evict(&gone));
  EXPECT_EQ(gone, 0x1002u);
  EXPECT_FALSE(cache.crowded());
}

}  // namespace
}  // namespace hoccl
