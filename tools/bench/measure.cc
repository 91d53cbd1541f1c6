#include "tools/bench/measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "common/base/time.h"
#include "common/gpu/driver.h"
#include "tools/bench/layout.h"
#include "tools/bench/statistics.h"

namespace hoccl::bench {
namespace {

using Json = nlohmann::json;

/// The operation as the ranks are to perform it, for an "open" command.
Json openCommand(const Setting& setting, const char* kind, int rank) {
  const Options& options = setting.options;
  return {{"do", "open"},
          {"kind", kind},
          {"gpu", rank},
          {"rank", rank},
          {"ranks", options.ranks},
          // Those that share a page on which they meet.
          {"meeting", rank < options.ranksHere() ? options.ranksHere() : 1},
          {"op", factsOf(options.operation).name},
          {"root", options.root},
          {"pattern", static_cast<int>(options.pattern)},
          {"skew", options.skew},
          {"elementBytes", options.dataType.bytes},
          {"maxBytes", options.sizes.back()},
          {"timeoutMs", options.timeoutMs}};
}

/// Every size, out of place and in place where the operation has that.
std::vector<Shape> shapesOf(const Options& options) {
  std::vector<Shape> shapes;
  for (const std::uint64_t bytes : options.sizes) {
    shapes.push_back({bytes, false});
    if (factsOf(options.operation).inPlace) shapes.push_back({bytes, true});
  }
  return shapes;
}

Json shapeCommand(const char* what, const Shape& shape) {
  return {{"do", what}, {"bytes", shape.bytes}, {"inPlace", shape.inPlace}};
}

/// For progress and messages: "65536 bytes in place".
std::string shapeText(const Shape& shape) {
  return fmt::format("{} bytes{}", shape.bytes, shape.inPlace ? " in place" : "");
}

/// Counters of all ranks together.
struct Counts {
  bool steeringKnown = false;
  std::uint64_t staged = 0, appCopies = 0, direct = 0, nccl = 0;
  std::string reasons, transport;
  bool emulatorKnown = false;
  std::uint64_t kernels = 0, lateNs = 0;
};

class NcclMeasurement {
 public:
  NcclMeasurement(const Setting& setting, RankSet* set, std::string impl)
      : setting_(setting), options_(setting.options), set_(set), impl_(std::move(impl)) {}

  Status shape(const Shape& shape, SetResult* result);

 private:
  /// Asks all ranks to do `what` with the shape; `doing` says for people what that is.
  Status ask(const char* what, const std::string& doing, Json more, std::vector<Json>* answers);
  /// All ranks transfer `count` times; the slowest one's nanoseconds an iteration.
  Status transfer(int count, const std::string& doing, std::vector<double>* byRankNs,
                  double* slowestNs);
  Status checkedTransfers(std::uint64_t* wrong, double* iterationNs);
  Status prepare();
  Status verify(std::uint64_t* wrong);
  Status counts(Counts* out);
  Status launches(const IterationPlan& plan, Row* row);

