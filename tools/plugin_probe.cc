#include "tools/plugin_probe.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <link.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tools/driver_probe.h"
#include "tools/net_plugin_trial.h"

namespace hoccl {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kShimSymbol = "hocclShimVersion";
constexpr const char* kSendSymbol = "ncclSend";
constexpr const char* kShimFile = "libnccl-tuner-hoccl.so";
constexpr const char* kNetFile = "libnccl-net-hoccl.so";
constexpr const char* kCoreFile = "libhoccl.so";
constexpr const char* kMoverFile = "hoccl-mover";
// NCCL copies the variable into a buffer of this size and cuts what is longer.
constexpr std::size_t kMaxNameBytes = 254;

struct KindFacts {
  PluginKind kind;
  const char* variable;
  const char* libraryPrefix;
  const char* symbolPrefix;
  int lowest, highest;  ///< versions looked for
};
constexpr KindFacts kKinds[] = {
    {PluginKind::Preload, "LD_PRELOAD", "", "", 0, -1},
    {PluginKind::Net, "NCCL_NET_PLUGIN", "libnccl-net-", "ncclNetPlugin_v", 5, 12},
    {PluginKind::Tuner, "NCCL_TUNER_PLUGIN", "libnccl-tuner-", "ncclTunerPlugin_v", 1, 7},
    {PluginKind::Profiler, "NCCL_PROFILER_PLUGIN", "libnccl-profiler-", "ncclProfiler_v", 1, 7},
};

const KindFacts& factsOf(PluginKind kind) { return kKinds[static_cast<std::size_t>(kind)]; }

struct LoadProbe {
  bool loaded = false;
  std::string file;
  std::string error;                 ///< the loader's words, or how the child ended
  std::vector<std::string> symbols;  ///< those of the asked ones that it has
  NetPluginTrial trial;              ///< of HOCCL's own net plugin
};

bool endsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// Runs in the child. `ownOnly` counts only symbols that the library itself defines: one that a
// dependency of a preloaded library defines interposes nothing by itself.
std::string loadAndLook(const std::string& name, const std::vector<std::string>& symbols,
                        bool ownOnly) {
  Json answer;
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    answer["error"] = ::dlerror();
    return answer.dump(-1, ' ', false, Json::error_handler_t::replace);
  }
  link_map* map = nullptr;
  ::dlinfo(handle, RTLD_DI_LINKMAP, &map);
  answer["file"] = map != nullptr ? map->l_name : name;
  answer["symbols"] = Json::array();
  for (const std::string& wanted : symbols) {
    void* address = ::dlsym(handle, wanted.c_str());
    if (address == nullptr) continue;
    Dl_info info;
    const bool own = map != nullptr && ::dladdr(address, &info) != 0 &&
                     reinterpret_cast<std::uintptr_t>(info.dli_fbase) ==
                         static_cast<std::uintptr_t>(map->l_addr);
    if (own || !ownOnly) answer["symbols"].push_back(wanted);
  }
  if (endsWith(answer.value("file", ""), kNetFile)) {
    const NetPluginTrial trial = tryNetPlugin(handle);
    answer["trial"] = {{"tried", trial.tried},
                       {"devices", trial.devices},
                       {"line", trial.line},
                       {"problem", trial.problem}};
  }
  return answer.dump(-1, ' ', false, Json::error_handler_t::replace);
}

LoadProbe probeLibrary(const std::string& name, const std::vector<std::string>& symbols,
                       bool ownOnly, std::uint64_t timeoutMs) {
  const ChildResult child =
      runInChild([&] { return loadAndLook(name, symbols, ownOnly); }, timeoutMs);
  LoadProbe probe;
  const Json answer = Json::parse(child.output, nullptr, false);
  if (!child.ok || !answer.is_object()) {
    probe.error = "loading it: " + (child.problem.empty() ? "it ended the process" : child.problem);
    return probe;
  }
  probe.error = answer.value("error", "");
  probe.loaded = probe.error.empty();
  probe.file = answer.value("file", "");
  probe.symbols = answer.value("symbols", std::vector<std::string>());
  if (const Json trial = answer.value("trial", Json()); trial.is_object()) {
    probe.trial = {trial.value("tried", false), trial.value("devices", 0), trial.value("line", ""),
                   trial.value("problem", "")};
  }
  return probe;
}

