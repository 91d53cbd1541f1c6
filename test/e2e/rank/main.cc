// e2e_rank SCENARIO RANK RANKS FOLDER [NAME=VALUE…]: one rank of an end-to-end test. Exit status 0
// when everything it checks holds; else one line on standard error.

#include <cstdlib>
#include <cstring>

#include "test/e2e/rank/rank.h"

int main(int argc, char** argv) {
  using namespace e2e;
  REQUIRE(argc >= 5, "usage: e2e_rank SCENARIO RANK RANKS FOLDER [NAME=VALUE…]");
  Rank rank;
  rank.rank = std::atoi(argv[2]);
  rank.ranks = std::atoi(argv[3]);
  rank.folder = argv[4];
  for (int i = 5; i < argc; ++i) {
    const std::string text = argv[i];
    const std::size_t equals = text.find('=');
    REQUIRE(equals != std::string::npos, "'{}' is not NAME=VALUE", text);
    rank.arguments[text.substr(0, equals)] = text.substr(equals + 1);
  }
  for (const auto* list :
       {&kTransferScenarios, &kGroupScenarios, &kCommunicatorScenarios, &kCallScenarios,
        &kThreadScenarios, &kFaultScenarios, &kLaunchScenarios, &kFreesScenarios, &kBlockedCallScenarios,
        &kCollectiveScenarios, &kPeerScenarios, &kFamilyScenarios, &kAbortStormScenarios,
        &kEarlyEndScenarios, &kHostMemoryScenarios, &kGrowScenarios, &kSpanScenarios, &kSoakScenarios,
        &kDirectScenarios, &kThresholdScenarios, &kGroupEndScenarios,
        &kThresholdStormScenarios, &kPeerStormScenarios, &kOwnBlockScenarios}) {
    for (const Scenario& scenario : *list) {
      if (std::strcmp(scenario.name, argv[1]) != 0) continue;
      scenario.run(rank);
      return 0;
    }
  }
  REQUIRE(false, "no scenario '{}'", argv[1]);
}
