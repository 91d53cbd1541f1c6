// The order in which the direct copies of one launch go out.

#include "common/runtime/turns.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace hoccl {
namespace {

constexpr std::uint64_t kNow = 1'000'000, kPatience = 500;

TEST(Turns, GoInOrderHoweverTheyBecomeReady) {
  Turns turns;
  turns.begin(3);
  EXPECT_FALSE(turns.mayGo(2, false, kNow, kPatience));
  EXPECT_FALSE(turns.mayGo(1, false, kNow, kPatience));
  EXPECT_TRUE(turns.mayGo(0, false, kNow, kPatience));
  turns.leave(0);
  EXPECT_FALSE(turns.mayGo(2, false, kNow, kPatience));
  EXPECT_TRUE(turns.mayGo(1, true, kNow, kPatience)) << "whose turn it is goes behind others";
  turns.leave(1);
  EXPECT_TRUE(turns.mayGo(2, true, kNow, kPatience));
}

TEST(Turns, OneThatIsLateIsPassedOver) {
  Turns turns;
  turns.begin(4);
  EXPECT_FALSE(turns.mayGo(1, true, kNow, kPatience));
  // Busy lanes lose nothing by waiting, so that time does not count.
  EXPECT_FALSE(turns.mayGo(1, true, kNow + 9 * kPatience, kPatience));
  EXPECT_FALSE(turns.mayGo(1, false, kNow + 10 * kPatience, kPatience));
  EXPECT_FALSE(turns.mayGo(1, false, kNow + 11 * kPatience - 1, kPatience));
  EXPECT_TRUE(turns.mayGo(1, false, kNow + 11 * kPatience, kPatience));
  turns.leave(1);
  // Each further one waits again, since the late one may come meanwhile.
  EXPECT_FALSE(turns.mayGo(2, false, kNow + 22 * kPatience, kPatience));
  EXPECT_TRUE(turns.mayGo(2, false, kNow + 23 * kPatience, kPatience));
  EXPECT_TRUE(turns.mayGo(0, true, kNow + 23 * kPatience, kPatience)) << "it has come";
  turns.leave(0);
  EXPECT_TRUE(turns.mayGo(2, true, kNow + 23 * kPatience, kPatience));
}

TEST(Turns, OneThatWillNotGoHoldsUpNobody) {
  Turns turns;
  turns.begin(3);
  turns.leave(0);  // goes another way, or has failed
  EXPECT_TRUE(turns.mayGo(1, true, kNow, kPatience));
  turns.leave(0);
  turns.leave(2);
  turns.leave(1);
  turns.leave(7);  // no such turn
  turns.begin(2);
  EXPECT_FALSE(turns.mayGo(1, true, kNow, kPatience)) << "the next launch begins anew";
}

TEST(Turns, WhatHasNoneGoesAtOnce) {
  Turns turns;
  turns.begin(2);
  EXPECT_TRUE(turns.mayGo(Turns::kNone, true, kNow, kPatience));
  turns.leave(Turns::kNone);
  EXPECT_FALSE(turns.mayGo(1, true, kNow, kPatience));
}

/// Others' copies may keep the lanes busy for as long as a job runs.
TEST(Turns, LanesThatAreAlwaysBusyDoNotHoldOneUpForEver) {
  Turns turns;
  turns.begin(3);
  EXPECT_FALSE(turns.mayGo(2, true, kNow, kPatience));
  EXPECT_FALSE(turns.mayGo(2, true, kNow + 20 * kPatience, kPatience));
  EXPECT_TRUE(turns.mayGo(2, true, kNow + Turns::kBusyPatience * kPatience, kPatience));
  turns.leave(2);
  EXPECT_FALSE(turns.mayGo(1, true, kNow + 100 * kPatience, kPatience)) << "waits in its turn";
}

constexpr std::uint64_t kMiB = 1 << 20, kGiB = 1 << 30, kMs = 1'000'000;

TEST(CopyPace, FollowsTheFastestOnesAtOnceAndSlowerOnesByAndBy) {
  CopyPace pace;
  const std::uint64_t before = pace.of(kGiB);
  pace.took(kGiB, 2 * before);
  EXPECT_GT(pace.of(kGiB), before);
  EXPECT_LT(pace.of(kGiB), before + before / 8);
  pace.took(kGiB, before / 2);
  EXPECT_NEAR(static_cast<double>(pace.of(kGiB)), static_cast<double>(before / 2), 1e3);
}

/// Whoever is held up waits for no other copy then, so nothing would put the pace right.
TEST(CopyPace, AMachineThatStandsStillForAMinuteIsNotTakenForASlowOne) {
  CopyPace pace;
  pace.took(kMiB, 60'000 * kMs);
  EXPECT_LE(pace.of(kGiB), 20 * kMs);
  EXPECT_LE(pace.of(64 * kGiB), 20 * kMs);
  EXPECT_LE(pace.of(kMiB), 1 * kMs + kMs / 10);
}

}  // namespace
}  // namespace hoccl