bool startsWith(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

// The loader did not find `name` itself (as opposed to something that it needs).
bool isMissing(const std::string& name, const std::string& error) {
  return startsWith(error, name + ": cannot open shared object file: No such file");
}

// The loader's words, with what to do about it.
std::string explained(const std::string& name, const std::string& error) {
  constexpr std::string_view kNotOpened = ": cannot open shared object file: No such file";
  if (isMissing(name, error)) {
    return name.find('/') != std::string::npos
               ? fmt::format("{}: no such file", name)
               : fmt::format(
                     "{}: not found; put its folder into LD_LIBRARY_PATH or name its full "
                     "path",
                     name);
  }
  if (const std::size_t at = error.find(kNotOpened); at != std::string::npos) {
    return fmt::format(
        "{}: needs {}, which the loader does not find; put its folder into "
        "LD_LIBRARY_PATH",
        name, error.substr(0, at));
  }
  if (error.find("wrong ELF class") != std::string::npos) {
    return fmt::format("{} (a library for another kind of processor or word size)", error);
  }
  return startsWith(error, name) || startsWith(error, "/") ? error
                                                           : fmt::format("{}: {}", name, error);
}

std::string environmentValue(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? "" : value;
}

CompanionReport examineCore(const fs::path& folder, std::uint64_t timeoutMs) {
  CompanionReport core{"core", {}, {}};
  const std::string configured = environmentValue("HOCCL_CORE_LIB");
  const std::string path = configured.empty() ? (folder / kCoreFile).string() : configured;
  const LoadProbe probe = probeLibrary(path, {}, false, timeoutMs);
  if (probe.loaded) {
    core.file = probe.file;
  } else {
    core.problem = explained(path, probe.error);
    if (!configured.empty()) core.problem += " (HOCCL_CORE_LIB)";
  }
  return core;
}

// Empty, or why `path` cannot be run.
std::string notRunnable(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return std::strerror(errno);
  if (!S_ISREG(info.st_mode)) return "not a file";
  if (::access(path.c_str(), X_OK) != 0) return "not executable";
  return {};
}

CompanionReport examineMover(const fs::path& folder) {
  CompanionReport mover{"mover", {}, {}};
  const std::string configured = environmentValue("HOCCL_MOVER_PATH");
  if (!configured.empty()) {
    if (const std::string why = notRunnable(configured); why.empty()) {
      mover.file = configured;
    } else {
      mover.problem = fmt::format("{}: {} (HOCCL_MOVER_PATH)", configured, why);
    }
    return mover;
  }
  std::vector<std::string> tried;
  // Installed beside the library or in bin/ or libexec/; mover/ is the build tree's.
  for (const char* place : {".", "../bin", "../libexec", "../mover"}) {
    const std::string path = (folder / place / kMoverFile).lexically_normal().string();
    const std::string why = notRunnable(path);
    if (why.empty()) {
      mover.file = path;
      return mover;
    }
    tried.push_back(fmt::format("{}: {}", path, why));
  }
  mover.problem =
      fmt::format("{} not found: {}; set HOCCL_MOVER_PATH", kMoverFile, fmt::join(tried, ", "));
  return mover;
}

// Tries the names in NCCL's order; fills file and problems.
LoadProbe loadFirst(const std::vector<std::string>& names, const std::vector<std::string>& symbols,
                    bool ownOnly, std::uint64_t timeoutMs, PluginReport* report) {
  std::vector<std::string> reasons;
  for (const std::string& name : names) {
    LoadProbe probe = probeLibrary(name, symbols, ownOnly, timeoutMs);
    if (probe.loaded) {
      report->file = probe.file;
      return probe;
    }
    reasons.push_back(explained(name, probe.error));
  }
  report->problems = std::move(reasons);
  return {};
}

PluginReport examinePreload(const std::string& name, std::uint64_t timeoutMs) {
  PluginReport report;
  report.kind = PluginKind::Preload;
  report.name = name;
  const LoadProbe probe = loadFirst({name}, {kShimSymbol, kSendSymbol}, true, timeoutMs, &report);
  const auto has = [&](const char* symbol) {
    return std::find(probe.symbols.begin(), probe.symbols.end(), symbol) != probe.symbols.end();
  };
  report.steering = has(kShimSymbol);
  report.interposesSend = has(kSendSymbol);
  if (!probe.loaded) return report;
  if (!report.steering && endsWith(name, kShimFile)) {
    report.problems.push_back(
        fmt::format("{}: is not HOCCL's (it lacks {})", probe.file, kShimSymbol));
  }
  if (!report.steering) return report;
  if (!report.interposesSend) {
    report.problems.push_back(
        fmt::format("{}: does not export {}; reinstall it", probe.file, kSendSymbol));
  }
  const fs::path folder = fs::absolute(probe.file).parent_path();
  CompanionReport core = examineCore(folder, timeoutMs);
  // The core starts the mover, so it is looked for from where the core lies.
  CompanionReport mover =
      examineMover(core.file.empty() ? folder : fs::absolute(core.file).parent_path());
  report.companions = {std::move(core), std::move(mover)};
  if (environmentValue("HOCCL_STEER") == "0") {
    report.notes.push_back("HOCCL_STEER=0: steering is switched off");
  }
  return report;
}

PluginReport examineNcclPlugin(const KindFacts& kind, const std::string& name, int ncclVersion,
                               std::uint64_t timeoutMs) {
  PluginReport report;
  report.kind = kind.kind;
  report.name = name;
  if (::strcasecmp(name.c_str(), "none") == 0) {
    report.disabled = true;
    report.notes.push_back("'none': NCCL loads no such plugin");
    return report;
  }
  if (name.size() > kMaxNameBytes) {
    report.problems.push_back(
        fmt::format("the name has {} bytes; NCCL takes at most {}", name.size(), kMaxNameBytes));
    return report;
  }
  std::vector<std::string> symbols;
  for (int version = kind.lowest; version <= kind.highest; ++version) {
    symbols.push_back(fmt::format("{}{}", kind.symbolPrefix, version));
  }
  const LoadProbe probe =
      loadFirst(candidateNames(kind.kind, name), symbols, false, timeoutMs, &report);
  if (!probe.loaded) return report;
  for (const std::string& symbol : probe.symbols) {
    report.versions.push_back(std::atoi(symbol.c_str() + std::strlen(kind.symbolPrefix)));
  }
  if (report.versions.empty()) {
    report.problems.push_back(fmt::format(
        "{}: exports none of {}{} to {}{}; it is no plugin for {}", report.file, kind.symbolPrefix,
        kind.lowest, kind.symbolPrefix, kind.highest, kind.variable));
    return report;
  }
  if (probe.trial.tried) {
    report.hocclNet = true;
    if (!probe.trial.line.empty()) report.notes.push_back(probe.trial.line);
    if (!probe.trial.problem.empty()) {
      report.problems.push_back(
          fmt::format("{}: NCCL would go on without it: {}", report.file, probe.trial.problem));
    }
  }
  if (ncclVersion == 0) return report;
  const VersionRange range = acceptedVersions(kind.kind, ncclVersion);
  const bool accepted =
      std::any_of(report.versions.begin(), report.versions.end(),
                  [&](int version) { return version >= range.lowest && version <= range.highest; });
  if (!accepted) {
    report.problems.push_back(
        range.highest == 0
            ? fmt::format("NCCL {} knows no {}", ncclVersionText(ncclVersion), kind.variable)
            : fmt::format("{}: NCCL {} takes {}{} to {}{}, this has v{}", report.file,
                          ncclVersionText(ncclVersion), kind.symbolPrefix, range.lowest,
                          kind.symbolPrefix, range.highest, fmt::join(report.versions, ", v")));
  }
  return report;
}

std::vector<std::string> split(const std::string& text, const char* separators) {
  std::vector<std::string> parts;
  std::size_t at = 0;
  while ((at = text.find_first_not_of(separators, at)) != std::string::npos) {
    const std::size_t end = text.find_first_of(separators, at);
    parts.push_back(text.substr(at, end - at));
    at = end == std::string::npos ? text.size() : end;
  }
  return parts;
}

// Which of the preloaded libraries a program's ncclSend comes from.
void judgePreloadOrder(PluginsReport* report) {
  PluginReport* steering = nullptr;
  const PluginReport* first = nullptr;
  for (PluginReport& plugin : report->plugins) {
    if (plugin.kind != PluginKind::Preload) continue;
    if (first == nullptr && plugin.interposesSend) first = &plugin;
    if (steering == nullptr && plugin.steering) steering = &plugin;
  }
  if (steering == nullptr) return;
  if (first != nullptr && first != steering) {
    steering->problems.push_back(
        fmt::format("{} comes before it in LD_PRELOAD and defines {}, too; put HOCCL's first",
                    first->file, kSendSymbol));
  }
  report->steered = first == steering && steering->fits() && environmentValue("HOCCL_STEER") != "0";
}

std::string verdictOf(const PluginsReport& report) {
  std::size_t bad = 0;
  for (const PluginReport& plugin : report.plugins) bad += plugin.fits() ? 0 : 1;
  if (report.plugins.empty()) {
    return "nothing is named in LD_PRELOAD or NCCL_*_PLUGIN: a job in this environment is plain "
           "NCCL";
  }
  std::string steering =
      report.steered ? "HOCCL steers send and receive" : "HOCCL does not steer here";
  // NCCL takes the first of its net plugins that works.
  const auto net = std::find_if(report.plugins.begin(), report.plugins.end(), [](const auto& p) {
    return p.kind == PluginKind::Net && !p.file.empty();
  });
  if (net != report.plugins.end() && net->hocclNet && net->fits()) {
    steering += "; NCCL's own traffic goes over HOCCL's net plugin";
  }
  if (bad > 0) {
    return fmt::format("{} of {} named do not load or do not fit; {}", bad, report.plugins.size(),
                       steering);
  }
  return fmt::format("everything named loads and fits; {}", steering);
}

}  // namespace

