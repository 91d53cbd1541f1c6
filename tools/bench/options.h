#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "tools/bench/operations.h"

namespace hoccl::bench {

/// Who sends to whom in one iteration of sendrecv.
enum class Pattern {
  Oneway,  ///< rank 0 sends, rank 1 receives
  Ring,    ///< every rank sends to the next and receives from the one before, in one group
  Bidir,   ///< ranks 2k and 2k+1 exchange, in one group
};
const char* patternName(Pattern pattern);

struct DataType {
  const char* name;
  unsigned bytes;
  int nccl;  ///< ncclDataType_t
};
/// By nccl-tests' names and the usual aliases (bf16, fp32, …). Error: names what is known.
Status dataTypeByName(const std::string& name, DataType* out);

/// What the command line said, not yet completed or checked; empty where it said nothing.
struct CommandLine {
  Operation operation = Operation::SendRecv;
  std::string minBytes, maxBytes, stepFactor, stepBytes;
  std::optional<long long> iters, batches, warmup, check, ranks, offset, timeoutSeconds, root, skew;
  std::string dataType = "uint8", pattern, impl = "hoccl", jsonFile;
  std::vector<std::string> compare;
  std::vector<std::string> remotes;  ///< files of `hoccl bench serve`
  bool sameNode = false, grouped = false;
};

/// The impl that is NCCL's collectives by copy engines.
inline constexpr const char* kCopyEngines = "nccl-ce";

/// A complete, consistent run.
struct Options {
  Operation operation = Operation::SendRecv;
  /// Bytes, rounded down to whole elements (of every block, where the operation has blocks),
  /// ascending.
  std::vector<std::uint64_t> sizes;
  std::optional<int> iters;  ///< per batch; chosen by time where empty
  std::optional<int> batches;
  int warmup = 5;
  int check = 1;  ///< checked transfers per size; 0 switches checking off
  int ranks = 2;
  Pattern pattern = Pattern::Oneway;  ///< sendrecv's
  int root = 0;
  int skew = 2;          ///< alltoallv's: largest block / smallest block
  bool grouped = false;  ///< grouped send/recv even where NCCL has a function
  DataType dataType{"uint8", 1, 1};
  std::uint64_t offset = 0;
  std::uint64_t timeoutMs = 60000;
  std::string impl = "hoccl", jsonFile;
  bool compareNccl = false, compareCopyEngines = false, compareBare = false, sameNode = false;
  std::vector<std::string> remotes;  ///< the last ranks run there, one for each

  [[nodiscard]] int ranksHere() const { return ranks - static_cast<int>(remotes.size()); }
};

/// Completes and checks the command line. The default sweep depends on `emulated`. Error: names the
/// option, its value and what is allowed.
Status completeOptions(const CommandLine& line, bool emulated, Options* out);

/// The sizes from `first` to at most `last`, multiplied by `factor` (>= 2) or, where `factor` is 0,
/// stepped by `step` (>= 1). Error: more than 1000 sizes.
Status sweepSizes(std::uint64_t first, std::uint64_t last, std::uint64_t factor, std::uint64_t step,
                  std::vector<std::uint64_t>* out);

/// How often a size is run.
struct IterationPlan {
  int iters = 0, batches = 0;
  int burst = 0, bursts = 0;  ///< launch cost: iterations back to back, and how often
  int singles = 0;            ///< bare copies, one at a time
};
/// What the user did not fix is chosen so that a size takes about `budgetNs`, given what one
/// iteration of the warm-up took, within 2 to 20 iterations, 3 to 5 batches, and 3 to 50 bursts of
/// 4 to 20 (as many as nccl-tests has in a batch) for the launch cost.
IterationPlan planIterations(const Options& options, double iterationNs, double budgetNs);

}  // namespace hoccl::bench
