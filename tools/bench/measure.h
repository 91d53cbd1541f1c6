#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "tools/bench/kernel_trace.h"
#include "tools/bench/options.h"
#include "tools/bench/rank_device.h"
#include "tools/bench/rank_set.h"
#include "tools/bench/report.h"

namespace hoccl::bench {

/// What is measured where; the same for all sets of a run.
struct Setting {
  Options options;
  DeviceInfo device;
  std::string ncclLibrary;
  bool directPairs = false;  ///< the ranks' GPUs reach each other, and HOCCL copies between them
  /// Roughly how long one size of one set may take where the iterations are not fixed.
  double budgetNs = 2e9;
  /// Called with what is being done now.
  std::function<void(const std::string&)> progress;
};

/// The result of one rank set.
struct SetResult {
  std::vector<Row> rows;
  std::vector<TimeWindow> windows;  ///< of each row's timed batches
  std::vector<pid_t> pids;
  PathCounts paths;
  std::string reasons;  ///< why operations stayed with NCCL, as the steering library says
  int ncclVersion = 0;
  std::string ncclFile;
  bool ownFunction = false;  ///< NCCL's own function for the operation was called
  /// Share of the timed model time by which the CPU outlasted the emulated copies, worst size.
  double worstLateShare = 0;
};

/// Opens the ranks of an NCCL set and connects them. For `impl` hoccl a rank whose ncclSend is not
/// the steering library's is an error; for kCopyEngines buffers lie in symmetric windows.
Status openNcclSet(const Setting& setting, RankSet* set, const std::string& impl,
                   SetResult* result);
/// Measures every size, out of place and in place; `rowDone` is called with each finished row.
Status measureNcclSet(const Setting& setting, RankSet* set, const std::string& impl,
                      const std::function<void(const Row&)>& rowDone, SetResult* result);
/// One small transfer, without figures: for looking at what NCCL says it uses.
Status tryNcclSet(const Setting& setting, RankSet* set);

/// Opens and measures the operation's bare copies: for each size and place a row of path "steady"
/// and one of path "single".
Status measureBareSet(const Setting& setting, RankSet* set,
                      const std::function<void(const Row&)>& rowDone, SetResult* result);

}  // namespace hoccl::bench
