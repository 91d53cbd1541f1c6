#include "common/runtime/pair_window.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "common/runtime/op.h"

namespace hoccl {
namespace {

TEST(PairWindow, FindsWhatItMade) {
  PairWindow window;
  Op op;
  PairWindow::Entry* entry = window.find(0);
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->op, nullptr);
  EXPECT_FALSE(entry->peerReady);
  entry->op = &op;
  entry->peerReady = true;
  entry->peerBytes = 17;
  EXPECT_EQ(window.find(0)->op, &op);
  EXPECT_EQ(window.find(0)->peerBytes, 17u);
}

TEST(PairWindow, AnEndedNumberStaysEnded) {
  PairWindow window;
  for (std::uint64_t s = 0; s < 100; ++s) {
    ASSERT_NE(window.find(s), nullptr);
    window.finish(s);
    EXPECT_EQ(window.find(s), nullptr);
    EXPECT_EQ(window.find(0), nullptr);
  }
}

TEST(PairWindow, FinishOfAnUnknownNumberChangesNothing) {
  PairWindow window;
  window.finish(0);
  window.finish(5);
  ASSERT_NE(window.find(0), nullptr);
  ASSERT_NE(window.find(5), nullptr);
}

TEST(Rule7, ALaterOperationMayOvertake) {
  PairWindow window;
  Op ops[40];
  for (std::uint64_t s = 0; s < 40; ++s) window.find(s)->op = &ops[s];
  for (std::uint64_t s = 39; s > 0; --s) window.finish(s);
  for (std::uint64_t s = 1; s < 40; ++s) EXPECT_EQ(window.find(s), nullptr) << s;
  ASSERT_NE(window.find(0), nullptr);
  EXPECT_EQ(window.find(0)->op, &ops[0]);
  window.finish(0);
  for (std::uint64_t s = 0; s < 40; ++s) EXPECT_EQ(window.find(s), nullptr) << s;
  ASSERT_NE(window.find(40), nullptr);
  EXPECT_EQ(window.find(40)->op, nullptr);
}

TEST(Rule10, ANumberAbsurdlyFarAheadIsRefused) {
  PairWindow window;
  EXPECT_EQ(window.find(PairWindow::kMaxSpan), nullptr);
  EXPECT_EQ(window.find(~0ull), nullptr);
  EXPECT_NE(window.find(3), nullptr);
  window.find(0);
  window.finish(0);
  window.finish(1);
  window.find(1);
  window.finish(1);
  // first_ is 2 now: the span counts from there.
  EXPECT_EQ(window.find(PairWindow::kMaxSpan + 2), nullptr);
  EXPECT_NE(window.find(PairWindow::kMaxSpan + 1), nullptr);
  EXPECT_NE(window.find(3), nullptr) << "growing must keep what there is";
}

TEST(PairWindow, ForEachVisitsWhatIsNotOverWhileEntriesEnd) {
  PairWindow window;
  std::vector<Op> ops(50);
  for (std::uint64_t s = 0; s < ops.size(); ++s) {
    window.find(s)->op = &ops[s];
    ops[s].descriptor.pairSequence = s;
  }
  for (std::uint64_t s : {0u, 1u, 7u, 49u}) window.finish(s);
  std::vector<std::uint64_t> seen;
  window.forEach([&](PairWindow::Entry& entry) {
    const std::uint64_t sequence = entry.op->descriptor.pairSequence;
    seen.push_back(sequence);
    window.finish(sequence);  // moves the front
    if (sequence == 10) {
      for (std::uint64_t later : {11u, 12u, 20u}) window.finish(later);
    }
  });
  std::vector<std::uint64_t> expected;
  for (std::uint64_t s = 2; s < 49; ++s) {
    if (s != 7 && s != 11 && s != 12 && s != 20) expected.push_back(s);
  }
  EXPECT_EQ(seen, expected);
  window.forEach([&](PairWindow::Entry&) { ADD_FAILURE() << "nothing is left"; });
}

TEST(PairWindow, AgreesWithAMapOverARandomLife) {
  PairWindow window;
  std::map<std::uint64_t, Op*> model;  // not over
  std::vector<bool> over(5000, false);
  std::vector<Op> ops(5000);
  std::mt19937 rng(11);
  std::uint64_t front = 0;
  for (int step = 0; step < 100'000; ++step) {
    const std::uint64_t s = front + rng() % 300;
    if (s >= ops.size()) continue;
    if (rng() % 2) {
      PairWindow::Entry* entry = window.find(s);
      ASSERT_EQ(entry == nullptr, over[s]) << s;
      if (!entry) continue;
      auto [position, added] = model.try_emplace(s, &ops[s]);
      if (added) {
        ASSERT_EQ(entry->op, nullptr);
        entry->op = &ops[s];
      }
      ASSERT_EQ(entry->op, position->second);
    } else if (model.count(s)) {
      window.finish(s);
      model.erase(s);
      over[s] = true;
      while (front < over.size() && over[front]) ++front;
    }
  }
  EXPECT_GT(front, 1000u);
}

}  // namespace
}  // namespace hoccl
