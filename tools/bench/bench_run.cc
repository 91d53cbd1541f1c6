#include "tools/bench/bench_run.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "common/base/config.h"
#include "common/base/host_identity.h"
#include "common/base/log.h"
#include "common/base/version.h"
#include "common/gpu/driver.h"
#include "tools/bench/host_facts.h"
#include "tools/bench/locate.h"
#include "tools/bench/measure.h"
#include "tools/bench/rank_environment.h"

namespace hoccl::bench {
namespace {

// Above this share the emulated copies were held up by this CPU and the figures are too low.
constexpr double kLateShareWorthSaying = 0.1;
constexpr int kUsage = 2, kFailed = 1;
const std::string kNoCopyEngines =
    "its log shows none at work (they need NCCL 2.28.3, a driver of CUDA 12.5, and GPUs that all "
    "reach each other)";

void say(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

/// One line on standard error, rewritten in place, where a person watches.
class Progress {
 public:
  void show(const std::string& text) {
    if (!terminal_) return;
    std::fprintf(stderr, "\r\033[K%s", text.c_str());
    std::fflush(stderr);
    shown_ = true;
  }
  void clear() {
    if (shown_) std::fputs("\r\033[K", stderr);
    shown_ = false;
  }

 private:
  bool terminal_ = ::isatty(STDERR_FILENO) == 1;
  bool shown_ = false;
};

/// A temporary folder that goes with everything in it.
class ScratchFolder {
 public:
  ScratchFolder() = default;
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  Status create() {
    const char* base = std::getenv("TMPDIR");
    std::string name = std::string(base && *base ? base : "/tmp") + "/hoccl-bench-XXXXXX";
    if (!::mkdtemp(name.data())) return Status::fromErrno("mkdtemp " + name, errno);
    path_ = name;
    return {};
  }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class BenchRun {
 public:
  explicit BenchRun(std::string command) : command_(std::move(command)) {}
  int run(const CommandLine& line);

 private:
  int fail(int exitStatus, const Status& status) {
    progress_.clear();
    std::fprintf(stderr, "hoccl bench: %s\n", status.message().c_str());
    return exitStatus;
  }
  Status probe(const std::string& libraryPath, DeviceInfo* device);
  Status chooseDevice();
  RankSetPlan plan(const std::string& impl);
  [[nodiscard]] bool directPairs() const;
  void printHeader();
  Status measure(const std::string& impl, SetResult* result);
  Status tryOut(const std::string& impl, std::string* log);
  Status lookAtNccl();
  void printComparisons(const SetResult& main, const SetResult& nccl, const SetResult& engines,
                        const SetResult& bare);

  std::string command_;
  Config config_;
  Locations locations_{""};
  Setting setting_;
  std::string emulatorPath_, whyEmulated_, shim_, ncclTransport_;
  bool copyEnginesTaken_ = false;
  std::vector<RemoteHost> remotes_;
  int sets_ = 0;
  ScratchFolder scratch_;
  Progress progress_;
  RunHeader header_;
  std::vector<Row> allRows_;
};

/// Opens the GPU in a process of its own: the bench itself stays free of CUDA.
Status BenchRun::probe(const std::string& libraryPath, DeviceInfo* device) {
  RankEnvironment environment;
  environment.libraryPath = libraryPath;
  RankSetPlan plan;
  plan.name = "probe";
  plan.program = locations_.program();
  plan.arguments = {"bench-rank", "--parent", std::to_string(::getpid())};
  plan.environments = {environment.applyTo(ownEnvironment())};
  plan.timeoutMs = setting_.options.timeoutMs;
  std::unique_ptr<RankSet> set;
  HOCCL_RETURN_IF_ERROR(RankSet::start(plan, &set));
  std::vector<nlohmann::json> answers;
  HOCCL_RETURN_IF_ERROR(
      set->askAll("opening the GPU", {{"do", "open"}, {"kind", "probe"}, {"gpu", 0}}, &answers));
  if (const auto problem = answers.front().find("problem"); problem != answers.front().end())
    return Status::error(Code::Unsupported, problem->get<std::string>());
  const nlohmann::json info = answers.front().value("device", nlohmann::json::object());
  device->name = info.value("name", "");
  device->count = info.value("count", 0);
  device->cudaVersion = info.value("cuda", 0);
  device->emulated = info.value("emulated", false);
  device->dilation = info.value("dilation", 1.0);
  return set->finish();
}

Status BenchRun::chooseDevice() {
  progress_.show("looking for a GPU");
  Status real = Status::error(Code::Unsupported, "HOCCL_EMULATE=always");
  if (config_.emulate != "always") {
    real = probe("", &setting_.device);
    if (real) return {};
    if (config_.emulate == "never")
      return real.inContext("HOCCL_EMULATE=never, and no GPU can be used");
  }
  whyEmulated_ = real.message();
  HOCCL_RETURN_IF_ERROR(locations_.emulatorPath(&emulatorPath_)
                            .inContext(fmt::format("no GPU ({}), and no emulator", whyEmulated_)));
  HOCCL_RETURN_IF_ERROR(scratch_.create());
  return probe(emulatorPath_, &setting_.device);
}

RankSetPlan BenchRun::plan(const std::string& impl) {
  const Options& options = setting_.options;
  RankSetPlan plan;
  plan.name = impl;
  plan.program = locations_.program();
  plan.arguments = {"bench-rank", "--parent", std::to_string(::getpid())};
  plan.timeoutMs = options.timeoutMs;
  const std::vector<std::string> base = ownEnvironment();
  const int ranks = options.ranks;
  ++sets_;
  for (int rank = 0; rank < ranks; ++rank) {
    RankEnvironment environment;
    environment.libraryPath = emulatorPath_;
    if (impl == "hoccl") environment.preload = shim_;
    // A rank frees its buffers when its communicator is gone, so that nobody has to see it.
    if (!std::getenv("HOCCL_APP_COPIES"))
      environment.extra.push_back("HOCCL_APP_COPIES=unexportable");
    if (impl == kCopyEngines) environment.extra.push_back("NCCL_CTA_POLICY=2");  // zero CTAs
    if (!options.sameNode && impl != "bare")
      environment.hostId = fmt::format("hoccl-bench-{}-{}", ::getpid(), rank);
    if (setting_.device.emulated) {
      // One session a set: its processes share the emulated GPUs, and its counters start at zero.
      // Its file would stay behind where ranks are killed; so it lies in a folder of ours.
      if (!scratch_.path().empty()) environment.extra.push_back("TMPDIR=" + scratch_.path());
      if (!std::getenv("EMUCUDA_SESSION"))
        environment.extra.push_back(fmt::format("EMUCUDA_SESSION=bench-{}-{}", ::getpid(), sets_));
      if (!std::getenv("EMUCUDA_DEVICES"))
        environment.extra.push_back(fmt::format("EMUCUDA_DEVICES={}", ranks));
    }
#ifdef __SANITIZE_ADDRESS__
    // The preloaded library comes before the sanitizer's, which else refuses to start.
    const char* set = std::getenv("ASAN_OPTIONS");
    environment.extra.push_back(
        fmt::format("ASAN_OPTIONS={}{}verify_asan_link_order=0", set ? set : "", set ? ":" : ""));
#endif
    if (rank >= options.ranksHere()) {
      // That host has a folder of its own for such files.
      std::erase_if(environment.extra,
                    [](const std::string& e) { return e.starts_with("TMPDIR="); });
      plan.remotes.push_back(
          {remotes_[static_cast<std::size_t>(rank - options.ranksHere())], environment});
      continue;
    }
    plan.environments.push_back(environment.applyTo(base));
  }
  return plan;
}

/// Whether each rank has a GPU of its own on the ranks' common node, and HOCCL copies between them.
bool BenchRun::directPairs() const {
  int gpus = setting_.device.count;
  if (setting_.device.emulated) {
    const char* devices = std::getenv("EMUCUDA_DEVICES");
    gpus = devices ? std::atoi(devices) : setting_.options.ranks;
  }
  return setting_.options.sameNode && config_.p2p != 0 && gpus >= setting_.options.ranks;
}

void BenchRun::printHeader() {
  const Options& options = setting_.options;
  const DeviceInfo& device = setting_.device;
  progress_.clear();
  if (device.emulated) {
    say(fmt::format(
        "# emulated driver: model time, not a measurement of hardware (dilation {:g})\n",
        device.dilation));
    if (!whyEmulated_.empty()) {
      say(fmt::format("# because: {}\n", whyEmulated_));
    }
  } else {
    say(fmt::format("# {} x {}, driver {}, {}\n", device.count, device.name,
                    header_.driver.empty() ? "unknown" : header_.driver, header_.kernel));
  }
  const OperationFacts& facts = factsOf(options.operation);
  std::string about;
  if (options.operation == Operation::SendRecv)
    about = fmt::format(", pattern {}", patternName(options.pattern));
  if (options.operation == Operation::AlltoAllv) about = fmt::format(", skew {}", options.skew);
  if (facts.rooted) about = fmt::format(", root {}", options.root);
  say(fmt::format("# hoccl {} bench {}: {} ranks{}, {}, type {}, offset {}\n", versionText(),
                  facts.name, options.ranks, about,
                  options.sameNode ? "ranks on one node" : "each rank a node of its own",
                  options.dataType.name, options.offset));
  say(fmt::format("# bytes: {}\n", facts.sizeMeaning));
}

/// For the head line of a set: which NCCL calls one operation is, where that is not obvious.
std::string callText(const Options& options, const SetResult& result) {
  const OperationFacts& facts = factsOf(options.operation);
  if (result.ownFunction || options.operation == Operation::SendRecv) return "";
  std::string text = "; as grouped send/recv";
  if (facts.groupable && !options.grouped)
    text += fmt::format(": this NCCL has no {} (2.28.3 and later do)", facts.ncclFunction);
  return text;
}

Status BenchRun::measure(const std::string& impl, SetResult* result) {
  std::unique_ptr<RankSet> set;
  HOCCL_RETURN_IF_ERROR(RankSet::start(plan(impl), &set));
  if (impl != "bare") HOCCL_RETURN_IF_ERROR(openNcclSet(setting_, set.get(), impl, result));
  progress_.clear();
  std::string about;
  if (impl == "bare") {
    about = setting_.directPairs
                ? "the copies alone, one process a rank: from GPU to GPU"
                : "the copies alone, one process a rank: GPU to pinned host, pinned host to GPU";
  } else {
    header_.nccl = ncclVersionText(result->ncclVersion);
    about = fmt::format("NCCL {} from {}", header_.nccl, result->ncclFile);
    if (impl == "hoccl") about = fmt::format("{}, {}", shim_, about);
    if (impl == "nccl" && !ncclTransport_.empty()) about += ", transport " + ncclTransport_;
    if (impl == kCopyEngines)
      about += copyEnginesTaken_ ? ", by copy engines" : ", by kernels: " + kNoCopyEngines;
    about += callText(setting_.options, *result);
  }
  say(fmt::format("#\n# impl {}: {}\n", impl, about));
  // A tracer's files are whole only when the processes have ended; then the rows come all at once.
  const std::string pattern = kernelTracePattern();
  if (pattern.empty()) say(tableHeading());
  const auto complete = [&](Row* row) {
    if (impl == "nccl" && !ncclTransport_.empty()) row->transport = ncclTransport_;
    if (impl == kCopyEngines) row->path = copyEnginesTaken_ ? "copy-engine" : "nccl";
  };
  auto rowDone = [&](Row row) {
    progress_.clear();
    complete(&row);
    if (pattern.empty()) say(tableRow(row));
  };
  HOCCL_RETURN_IF_ERROR(impl == "bare"
                            ? measureBareSet(setting_, set.get(), rowDone, result)
                            : measureNcclSet(setting_, set.get(), impl, rowDone, result));
  progress_.clear();
  for (Row& row : result->rows) complete(&row);
  if (!pattern.empty()) {
    const auto kernels = countTracedKernels(pattern, result->pids, result->windows);
    for (std::size_t i = 0; i < kernels.size(); ++i)
      if (!setting_.device.emulated) result->rows[i].kernels = kernels[i];
    say(tableHeading());
    for (const Row& row : result->rows) say(tableRow(row));
  }
  allRows_.insert(allRows_.end(), result->rows.begin(), result->rows.end());
  if (result->worstLateShare > kLateShareWorthSaying)
    say(fmt::format(
        "# this CPU was slower than the modelled copies, by up to {:.0f}% of a size's time: "
        "raise EMUCUDA_DILATION (now {:g}) for truer model time\n",
        result->worstLateShare * 100, setting_.device.dilation));
  return {};
}

/// A short run of its own, so that NCCL's log does not weigh on the measured one.
Status BenchRun::tryOut(const std::string& impl, std::string* log) {
  progress_.show("looking what NCCL takes");
  RankSetPlan trial = plan(impl);
  trial.captureOutput = true;
  for (std::vector<std::string>& environment : trial.environments) {
    RankEnvironment debug;
    debug.extra = {"NCCL_DEBUG=INFO", "NCCL_DEBUG_SUBSYS=INIT,NET,P2P,SHM", "NCCL_DEBUG_FILE"};
    environment = debug.applyTo(environment);
  }
  Setting small = setting_;
  small.options.sizes = {setting_.options.sizes.front()};
  std::unique_ptr<RankSet> set;
  SetResult ignored;
  HOCCL_RETURN_IF_ERROR(RankSet::start(trial, &set));
  HOCCL_RETURN_IF_ERROR(openNcclSet(small, set.get(), impl, &ignored));
  HOCCL_RETURN_IF_ERROR(tryNcclSet(small, set.get()));
  *log = set->output();
  return {};
}

/// What only NCCL's log tells: its transport, and whether its copy engines are taken.
Status BenchRun::lookAtNccl() {
  const Options& options = setting_.options;
  std::string log;
  if (options.impl == "nccl" || options.compareNccl) {
    HOCCL_RETURN_IF_ERROR(tryOut("nccl", &log));
    ncclTransport_ = ncclTransportIn(log);
  }
  if (options.impl == kCopyEngines || options.compareCopyEngines) {
    HOCCL_RETURN_IF_ERROR(tryOut(kCopyEngines, &log));
    copyEnginesTaken_ = ncclCopyEnginesIn(log);
  }
  return {};
}

std::vector<Row> rowsOfPath(const std::vector<Row>& rows, const std::string& path) {
  std::vector<Row> chosen;
  for (const Row& row : rows)
    if (row.path == path) chosen.push_back(row);
  return chosen;
}

void BenchRun::printComparisons(const SetResult& main, const SetResult& nccl,
                                const SetResult& engines, const SetResult& bare) {
  say(comparisonTable(ncclTransport_.empty() ? "" : "over " + ncclTransport_, main.rows,
                      nccl.rows));
  say(comparisonTable(copyEnginesTaken_ ? "" : "by kernels", main.rows, engines.rows));
  for (const char* path : {"steady", "single"})
    say(comparisonTable(fmt::format("({})", path), main.rows, rowsOfPath(bare.rows, path)));
}

int BenchRun::run(const CommandLine& line) {
  Status status = Config::fromEnvironment(&config_);
  if (!status) return fail(kUsage, status);
  if (!(status = completeOptions(line, false, &setting_.options))) return fail(kUsage, status);
  for (const std::string& file : setting_.options.remotes) {
    if (!(status = readRemoteHost(file, &remotes_.emplace_back()))) return fail(kUsage, status);
  }
  setting_.ncclLibrary = config_.ncclLib;
  setting_.progress = [this](const std::string& text) { progress_.show(text); };
  if (!(status = Locations::ofThisProgram(&locations_))) return fail(kFailed, status);
  if (line.impl == "hoccl" && !(status = locations_.shim(&shim_))) return fail(kFailed, status);
  if (!(status = chooseDevice())) return fail(kFailed, status);
  if (!(status = completeOptions(line, setting_.device.emulated, &setting_.options)))
    return fail(kUsage, status);
  const Options& options = setting_.options;
  if (options.sameNode && !setting_.device.emulated && setting_.device.count < options.ranks)
    return fail(kUsage,
                Status::error(Code::InvalidArgument,
                              fmt::format("--same-node with {} ranks needs {} GPUs, here {} "
                                          "can be used: NCCL refuses two ranks of one node "
                                          "on one GPU",
                                          options.ranks, options.ranks, setting_.device.count)));
  header_.op = factsOf(options.operation).name;
  header_.version = versionText();
  header_.commit = commitText();
  header_.host = shortHostName();
  header_.kernel = kernelText();
  header_.driver = setting_.device.emulated ? "emulated" : nvidiaDriverVersion();
  header_.device = setting_.device.name;
  header_.timestamp = timestampText();
  header_.command = command_;
  header_.cudaVersion = setting_.device.cudaVersion;
  header_.emulated = setting_.device.emulated;
  header_.dilation = setting_.device.dilation;
  setting_.directPairs = directPairs();
  printHeader();

  SetResult main, nccl, engines, bare;
  if (!(status = lookAtNccl())) return fail(kFailed, status);
  if (!(status = measure(options.impl, &main))) return fail(kFailed, status);
  if (options.compareNccl && !(status = measure("nccl", &nccl))) return fail(kFailed, status);
  if (options.compareCopyEngines && !(status = measure(kCopyEngines, &engines)))
    return fail(kFailed, status);
  if (options.compareBare && !(status = measure("bare", &bare))) return fail(kFailed, status);
  printComparisons(main, nccl, engines, bare);

  std::optional<std::uint64_t> errors;
  for (const Row& row : allRows_)
    if (row.errors) errors = errors.value_or(0) + *row.errors;
  if (options.impl == "hoccl" && main.paths.known && main.paths.steered < main.paths.total &&
      !main.reasons.empty())
    say(fmt::format("# why not steered: {}\n", main.reasons));
  say(summaryLine(errors, options.impl == "hoccl" ? &main.paths : nullptr));
  if (!options.jsonFile.empty() &&
      !(status = writeJson(options.jsonFile, reportJson(header_, allRows_))))
    return fail(kFailed, status);
  return errors.value_or(0) == 0 ? 0 : kFailed;
}

}  // namespace

int runBench(const CommandLine& line, const std::string& command) {
  setLogRole("bench");
  return BenchRun(command).run(line);
}

}  // namespace hoccl::bench