  const Setting& setting_;
  const Options& options_;
  RankSet* set_;
  std::string impl_;
  Shape shape_;               // being measured
  std::uint64_t number_ = 0;  // of the last prepared transfer
};

Status NcclMeasurement::ask(const char* what, const std::string& doing, Json more,
                            std::vector<Json>* answers) {
  Json command = shapeCommand(what, shape_);
  command.update(more);
  return set_->askAll(fmt::format("{}: {}", shapeText(shape_), doing), command, answers);
}

Status NcclMeasurement::transfer(int count, const std::string& doing, std::vector<double>* byRankNs,
                                 double* slowestNs) {
  setting_.progress(fmt::format("{}: {}, {}", impl_, shapeText(shape_), doing));
  std::vector<Json> answers;
  HOCCL_RETURN_IF_ERROR(ask("transfer", doing, {{"count", count}}, &answers));
  *slowestNs = 0;
  for (const Json& answer : answers) {
    const double ns = answer.at("ns").get<double>() / count;
    if (byRankNs) byRankNs->push_back(ns);
    *slowestNs = std::max(*slowestNs, ns);
  }
  return {};
}

Status NcclMeasurement::prepare() {
  std::vector<Json> answers;
  return ask("prepare", "filling the buffers", {{"number", ++number_}}, &answers);
}

Status NcclMeasurement::verify(std::uint64_t* wrong) {
  std::vector<Json> answers;
  HOCCL_RETURN_IF_ERROR(
      ask("verify", "comparing the received bytes", {{"number", number_}}, &answers));
  for (const Json& answer : answers) *wrong += answer.at("wrong").get<std::uint64_t>();
  return {};
}

Status NcclMeasurement::checkedTransfers(std::uint64_t* wrong, double* iterationNs) {
  for (int i = 0; i < options_.check; ++i) {
    HOCCL_RETURN_IF_ERROR(prepare());
    HOCCL_RETURN_IF_ERROR(
        transfer(1, fmt::format("checked transfer {}", i + 1), nullptr, iterationNs));
    HOCCL_RETURN_IF_ERROR(verify(wrong));
  }
  return {};
}

Status NcclMeasurement::counts(Counts* out) {
  std::vector<Json> answers;
  HOCCL_RETURN_IF_ERROR(ask("counts", "reading counters", Json::object(), &answers));
  Counts sum;
  for (const Json& answer : answers) {
    if (const Json& steering = answer.at("steering"); !steering.is_null()) {
      sum.steeringKnown = true;
      sum.staged += steering.at("staged").get<std::uint64_t>();
      sum.appCopies += steering.at("app-copies").get<std::uint64_t>();
      sum.direct += steering.at("direct").get<std::uint64_t>();
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

Status NcclMeasurement::launches(const IterationPlan& plan, Row* row) {
  setting_.progress(fmt::format("{}: {}, launch cost", impl_, shapeText(shape_)));
  std::vector<Json> answers;
  HOCCL_RETURN_IF_ERROR(
      ask("launch", "launch cost", {{"burst", plan.burst}, {"count", plan.bursts}}, &answers));
  for (const Json& answer : answers) {
    const auto samples = answer.at("launchNs").get<std::vector<double>>();
    row->launchUs = std::max(row->launchUs.value_or(0), median(samples) / 1e3);
    row->launchP99Us = std::max(row->launchP99Us.value_or(0), percentile(samples, 99) / 1e3);
    const auto idle = answer.at("launchIdleNs").get<std::vector<double>>();
    row->launchIdleUs = std::max(row->launchIdleUs.value_or(0), median(idle) / 1e3);
  }
  return {};
}

/// The path of the operations between two readings of the counters. Steering does not count what it
/// has no hand in: where nothing at all was counted, everything went to NCCL.
std::string pathName(const std::string& impl, const Counts& from, const Counts& to) {
  if (!to.steeringKnown) return impl == "nccl" ? "nccl" : "";
  const bool staged = to.staged > from.staged, copies = to.appCopies > from.appCopies;
  const bool direct = to.direct > from.direct;
  if (staged + copies + direct + (to.nccl > from.nccl) > 1) return "mixed";
  return staged ? "staged" : copies ? "app-copies" : direct ? "direct" : "nccl";
}

Row newRow(const Setting& setting, const std::string& impl, const Shape& shape) {
  const Options& options = setting.options;
  const OperationFacts& facts = factsOf(options.operation);
  Row row;
  row.impl = impl;
  row.op = facts.name;
  row.device = setting.device.name;
  row.emulated = setting.device.emulated;
  row.ranks = options.ranks;
  row.bytes = shape.bytes;
  row.count = shape.bytes / options.dataType.bytes;
  if (facts.blocks) row.count /= static_cast<unsigned>(options.ranks);
  row.inPlace = shape.inPlace;
  row.dtype = options.dataType.name;
  row.busFactor = busFactor(options.operation, options.ranks);
  return row;
}

Status NcclMeasurement::shape(const Shape& shape, SetResult* result) {
  shape_ = shape;
  Row row = newRow(setting_, impl_, shape);
  std::uint64_t wrong = 0;
  double iterationNs = 0;
  Counts before, timedFrom, timedTo, after;
  HOCCL_RETURN_IF_ERROR(counts(&before));
  if (options_.warmup > 0)
    HOCCL_RETURN_IF_ERROR(transfer(options_.warmup, "warm-up", nullptr, &iterationNs));
  HOCCL_RETURN_IF_ERROR(checkedTransfers(&wrong, &iterationNs));
  if (iterationNs == 0) HOCCL_RETURN_IF_ERROR(transfer(1, "first transfer", nullptr, &iterationNs));

  const IterationPlan plan = planIterations(options_, iterationNs, setting_.budgetNs);
  // The timed transfers are checked as well: fresh bytes before the first, a look after the last.
  if (options_.check > 0) HOCCL_RETURN_IF_ERROR(prepare());
  HOCCL_RETURN_IF_ERROR(counts(&timedFrom));
  std::vector<std::vector<double>> times(static_cast<std::size_t>(set_->size()));
  TimeWindow window{monotonicNs(), 0};
  for (int batch = 0; batch < plan.batches; ++batch) {
    std::vector<double> byRank;
    double slowest = 0;
    HOCCL_RETURN_IF_ERROR(transfer(plan.iters,
                                   fmt::format("timed batch {} of {}", batch + 1, plan.batches),
                                   &byRank, &slowest));
    for (std::size_t i = 0; i < byRank.size(); ++i) times[i].push_back(byRank[i]);
  }
  window.endNs = monotonicNs();
  HOCCL_RETURN_IF_ERROR(counts(&timedTo));
  if (options_.check > 0) HOCCL_RETURN_IF_ERROR(verify(&wrong));
  HOCCL_RETURN_IF_ERROR(launches(plan, &row));
  HOCCL_RETURN_IF_ERROR(counts(&after));

  row.iters = plan.iters * plan.batches;
  // On the emulated driver real time is model time times the dilation.
  row.timeUs = medianOfSlowest(times) / 1e3 / setting_.device.dilation;
  if (options_.check > 0) row.errors = wrong;
  row.path = pathName(impl_, timedFrom, timedTo);
  if (timedTo.emulatorKnown) {
    row.kernels = timedTo.kernels - timedFrom.kernels;
    const double timedNs = double(window.endNs - window.beginNs) / setting_.device.dilation;
    result->worstLateShare =
        std::max(result->worstLateShare, double(timedTo.lateNs - timedFrom.lateNs) / timedNs);
  }
  if (after.steeringKnown) {
    result->paths.known = true;
    const std::uint64_t steered = after.staged + after.appCopies + after.direct - before.staged -
                                  before.appCopies - before.direct;
    result->paths.steered += steered;
    result->paths.total += steered + after.nccl - before.nccl;
    result->reasons = after.reasons;
    if ((row.path == "staged" || row.path == "app-copies" || row.path == "direct") &&
        !after.transport.empty())
      row.transport = after.transport;
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

Status openNcclSet(const Setting& setting, RankSet* set, const std::string& impl,
                   SetResult* result) {
  const Options& options = setting.options;
  result->pids = set->pids();
  return guarded([&]() -> Status {
    setting.progress("starting ranks");
    std::vector<Json> commands, answers;
    for (int rank = 0; rank < set->size(); ++rank) {
      commands.push_back(openCommand(setting, "nccl", rank));
      commands.back().update({{"dataType", options.dataType.nccl},
                              {"grouped", options.grouped},
                              {"offset", options.offset},
                              {"wantSteering", impl == "hoccl"},
                              {"symmetric", impl == kCopyEngines},
                              {"ncclLibrary", setting.ncclLibrary}});
    }
    HOCCL_RETURN_IF_ERROR(set->ask("opening the GPU", commands, &answers));
    result->ncclVersion = answers.front().at("nccl");
    result->ncclFile = answers.front().at("library");
    result->ownFunction = answers.front().at("ownFunction");
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
    for (const Shape& shape : shapesOf(setting.options)) {
      HOCCL_RETURN_IF_ERROR(measurement.shape(shape, result));
      rowDone(result->rows.back());
    }
    return set->finish();
  });
}

Status tryNcclSet(const Setting& setting, RankSet* set) {
  std::vector<Json> answers;
  Json command = shapeCommand("transfer", {setting.options.sizes.front(), false});
  command["count"] = 1;
  HOCCL_RETURN_IF_ERROR(set->askAll("trying one transfer", command, &answers));
  return set->finish();
}

Status measureBareSet(const Setting& setting, RankSet* set,
                      const std::function<void(const Row&)>& rowDone, SetResult* result) {
  const Options& options = setting.options;
  result->pids = set->pids();
  return guarded([&]() -> Status {
    std::vector<Json> commands, answers;
    for (int rank = 0; rank < set->size(); ++rank)
      commands.push_back(openCommand(setting, "bare", rank));
    for (Json& command : commands) command["betweenGpus"] = setting.directPairs;
    HOCCL_RETURN_IF_ERROR(set->ask("opening the GPU", commands, &answers));
    const auto ranks = static_cast<std::size_t>(set->size());
    for (const Shape& shape : shapesOf(options)) {
      setting.progress("bare copies: " + shapeText(shape));
      auto copies = [&](int count, bool steady) {
        Json command = shapeCommand("copies", shape);
        command.update({{"count", count}, {"steady", steady}});
        return set->askAll(
            fmt::format("{}: {} copies", shapeText(shape), steady ? "steady" : "single"), command,
            &answers);
      };
      HOCCL_RETURN_IF_ERROR(copies(std::max(options.warmup, 1), true));
      double estimate = 0;
      for (const Json& answer : answers)
        estimate = std::max(estimate, answer.at("ns").get<double>() / std::max(options.warmup, 1));
      const IterationPlan plan = planIterations(options, estimate, setting.budgetNs);

      std::vector<std::vector<double>> steady(ranks), single(ranks);
      TimeWindow window{monotonicNs(), 0};
      for (int batch = 0; batch < plan.batches; ++batch) {
        HOCCL_RETURN_IF_ERROR(copies(plan.iters, true));
        for (std::size_t i = 0; i < ranks; ++i)
          steady[i].push_back(answers[i].at("ns").get<double>() / plan.iters);
      }
      window.endNs = monotonicNs();
      Row row = newRow(setting, "bare", shape);
      row.path = "steady";
      row.iters = plan.iters * plan.batches;
      row.timeUs = medianOfSlowest(steady) / 1e3 / setting.device.dilation;
      result->rows.push_back(row);
      result->windows.push_back(window);
      rowDone(row);

      window.beginNs = monotonicNs();
      HOCCL_RETURN_IF_ERROR(copies(plan.singles, false));
      window.endNs = monotonicNs();
      for (std::size_t i = 0; i < ranks; ++i)
        single[i] = answers[i].at("singleNs").get<std::vector<double>>();
      row.path = "single";
      row.iters = plan.singles;
      row.timeUs = medianOfSlowest(single) / 1e3 / setting.device.dilation;
      result->rows.push_back(row);
      result->windows.push_back(window);
      rowDone(row);
    }
    return set->finish();
  });
}

}  // namespace hoccl::bench
