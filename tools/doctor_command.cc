#include "tools/doctor_command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "common/base/config.h"

namespace hoccl {
namespace {

using Json = nlohmann::ordered_json;

std::string memlockLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : formatBytes(limit.rlim_cur);
}

std::string symbolsText(const PluginReport& plugin) {
  if (plugin.kind != PluginKind::Preload) {
    return plugin.versions.empty() ? ""
                                   : fmt::format("plugin v{}", fmt::join(plugin.versions, ", v"));
  }
  if (plugin.steering)
    return plugin.interposesSend ? "HOCCL's steering, ncclSend" : "HOCCL's steering";
  return plugin.interposesSend ? "ncclSend (not HOCCL's)" : "nothing of NCCL";
}

void renderPlugin(const PluginReport& plugin, std::string* text) {
  const auto line = [&](const char* label, const std::string& value) {
    if (!value.empty()) *text += fmt::format("  {:<9}{}\n", label, value);
  };
  *text += fmt::format("{} = {}\n", pluginVariable(plugin.kind), plugin.name);
  line("file", plugin.file);
  if (!plugin.file.empty()) line("exports", symbolsText(plugin));
  for (const CompanionReport& companion : plugin.companions) {
    line(companion.what.c_str(), companion.file);
    if (!companion.problem.empty()) line(companion.what.c_str(), "PROBLEM " + companion.problem);
  }
  for (const std::string& problem : plugin.problems) line("PROBLEM", problem);
  for (const std::string& note : plugin.notes) line("note", note);
}

std::string libraryText(const LibraryFacts& library, const std::string& version) {
  if (!library.loads) return "does not load: " + library.problem;
  return fmt::format("{} ({})", library.version == 0 ? "version unknown" : version, library.file);
}

Json libraryJson(const LibraryFacts& library, const std::string& version) {
  return {{"loads", library.loads},
          {"file", library.file},
          {"version", library.version == 0 ? Json() : Json(version)},
          {"problem", library.problem}};
}

Json pluginJson(const PluginReport& plugin) {
  Json companions = Json::array();
  for (const CompanionReport& companion : plugin.companions) {
    companions.push_back(
        {{"what", companion.what}, {"file", companion.file}, {"problem", companion.problem}});
  }
  return {{"variable", pluginVariable(plugin.kind)},
          {"name", plugin.name},
          {"file", plugin.file},
          {"fits", plugin.fits()},
          {"versions", plugin.versions},
          {"steering", plugin.steering},
          {"nccl_send", plugin.interposesSend},
          {"companions", companions},
          {"problems", plugin.problems},
          {"notes", plugin.notes}};
}

// The plain doctor's verdict: the plugins', unless nothing is named, and the machine's.
void judge(DoctorReport* report) {
  report->ok = report->plugins.ok;
  report->verdict = report->plugins.verdict;
  if (report->pluginsOnly) return;
  const bool machineOk = report->driver.gpuProblem.empty() && report->configProblems.empty();
  // A machine can be looked over before a job's environment is set up.
  report->ok = machineOk && (report->plugins.ok || report->plugins.plugins.empty());
  if (!report->driver.gpuProblem.empty()) report->verdict += "; no usable GPU";
  if (!report->configProblems.empty()) report->verdict += "; the configuration is wrong";
}

}  // namespace

DoctorReport examine(bool pluginsOnly) {
  DoctorReport report;
  report.pluginsOnly = pluginsOnly;
  report.nccl = probeNccl();
  report.plugins = examinePlugins(report.nccl.version);
  if (!pluginsOnly) {
    report.driver = probeDriver(true);
    report.memlock = memlockLimit();
    Config scratch;
    for (const std::string& problem : Config::problemsOfEnvironment(&scratch)) {
      report.configProblems += problem + "\n";
    }
  }
  judge(&report);
  return report;
}

std::string renderText(const DoctorReport& report) {
  std::string text;
  for (const PluginReport& plugin : report.plugins.plugins) renderPlugin(plugin, &text);
  for (const std::string& variable : report.plugins.unset) text += variable + " is not set\n";
  text += fmt::format("{:<15}{}\n", "NCCL",
                      libraryText(report.nccl, ncclVersionText(report.nccl.version)));
  if (!report.pluginsOnly) {
    text += fmt::format("{:<15}{}\n", "driver",
                        libraryText(report.driver.library,
                                    "CUDA " + cudaVersionText(report.driver.library.version)));
    text += report.driver.gpuProblem.empty()
                ? fmt::format("{:<15}{}: {}\n", "GPUs", report.driver.gpus.size(),
                              fmt::join(report.driver.gpus, ", "))
                : fmt::format("{:<15}PROBLEM {}\n", "GPUs", report.driver.gpuProblem);
    text += fmt::format("{:<15}{}\n", "memlock limit", report.memlock);
    if (report.configProblems.empty()) {
      text += fmt::format("{:<15}every HOCCL_* variable is right\n", "configuration");
    } else {
      std::size_t at = 0;
      while (at < report.configProblems.size()) {
        const std::size_t end = report.configProblems.find('\n', at);
        text += fmt::format("{:<15}PROBLEM {}\n", "configuration",
                            report.configProblems.substr(at, end - at));
        at = end + 1;
      }
    }
  }
  return text + "verdict: " + report.verdict + "\n";
}

std::string renderJson(const DoctorReport& report) {
  Json json;
  json["ok"] = report.ok;
  json["verdict"] = report.verdict;
  json["steered"] = report.plugins.steered;
  json["plugins"] = Json::array();
  for (const PluginReport& plugin : report.plugins.plugins) {
    json["plugins"].push_back(pluginJson(plugin));
  }
  json["unset"] = report.plugins.unset;
  json["nccl"] = libraryJson(report.nccl, ncclVersionText(report.nccl.version));
  if (!report.pluginsOnly) {
    json["driver"] =
        libraryJson(report.driver.library, cudaVersionText(report.driver.library.version));
    json["gpus"] = report.driver.gpus;
    json["gpu_problem"] = report.driver.gpuProblem;
    json["memlock"] = report.memlock;
    json["config_problems"] = report.configProblems;
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

void addDoctorCommand(CLI::App& app, int* exitCode) {
  CLI::App* command = app.add_subcommand(
      "doctor", "whether HOCCL would be in force in this environment, or why not");
  auto pluginsOnly = std::make_shared<bool>(false);
  auto json = std::make_shared<bool>(false);
  command->add_flag("--plugins", *pluginsOnly,
                    "only what LD_PRELOAD and the NCCL_*_PLUGIN variables name");
  command->add_flag("--json", *json, "print JSON");
  command->callback([pluginsOnly, json, exitCode] {
    const DoctorReport report = examine(*pluginsOnly);
    std::fputs((*json ? renderJson(report) : renderText(report)).c_str(), stdout);
    *exitCode = report.ok ? 0 : 1;
  });
}

}  // namespace hoccl
