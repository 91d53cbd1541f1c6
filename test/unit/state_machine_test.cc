#include "common/runtime/state_machine.h"

#include <gtest/gtest.h>

#include <string>

namespace hoccl {
namespace {

enum class Light { Off, Red, Green };

struct Lamp {
  Light state = Light::Off;
  bool power = false, go = false;
  std::string log;
};

using Edge = Transition<Light, Lamp>;

constexpr Edge kEdges[] = {
    {Light::Off, Light::Red, [](const Lamp& l) { return l.power; },
     [](Lamp& l) { l.log += "on,"; }},
    {Light::Red, Light::Green, [](const Lamp& l) { return l.go; }, [](Lamp& l) { l.log += "go,"; }},
    // Never taken from Red while the edge above applies: the first one wins.
    {Light::Red, Light::Off, [](const Lamp& l) { return l.go || !l.power; },
     [](Lamp& l) { l.log += "off,"; }},
    {Light::Green, Light::Red, [](const Lamp& l) { return !l.go; },
     [](Lamp& l) { l.log += "stop,"; }},
};

TEST(StateMachine, StaysWhereNoEdgeApplies) {
  Lamp lamp;
  EXPECT_FALSE(advance(kEdges, lamp));
  EXPECT_EQ(lamp.state, Light::Off);
  EXPECT_EQ(lamp.log, "");
}

TEST(StateMachine, GoesAsFarAsItCanAndTheFirstEdgeWins) {
  Lamp lamp;
  lamp.power = lamp.go = true;
  EXPECT_TRUE(advance(kEdges, lamp));
  EXPECT_EQ(lamp.state, Light::Green);
  EXPECT_EQ(lamp.log, "on,go,");
  EXPECT_FALSE(advance(kEdges, lamp));
}

TEST(StateMachine, GoesBackToEarlierEdgesOfTheTable) {
  Lamp lamp;
  lamp.state = Light::Green;
  EXPECT_TRUE(advance(kEdges, lamp));
  EXPECT_EQ(lamp.state, Light::Off) << "Green to Red is the last edge, Red to Off before it";
  EXPECT_EQ(lamp.log, "stop,off,");
}

struct Counter {
  int state = 0;
  int seenByAction = -1;
};

TEST(StateMachine, TheActionStillSeesTheOldState) {
  static constexpr Transition<int, Counter> kStep[] = {
      {0, 1, [](const Counter&) { return true; }, [](Counter& c) { c.seenByAction = c.state; }}};
  Counter counter;
  EXPECT_TRUE(advance(kStep, counter));
  EXPECT_EQ(counter.seenByAction, 0);
  EXPECT_EQ(counter.state, 1);
}

}  // namespace
}  // namespace hoccl
