#include "tools/bench/measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "common/base/time.h"
#include "common/gpu/driver.h"
#include "tools/bench/statistics.h"

namespace hoccl::bench {
namespace {

using Json = nlohmann::json;

struct Peers {
  int sendTo = -1, receiveFrom = -1;
};

Peers peersOf(Pattern pattern, int rank, int ranks) {
  switch (pattern) {
    case Pattern::Oneway:
      return rank == 0 ? Peers{1, -1} : Peers{-1, 0};
    case Pattern::Ring:
      return {(rank + 1) % ranks, (rank + ranks - 1) % ranks};
    case Pattern::Bidir:
      return {rank ^ 1, rank ^ 1};
  }
  return {};
}

/// Counters of all ranks together.
struct Counts {
  bool steeringKnown = false;
  std::uint64_t staged = 0, nccl = 0;
  std::string reasons, transport;
  bool emulatorKnown = false;
  std::uint64_t kernels = 0, lateNs = 0;
};

class NcclMeasurement {
 public:
  NcclMeasurement(const Setting& setting, RankSet* set, std::string impl)
      : setting_(setting), options_(setting.options), set_(set), impl_(std::move(impl)) {}

  Status size(std::uint64_t bytes, SetResult* result);

 private:
  std::string stage(std::uint64_t bytes, const std::string& what) const {
    return fmt::format("{} bytes: {}", bytes, what);
  }
  /// All ranks transfer `count` times; the slowest one's nanoseconds an iteration.
  Status transfer(std::uint64_t bytes, int count, const std::string& what,
                  std::vector<double>* byRankNs, double* slowestNs);
  Status checkedTransfers(std::uint64_t bytes, std::uint64_t* wrong, double* iterationNs);
  Status prepare(std::uint64_t bytes);
  Status verify(std::uint64_t bytes, std::uint64_t* wrong);
  Status counts(Counts* out);
  Status launches(std::uint64_t bytes, int count, Row* row);

