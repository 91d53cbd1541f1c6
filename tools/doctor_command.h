#pragma once

#include <string>

#include "tools/driver_probe.h"
#include "tools/plugin_probe.h"

namespace CLI {
class App;
}

namespace hoccl {

/// What `hoccl doctor` found.
struct DoctorReport {
  bool pluginsOnly = false;
  LibraryFacts nccl;  ///< decides which plugin versions fit
  PluginsReport plugins;
  DriverFacts driver;          ///< the rest: not with --plugins
  std::string memlock;         ///< RLIMIT_MEMLOCK: "unlimited", "8MiB"
  std::string configProblems;  ///< a line each; empty when the configuration is right
  bool ok = false;
  std::string verdict;
};

DoctorReport examine(bool pluginsOnly);
std::string renderText(const DoctorReport& report);
std::string renderJson(const DoctorReport& report);

/// Adds `hoccl doctor [--plugins] [--json]`: what of HOCCL would be in force in this environment.
/// Exit status 0 only when everything named loads and fits (and, without --plugins, a GPU is found
/// and the configuration is right), else 1.
void addDoctorCommand(CLI::App& app, int* exitCode);

}  // namespace hoccl
