#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "test/e2e/patience.h"
#include "test/e2e/rank/check.h"
#include "test/e2e/rank/device.h"
#include "test/e2e/rank/nccl_api.h"

namespace e2e {

/// This process as one rank of a scenario: its arguments, and how it meets the other ranks and the
/// test outside NCCL, by files of one folder.
class Rank {
 public:
  int rank = 0;
  int ranks = 0;
  std::string folder;
  std::map<std::string, std::string> arguments;

  [[nodiscard]] int next() const { return (rank + 1) % ranks; }
  [[nodiscard]] int previous() const { return (rank + ranks - 1) % ranks; }
  [[nodiscard]] std::string argument(const std::string& name, const std::string& otherwise) const;

  /// Everybody sees the event from now on.
  void post(const std::string& event, const std::string& text = "") const;
  /// This rank's own: `event.rank`.
  void postMine(const std::string& event) const { post(event + "." + std::to_string(rank)); }
  /// Waits for an event, with a bound, and returns its text.
  std::string await(const std::string& event, int timeoutMs = patienceMs()) const;
  void awaitOf(const std::string& event, int whose) const {
    await(event + "." + std::to_string(whose));
  }
  /// All ranks have come here. Each name serves once.
  void barrier(const std::string& name) const;

  /// A communicator of all ranks by ncclCommInitRank; `name` tells several apart.
  [[nodiscard]] ncclComm_t communicator(const std::string& name = "world") const;
  /// The unique id for it: rank 0 makes it, the others learn it.
  [[nodiscard]] ncclUniqueId uniqueId(const std::string& name) const;
};

/// Tells the test a fact: "key value", one a line.
void say(const std::string& key, const std::string& value);
/// HOCCL's counters, told as the fact `key`.
void sayStats(const std::string& key = "stats");

/// Polls until the communicator is initialised or in error; ncclInProgress if it never ends.
ncclResult_t awaitReady(ncclComm_t comm, int timeoutMs = patienceMs());
/// Polls until the communicator reports an error; ncclSuccess if it does not within the bound.
ncclResult_t awaitError(ncclComm_t comm, int timeoutMs);

/// Tells all transfers of a test apart: the seed of what `source` sends as its n-th of `tag`.
constexpr std::uint64_t seedOf(int source, std::uint64_t n, std::uint64_t tag = 0) {
  return (tag << 40) + (static_cast<std::uint64_t>(source) << 32) + n;
}

struct Scenario {
  const char* name;
  void (*run)(const Rank& rank);
};
extern const std::vector<Scenario> kDirectScenarios, kTransferScenarios, kGroupScenarios,
    kCommunicatorScenarios, kCallScenarios, kThreadScenarios, kFaultScenarios, kLaunchScenarios,
    kFreesScenarios, kBlockedCallScenarios, kCollectiveScenarios, kPeerScenarios, kFamilyScenarios,
    kAbortStormScenarios, kEarlyEndScenarios, kHostMemoryScenarios, kGrowScenarios, kSpanScenarios,
    kSoakScenarios, kThresholdScenarios, kGroupEndScenarios, kThresholdStormScenarios,
    kPeerStormScenarios, kOwnBlockScenarios;

}  // namespace e2e
