#include "common/runtime/span_slot.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace hoccl {
namespace {

TEST(SpanSlot, IsFreeUntilOpenedAndAgainOnceItsSpanHasEnded) {
  SpanSlot slot{};
  EXPECT_TRUE(slot.free());
  const std::uint64_t first = slot.open();
  EXPECT_FALSE(slot.free());
  slot.close(first);
  EXPECT_FALSE(slot.free()) << "the mover still has it mapped";
  EXPECT_FALSE(slot.over(first));
  slot.end(first);
  EXPECT_TRUE(slot.free());
  EXPECT_TRUE(slot.over(first));
  const std::uint64_t second = slot.open();
  EXPECT_NE(second, first);
  EXPECT_TRUE(slot.over(first));
  EXPECT_FALSE(slot.over(second));
}

TEST(SpanSlot, IsPinnedUntilTheMoverHasNotedEveryPin) {
  SpanSlot slot{};
  const std::uint64_t span = slot.open();  // and pinned once
  EXPECT_TRUE(slot.pin(span));
  slot.pinAgain();
  for (std::uint64_t noted = 0; noted < 3; ++noted) {
    EXPECT_TRUE(slot.pinned(noted));
    EXPECT_FALSE(slot.tryClose(noted));
  }
  EXPECT_FALSE(slot.pinned(3));
  slot.unpin();  // one that no operation has come of
  EXPECT_TRUE(slot.tryClose(2));
  EXPECT_TRUE(slot.closed(span));
  EXPECT_FALSE(slot.pin(span)) << "the mover unmaps it";
  EXPECT_TRUE(slot.tryClose(2)) << "closed before, by either side";
}

TEST(SpanSlot, AClosedOneTakesNoPinAndTheOldOnesStillCount) {
  SpanSlot slot{};
  const std::uint64_t span = slot.open();
  slot.close(span);
  EXPECT_FALSE(slot.pin(span));
  EXPECT_FALSE(slot.tryClose(0)) << "an operation is on its way";
  EXPECT_TRUE(slot.tryClose(1));
}

TEST(SpanSlot, WhoRemembersAnEarlierSpanDoesNotGetTheNextOne) {
  SpanSlot slot{};
  const std::uint64_t old = slot.open();
  slot.close(old);
  slot.end(old);
  const std::uint64_t now = slot.open();
  EXPECT_FALSE(slot.pin(old));
  EXPECT_TRUE(slot.closed(old));
  slot.close(old);
  EXPECT_TRUE(slot.pin(now)) << "closing what is over closed the next one";
}

TEST(SpanSlot, TheNumberOfPinsMayWrap) {
  SpanSlot slot{};
  const std::uint64_t span = slot.open();
  slot.word.store(slot.word.load() | SpanSlot::kPins);
  EXPECT_FALSE(slot.pinned(SpanSlot::kPins));
  EXPECT_TRUE(slot.pin(span));
  EXPECT_EQ(slot.generation(), span);
  EXPECT_TRUE(slot.pinned(SpanSlot::kPins));
  EXPECT_FALSE(slot.pinned(SpanSlot::kPins + 1));
  EXPECT_FALSE(slot.closed(span));
  slot.unpin();
  EXPECT_FALSE(slot.pinned(SpanSlot::kPins));
}

TEST(SpanSlot, IdentitiesNameSlotAndGenerationAndCollideWithNoOthers) {
  for (std::uint32_t slot : {0u, 1u, kSpanSlots - 1}) {
    for (std::uint64_t generation : {1ull, 77ull, (1ull << 39) - 1}) {
      const std::uint64_t id = spanId(slot, generation);
      EXPECT_TRUE(isSpan(id));
      EXPECT_EQ(slotOfSpan(id), slot);
      EXPECT_EQ(generationOfSpan(id), generation);
    }
  }
  EXPECT_FALSE(isSpan(1));
  EXPECT_FALSE(isSpan((1ull << 40) + 5));
  EXPECT_FALSE(isSpan((1ull << 63) + 1)) << "staging memory";
}

TEST(Rule8, NoPinComesAfterTheMoverHasClosedASpan) {
  SpanSlot slot{};
  const std::uint64_t span = slot.open();
  slot.unpin();
  std::atomic<std::uint64_t> arrived{0};
  std::atomic<bool> closed{false};
  std::vector<std::thread> launches;
  for (int t = 0; t < 4; ++t) {
    launches.emplace_back([&] {
      while (slot.pin(span)) {
        EXPECT_FALSE(closed.load());
        arrived.fetch_add(1);  // the operation comes to the mover
        std::this_thread::yield();
      }
    });
  }
  // The mover: it unmaps once it has noted every pin.
  while (arrived.load() < 1000) std::this_thread::yield();
  while (!slot.tryClose(arrived.load())) std::this_thread::yield();
  closed.store(true);
  for (std::thread& each : launches) each.join();
  EXPECT_FALSE(slot.pinned(arrived.load()));
}

}  // namespace
}  // namespace hoccl