  const Setting& setting_;
  const Options& options_;
  RankSet* set_;
  std::string impl_;
  std::uint64_t number_ = 0;  // of the last prepared transfer
};

Status NcclMeasurement::transfer(std::uint64_t bytes, int count, const std::string& what,
                                 std::vector<double>* byRankNs, double* slowestNs) {
  setting_.progress(fmt::format("{}: {} bytes, {}", impl_, bytes, what));
  std::vector<Json> answers;
  HOCCL_RETURN_IF_ERROR(set_->askAll(
      stage(bytes, what), {{"do", "transfer"}, {"bytes", bytes}, {"count", count}}, &answers));
  *slowestNs = 0;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    const double ns = answers[i].at("ns").get<double>() / count;
    if (byRankNs) byRankNs->push_back(ns);
    *slowestNs = std::max(*slowestNs, ns);
  }
  return {};
}

Status NcclMeasurement::prepare(std::uint64_t bytes) {
  std::vector<Json> answers;
  return set_->askAll(stage(bytes, "filling the buffers"),
                      {{"do", "prepare"}, {"bytes", bytes}, {"number", ++number_}}, &answers);
}

Status NcclMeasurement::verify(std::uint64_t bytes, std::uint64_t* wrong) {
  std::vector<Json> answers;
  HOCCL_RETURN_IF_ERROR(set_->askAll(stage(bytes, "comparing the received bytes"),
                                     {{"do", "verify"}, {"bytes", bytes}, {"number", number_}},
                                     &answers));
  for (const Json& answer : answers) *wrong += answer.at("wrong").get<std::uint64_t>();
  return {};
}

Status NcclMeasurement::checkedTransfers(std::uint64_t bytes, std::uint64_t* wrong,
                                         double* iterationNs) {
  for (int i = 0; i < options_.check; ++i) {
    HOCCL_RETURN_IF_ERROR(prepare(bytes));
    HOCCL_RETURN_IF_ERROR(
        transfer(bytes, 1, fmt::format("checked transfer {}", i + 1), nullptr, iterationNs));
    HOCCL_RETURN_IF_ERROR(verify(bytes, wrong));
  }
  return {};
}

Status NcclMeasurement::counts(Counts* out) {
  std::vector<Json> answers;
  HOCCL_RETURN_IF_ERROR(set_->askAll("reading counters", {{"do", "counts"}}, &answers));
  Counts sum;
  for (const Json& answer : answers) {
    if (const Json& steering = answer.at("steering"); !steering.is_null()) {
      sum.steeringKnown = true;
      sum.staged += steering.at("staged").get<std::uint64_t>();
      sum.nccl += steering.at("nccl").get<std::uint64_t>();
      if (sum.reasons.empty()) sum.reasons = steering.at("reasons");
      if (sum.transport.empty()) sum.transport = steering.at("transport");
    }
    // Every rank reports the whole session's counters: they are not added up.
    if (const Json& emulator = answer.at("emulator"); !emulator.is_null()) {
      sum.emulatorKnown = true;
      sum.kernels = std::max(sum.kernels, emulator.at("kernels").get<std::uint64_t>());
      sum.lateNs = std::max(sum.lateNs, emulator.at("lateNs").get<std::uint64_t>());
    }
  }
  *out = std::move(sum);
  return {};
}

Status NcclMeasurement::launches(std::uint64_t bytes, int count, Row* row) {
  setting_.progress(fmt::format("{}: {} bytes, launch cost", impl_, bytes));
  std::vector<Json> answers;
  HOCCL_RETURN_IF_ERROR(set_->askAll(stage(bytes, "launch cost"),
                                     {{"do", "launch"}, {"bytes", bytes}, {"count", count}},
                                     &answers));
  for (const Json& answer : answers) {
    const auto samples = answer.at("launchNs").get<std::vector<double>>();
    row->launchUs = std::max(row->launchUs.value_or(0), median(samples) / 1e3);
    row->launchP99Us = std::max(row->launchP99Us.value_or(0), percentile(samples, 99) / 1e3);
    const auto idle = answer.at("launchIdleNs").get<std::vector<double>>();
    row->launchIdleUs = std::max(row->launchIdleUs.value_or(0), median(idle) / 1e3);
  }
  return {};
}

std::string pathName(const std::string& impl, const Counts& before, const Counts& after) {
  if (!after.steeringKnown) return impl == "nccl" ? "nccl" : "";
  const bool staged = after.staged > before.staged, nccl = after.nccl > before.nccl;
  return staged && nccl ? "mixed" : staged ? "staged" : nccl ? "nccl" : "";
}

Row newRow(const Setting& setting, const std::string& impl, std::uint64_t bytes) {
  Row row;
  row.impl = impl;
  row.device = setting.device.name;
  row.emulated = setting.device.emulated;
  row.ranks = impl == "bare" ? 2 : setting.options.ranks;
  row.bytes = bytes;
  row.count = bytes / setting.options.dataType.bytes;
  row.dtype = setting.options.dataType.name;
  return row;
}

Status NcclMeasurement::size(std::uint64_t bytes, SetResult* result) {
  Row row = newRow(setting_, impl_, bytes);
  std::uint64_t wrong = 0;
  double iterationNs = 0;
  Counts before, timedFrom, timedTo, after;
  HOCCL_RETURN_IF_ERROR(counts(&before));
  if (options_.warmup > 0)
    HOCCL_RETURN_IF_ERROR(transfer(bytes, options_.warmup, "warm-up", nullptr, &iterationNs));
  HOCCL_RETURN_IF_ERROR(checkedTransfers(bytes, &wrong, &iterationNs));
  if (iterationNs == 0)
    HOCCL_RETURN_IF_ERROR(transfer(bytes, 1, "first transfer", nullptr, &iterationNs));

  const IterationPlan plan = planIterations(options_, iterationNs, setting_.budgetNs);
  // The timed transfers are checked as well: fresh bytes before the first, a look after the last.
  if (options_.check > 0) HOCCL_RETURN_IF_ERROR(prepare(bytes));
  HOCCL_RETURN_IF_ERROR(counts(&timedFrom));
  std::vector<std::vector<double>> times(static_cast<std::size_t>(set_->size()));
  TimeWindow window{monotonicNs(), 0};
  for (int batch = 0; batch < plan.batches; ++batch) {
    std::vector<double> byRank;
    double slowest = 0;
    HOCCL_RETURN_IF_ERROR(transfer(bytes, plan.iters,
                                   fmt::format("timed batch {} of {}", batch + 1, plan.batches),
                                   &byRank, &slowest));
    for (std::size_t i = 0; i < byRank.size(); ++i) times[i].push_back(byRank[i]);
  }
  window.endNs = monotonicNs();
  HOCCL_RETURN_IF_ERROR(counts(&timedTo));
  if (options_.check > 0) HOCCL_RETURN_IF_ERROR(verify(bytes, &wrong));
  HOCCL_RETURN_IF_ERROR(launches(bytes, plan.launches, &row));
  HOCCL_RETURN_IF_ERROR(counts(&after));

  row.iters = plan.iters * plan.batches;
  // On the emulated driver real time is model time times the dilation.
  row.timeUs = medianOfSlowest(times) / 1e3 / setting_.device.dilation;
  if (options_.check > 0) row.errors = wrong;
  row.path = pathName(impl_, before, after);
  if (timedTo.emulatorKnown) {
    row.kernels = timedTo.kernels - timedFrom.kernels;
    const double timedNs = double(window.endNs - window.beginNs) / setting_.device.dilation;
    result->worstLateShare =
        std::max(result->worstLateShare, double(timedTo.lateNs - timedFrom.lateNs) / timedNs);
  }
  if (after.steeringKnown) {
    result->paths.known = true;
    result->paths.steered += after.staged - before.staged;
    result->paths.total += after.staged + after.nccl - before.staged - before.nccl;
    result->reasons = after.reasons;
    if (row.path == "staged" && !after.transport.empty()) row.transport = after.transport;
  }
  result->windows.push_back(window);
  result->rows.push_back(std::move(row));
  return {};
}

/// Answers come from our own program; a field that is missing is a bug, not a crash.
template <typename Work>
Status guarded(Work&& work) {
  try {
    return work();
  } catch (const Json::exception& error) {
    return Status::error(Code::Internal,
                         fmt::format("a rank's answer is not as expected: {}", error.what()));
  }
}

}  // namespace