const char* pluginVariable(PluginKind kind) { return factsOf(kind).variable; }

std::vector<std::string> candidateNames(PluginKind kind, const std::string& name) {
  std::vector<std::string> names{name};
  const bool asIs = kind == PluginKind::Preload || name.find('/') != std::string::npos ||
                    (startsWith(name, "lib") && endsWith(name, ".so"));
  if (!asIs) names.push_back(fmt::format("{}{}.so", factsOf(kind).libraryPrefix, name));
  return names;
}

bool PluginReport::fits() const {
  return problems.empty() &&
         std::all_of(companions.begin(), companions.end(),
                     [](const CompanionReport& companion) { return companion.problem.empty(); });
}

VersionRange acceptedVersions(PluginKind kind, int ncclVersion) {
  // From which release on which versions are looked up, as read in NCCL's sources and release
  // notes.
  struct Row {
    int since;
    VersionRange range;
  };
  static constexpr Row kNet[] = {{23003, {6, 12}}, {22803, {6, 11}}, {22602, {6, 10}},
                                 {22403, {5, 9}},  {22005, {5, 8}},  {21904, {5, 7}}};
  static constexpr Row kTuner[] = {{23206, {2, 7}}, {23003, {2, 6}}, {22803, {2, 5}},
                                   {22403, {2, 4}}, {22203, {2, 3}}, {22105, {2, 2}},
                                   {21904, {1, 1}}};
  static constexpr Row kProfiler[] = {{23102, {1, 7}}, {22902, {1, 6}}, {22803, {1, 5}},
                                      {22703, {1, 4}}, {22602, {1, 3}}, {22403, {1, 2}},
                                      {22304, {1, 1}}};
  const auto find = [&](const auto& rows) {
    for (const Row& row : rows) {
      if (ncclVersion >= row.since) return row.range;
    }
    return VersionRange{};
  };
  switch (kind) {
    case PluginKind::Net:
      return find(kNet);
    case PluginKind::Tuner:
      return find(kTuner);
    case PluginKind::Profiler:
      return find(kProfiler);
    case PluginKind::Preload:
      break;
  }
  return {};
}

PluginsReport examinePlugins(int ncclVersion, std::uint64_t timeoutMs) {
  PluginsReport report;
  for (const KindFacts& kind : kKinds) {
    const std::string value = environmentValue(kind.variable);
    // The loader takes colons and spaces between preloaded names, NCCL a comma between net plugins.
    std::vector<std::string> names;
    if (kind.kind == PluginKind::Preload) {
      names = split(value, ": ");
    } else if (kind.kind == PluginKind::Net) {
      names = split(value, ",");
    } else if (!value.empty()) {
      names = {value};
    }
    if (names.empty()) report.unset.push_back(kind.variable);
    for (const std::string& name : names) {
      report.plugins.push_back(kind.kind == PluginKind::Preload
                                   ? examinePreload(name, timeoutMs)
                                   : examineNcclPlugin(kind, name, ncclVersion, timeoutMs));
    }
  }
  judgePreloadOrder(&report);
  report.ok = !report.plugins.empty() &&
              std::all_of(report.plugins.begin(), report.plugins.end(),
                          [](const PluginReport& plugin) { return plugin.fits(); });
  report.verdict = verdictOf(report);
  return report;
}

}  // namespace hoccl
