#pragma once

// What the fakes and the tests on them share: waits that end, and chance that can be run again.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <thread>

#include "common/base/time.h"

namespace hoccl::test {

/// Long enough for a loaded machine; a wait that succeeds ends at once.
inline constexpr std::uint64_t kPatienceMs = 20'000;

/// Waits until `condition` holds; false when it does not come in time.
inline bool waitUntil(const std::function<bool()>& condition, std::uint64_t ms = kPatienceMs) {
  const Deadline deadline = Deadline::afterMs(ms);
  for (int round = 0; !condition(); ++round) {
    if (deadline.passed()) return condition();
    if (round > 100) ::usleep(100);
    std::this_thread::yield();
  }
  return true;
}

/// The seed of this run: --gtest_random_seed if given, else a new one. Printed, so that a failure
/// can be run again.
inline std::uint32_t testSeed() {
  std::uint32_t seed = static_cast<std::uint32_t>(GTEST_FLAG_GET(random_seed));
  if (seed == 0) seed = std::random_device()() % 99999 + 1;
  std::printf("[ seed     ] --gtest_random_seed=%u\n", seed);
  return seed;
}

using Rng = std::mt19937;
inline std::uint64_t pick(Rng& rng, std::uint64_t low, std::uint64_t high) {
  return std::uniform_int_distribution<std::uint64_t>(low, high)(rng);
}
inline bool chance(Rng& rng, double probability) {
  return std::bernoulli_distribution(probability)(rng);
}

}  // namespace hoccl::test
