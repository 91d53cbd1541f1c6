#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/child_probe.h"

/// What NCCL and the loader would make of LD_PRELOAD and the NCCL_*_PLUGIN variables. Everything is
/// loaded in forked children with RTLD_NOW | RTLD_LOCAL, as NCCL does.
namespace hoccl {

enum class PluginKind { Preload, Net, Tuner, Profiler };

/// "LD_PRELOAD", "NCCL_NET_PLUGIN", …
const char* pluginVariable(PluginKind kind);

/// The names that are tried, in order: 'foo' itself, then libnccl-net-foo.so, unless it contains
/// '/' or is lib*.so. A preloaded name is tried as it is.
std::vector<std::string> candidateNames(PluginKind kind, const std::string& name);

/// A file that HOCCL's steering needs beside it.
struct CompanionReport {
  std::string what;     ///< "core", "mover"
  std::string file;     ///< empty where it was not found
  std::string problem;  ///< empty where it is fit
};

struct PluginReport {
  PluginKind kind = PluginKind::Preload;
  std::string name;             ///< as the variable names it
  bool disabled = false;        ///< 'none': nothing is loaded, by intent
  std::string file;             ///< what would be loaded; empty where nothing would
  std::vector<int> versions;    ///< N of the ncclNetPlugin_vN … it exports
  bool steering = false;        ///< a preloaded library that exports hocclShimVersion
  bool interposesSend = false;  ///< it defines ncclSend
  bool hocclNet = false;        ///< HOCCL's net plugin, whose init was tried
  std::vector<CompanionReport> companions;
  std::vector<std::string> problems;  ///< why it does not load, or does not fit
  std::vector<std::string> notes;

  [[nodiscard]] bool fits() const;
};

struct PluginsReport {
  std::vector<PluginReport> plugins;  ///< everything named, in the order of the loads
  std::vector<std::string> unset;     ///< variables that name nothing
  bool steered = false;               ///< HOCCL's ncclSend is the one a program gets
  bool ok = false;                    ///< something is named, and all of it loads and fits
  std::string verdict;
};

/// Examines this process's environment. `ncclVersion` (22809 for 2.28.9; 0 unknown) decides which
/// plugin versions fit.
PluginsReport examinePlugins(int ncclVersion, std::uint64_t timeoutMs = kProbeTimeoutMs);

/// The plugin versions NCCL accepts: lowest and highest, {0, 0} for none (NCCL-ABI by release).
struct VersionRange {
  int lowest = 0;
  int highest = 0;
};
VersionRange acceptedVersions(PluginKind kind, int ncclVersion);

}  // namespace hoccl