Status openNcclSet(const Setting& setting, RankSet* set, bool wantSteering, SetResult* result) {
  const Options& options = setting.options;
  result->pids = set->pids();
  return guarded([&]() -> Status {
    setting.progress("starting ranks");
    std::vector<Json> commands, answers;
    for (int rank = 0; rank < set->size(); ++rank) {
      const Peers peers = peersOf(options.pattern, rank, options.ranks);
      commands.push_back({{"do", "open"},
                          {"kind", "nccl"},
                          {"gpu", rank},
                          {"rank", rank},
                          {"ranks", options.ranks},
                          {"sendTo", peers.sendTo},
                          {"receiveFrom", peers.receiveFrom},
                          {"dataType", options.dataType.nccl},
                          {"elementBytes", options.dataType.bytes},
                          {"maxBytes", options.sizes.back()},
                          {"offset", options.offset},
                          {"timeoutMs", options.timeoutMs},
                          {"wantSteering", wantSteering},
                          {"ncclLibrary", setting.ncclLibrary}});
    }
    HOCCL_RETURN_IF_ERROR(set->ask("opening the GPU", commands, &answers));
    result->ncclVersion = answers.front().at("nccl");
    result->ncclFile = answers.front().at("library");
    commands.assign(commands.size(), nullptr);
    commands.front() = {{"do", "uniqueId"}};
    HOCCL_RETURN_IF_ERROR(set->ask("making the unique id", commands, &answers));
    return set->askAll("creating the communicator",
                       {{"do", "connect"}, {"id", answers.front().at("id")}}, &answers);
  });
}

