// The rule by which a send and its receive on opposite sides of HOCCL_MIN_BYTES are found.

#include "common/runtime/pair_counts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

namespace hoccl {
namespace {

/// The calls of one side: which of them are steered.
using Calls = std::vector<bool>;

struct Counted {
  std::uint64_t steered = 0, passed = 0;
};
Counted countedUpTo(const Calls& calls, std::size_t end) {
  Counted counted;
  for (std::size_t i = 0; i < end; ++i) ++(calls[i] ? counted.steered : counted.passed);
  return counted;
}

Calls randomCalls(std::mt19937* random, std::size_t count) {
  Calls calls(count);
  for (std::size_t i = 0; i < count; ++i) calls[i] = (*random)() % 2 == 0;
  return calls;
}

TEST(PairCounts, SidesThatAgreeNeverDisagreeWhereverTheyAre) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const Calls calls = randomCalls(&random, 24);
    for (std::size_t waits = 0; waits < calls.size(); ++waits) {
      if (!calls[waits]) continue;
      const Counted peer = countedUpTo(calls, waits);
      for (std::size_t here = 0; here <= calls.size(); ++here) {
        for (std::size_t later = here; later <= calls.size(); ++later) {
          // `passed` is read first, and the application goes on meanwhile.
          const std::uint64_t passed = countedUpTo(calls, here).passed;
          const std::uint64_t steered = countedUpTo(calls, later).steered;
          ASSERT_FALSE(disagree(steered, passed, peer.steered, peer.passed))
              << "seed 1, round " << round << ", " << waits << ", " << here << ", " << later;
        }
      }
    }
  }
}

TEST(PairCounts, TheFirstDifferenceIsFoundWhenTheSmallSideHasCalledIt) {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    Calls here = randomCalls(&random, 24);
    const std::size_t at = random() % here.size();
    here[at] = false;
    Calls there = here;
    there[at] = true;
    const Counted peer = countedUpTo(there, at);
    const Counted before = countedUpTo(here, at), after = countedUpTo(here, at + 1);
    EXPECT_FALSE(disagree(before.steered, before.passed, peer.steered, peer.passed));
    EXPECT_TRUE(disagree(after.steered, after.passed, peer.steered, peer.passed));
  }
}

TEST(PairCounts, EitherTheMoverOrTheApplicationSees) {
  for (int round = 0; round < 3000; ++round) {
    PairCounts counts{};
    bool moverSees = false, applicationSees = false;
    std::thread mover([&] { moverSees = noteAwaited(counts.sends, 0, 0); });
    counts.sends.passed.fetch_add(1);
    applicationSees = passesAwaited(counts.sends, 1);
    mover.join();
    ASSERT_TRUE(moverSees || applicationSees) << "round " << round;
  }
}

TEST(PairCounts, NeitherSeesWhatIsNotThere) {
  for (int round = 0; round < 3000; ++round) {
    PairCounts counts{};
    bool moverSees = false, applicationSees = false;
    std::thread mover([&] {
      // The peer waits in its steered operations 0, 1 and 2, with 0, 1 and 2 passed on before.
      for (std::uint64_t n = 0; n < 3; ++n) moverSees |= noteAwaited(counts.sends, n, n);
    });
    for (std::uint64_t n = 1; n <= 3; ++n) {
      counts.sends.steered.store(n, std::memory_order_release);
      counts.sends.passed.fetch_add(1);
      applicationSees |= passesAwaited(counts.sends, n);
    }
    mover.join();
    ASSERT_FALSE(moverSees || applicationSees) << "round " << round;
  }
}

TEST(PairCounts, NothingIsSaidOnceACaptureHasRecordedOne) {
  PairCounts counts{};
  counts.sends.passed.store(2);
  EXPECT_TRUE(noteAwaited(counts.sends, 0, 1));
  EXPECT_TRUE(passesAwaited(counts.sends, 2));
  counts.sends.captured.store(1);
  EXPECT_FALSE(noteAwaited(counts.sends, 0, 1));
  EXPECT_FALSE(passesAwaited(counts.sends, 2));
  // Of the other direction nothing was captured.
  counts.receives.passed.store(2);
  EXPECT_TRUE(noteAwaited(counts.receives, 0, 1));
}

}  // namespace
}  // namespace hoccl
