#include "common/runtime/spsc_queue.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "common/base/time.h"

namespace hoccl {
namespace {

TEST(SpscQueue, EmptyThenFullThenEmpty) {
  SpscQueue<int> queue(3);  // not a power of two
  int item = 0;
  EXPECT_TRUE(queue.empty());
  EXPECT_FALSE(queue.tryPop(&item));
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 3; ++i) {
      int value = round * 10 + i;
      ASSERT_TRUE(queue.tryPush(value));
    }
    int over = 99;
    EXPECT_FALSE(queue.tryPush(over));
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(queue.tryPop(&item));
      EXPECT_EQ(item, round * 10 + i);
    }
    EXPECT_TRUE(queue.empty());
  }
}

TEST(SpscQueue, KeepsTheItemThatDidNotFit) {
  SpscQueue<std::unique_ptr<int>> queue(1);
  auto first = std::make_unique<int>(1), second = std::make_unique<int>(2);
  ASSERT_TRUE(queue.tryPush(first));
  EXPECT_EQ(first, nullptr);
  ASSERT_FALSE(queue.tryPush(second));
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(*second, 2);
}

TEST(SpscQueue, LetsGoOfWhatWasTaken) {
  SpscQueue<std::shared_ptr<int>> queue(4);
  auto item = std::make_shared<int>(5);
  std::weak_ptr<int> watch = item;
  ASSERT_TRUE(queue.tryPush(item));
  std::shared_ptr<int> taken;
  ASSERT_TRUE(queue.tryPop(&taken));
  taken.reset();
  EXPECT_TRUE(watch.expired());
}

TEST(SpscQueue, TwoThreadsKeepOrder) {
  constexpr int kItems = 50'000;
  SpscQueue<std::unique_ptr<int>> queue(64);
  const Deadline deadline = Deadline::afterMs(20'000);
  std::thread producer([&] {
    for (int i = 0; i < kItems; ++i) {
      auto item = std::make_unique<int>(i);
      while (!queue.tryPush(item)) {
        if (deadline.passed()) return;
        std::this_thread::yield();
      }
    }
  });
  int next = 0;
  bool ordered = true;
  while (next < kItems && ordered && !deadline.passed()) {
    std::unique_ptr<int> item;
    if (!queue.tryPop(&item)) {
      std::this_thread::yield();
      continue;
    }
    ordered = item && *item == next++;
  }
  producer.join();
  EXPECT_TRUE(ordered);
  EXPECT_EQ(next, kItems);
}

}  // namespace
}  // namespace hoccl