Status measureNcclSet(const Setting& setting, RankSet* set, const std::string& impl,
                      const std::function<void(const Row&)>& rowDone, SetResult* result) {
  return guarded([&]() -> Status {
    NcclMeasurement measurement(setting, set, impl);
    for (const std::uint64_t bytes : setting.options.sizes) {
      HOCCL_RETURN_IF_ERROR(measurement.size(bytes, result));
      rowDone(result->rows.back());
    }
    return set->finish();
  });
}

Status tryNcclSet(const Setting& setting, RankSet* set) {
  std::vector<Json> answers;
  HOCCL_RETURN_IF_ERROR(set->askAll(
      "trying one transfer",
      {{"do", "transfer"}, {"bytes", setting.options.sizes.front()}, {"count", 1}}, &answers));
  return set->finish();
}

Status measureBareSet(const Setting& setting, RankSet* set,
                      const std::function<void(const Row&)>& rowDone, SetResult* result) {
  const Options& options = setting.options;
  result->pids = set->pids();
  return guarded([&]() -> Status {
    std::vector<Json> commands, answers;
    for (int rank = 0; rank < set->size(); ++rank)
      commands.push_back({{"do", "open"},
                          {"kind", "bare"},
                          {"gpu", rank},
                          {"rank", rank},
                          {"maxBytes", options.sizes.back()},
                          {"timeoutMs", options.timeoutMs}});
    HOCCL_RETURN_IF_ERROR(set->ask("opening the GPU", commands, &answers));
    for (const std::uint64_t bytes : options.sizes) {
      setting.progress(fmt::format("bare copies: {} bytes", bytes));
      auto copies = [&](int count, bool steady) {
        return set->askAll(
            fmt::format("{} bytes: {} copies", bytes, steady ? "steady" : "single"),
            {{"do", "copies"}, {"bytes", bytes}, {"count", count}, {"steady", steady}}, &answers);
      };
      HOCCL_RETURN_IF_ERROR(copies(std::max(options.warmup, 1), true));
      double estimate = 0;
      for (const Json& answer : answers)
        estimate = std::max(estimate, answer.at("ns").get<double>() / std::max(options.warmup, 1));
      const IterationPlan plan = planIterations(options, estimate, setting.budgetNs);

      std::vector<std::vector<double>> steady(2), single(2);
      TimeWindow window{monotonicNs(), 0};
      for (int batch = 0; batch < plan.batches; ++batch) {
        HOCCL_RETURN_IF_ERROR(copies(plan.iters, true));
        for (std::size_t half = 0; half < 2; ++half)
          steady[half].push_back(answers[half].at("ns").get<double>() / plan.iters);
      }
      window.endNs = monotonicNs();
      Row row = newRow(setting, "bare", bytes);
      row.path = "steady";
      row.iters = plan.iters * plan.batches;
      row.timeUs = medianOfSlowest(steady) / 1e3 / setting.device.dilation;
      result->rows.push_back(row);
      result->windows.push_back(window);
      rowDone(row);

      window.beginNs = monotonicNs();
      HOCCL_RETURN_IF_ERROR(copies(plan.launches, false));
      window.endNs = monotonicNs();
      for (std::size_t half = 0; half < 2; ++half)
        single[half] = answers[half].at("singleNs").get<std::vector<double>>();
      row.path = "single";
      row.iters = plan.launches;
      row.timeUs = medianOfSlowest(single) / 1e3 / setting.device.dilation;
      result->rows.push_back(row);
      result->windows.push_back(window);
      rowDone(row);
    }
    return set->finish();
  });
}

}  // namespace hoccl::bench
