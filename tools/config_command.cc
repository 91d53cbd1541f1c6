#include "tools/config_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "common/base/config.h"

namespace hoccl {
namespace {

// Bad variables keep their defaults here; the rest of the table still tells the truth.
Config configInForce(std::string* problems) {
  Config config = Config::defaults();
  for (const std::string& problem : Config::problemsOfEnvironment(&config)) {
    *problems += problem + "\n";
  }
  if (problems->empty()) return config;
  for (const ConfigRow& row : configRows()) {
    if (const char* value = std::getenv(row.variable)) (void)config.set(row.variable, value);
  }
  return config;
}

const char* kindName(ConfigKind kind) {
  switch (kind) {
    case ConfigKind::Bytes:
      return "bytes";
    case ConfigKind::Count:
      return "count";
    case ConfigKind::Micros:
      return "microseconds";
    case ConfigKind::Millis:
      return "milliseconds";
    case ConfigKind::Flag:
      return "flag";
    case ConfigKind::Text:
      return "text";
    case ConfigKind::Choice:
      return "choice";
  }
  return "";
}

// Set and accepted.
bool fromEnvironment(const ConfigRow& row) {
  const char* value = std::getenv(row.variable);
  Config scratch;
  return value != nullptr && scratch.set(row.variable, value).ok();
}

}  // namespace

std::string renderConfig(bool json, std::string* problems) {
  const Config config = configInForce(problems);
  if (json) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const ConfigRow& row : configRows()) {
      rows.push_back({{"variable", row.variable},
                      {"value", config.get(row.variable)},
                      {"source", fromEnvironment(row) ? "environment" : "default"},
                      {"default", row.defaultText},
                      {"kind", kindName(row.kind)},
                      {"allowed", allowedText(row)},
                      {"policy", row.policy},
                      {"help", row.help}});
    }
    return rows.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  }
  std::size_t nameWidth = 0, valueWidth = 5, rangeWidth = 0;
  for (const ConfigRow& row : configRows()) {
    nameWidth = std::max(nameWidth, std::string_view(row.variable).size());
    valueWidth = std::max(valueWidth, config.get(row.variable).size());
    rangeWidth = std::max(rangeWidth, allowedText(row).size());
  }
  std::string text = fmt::format("{:<{}}  {:<{}}  {:<11}  {:<{}}  {}\n", "variable", nameWidth,
                                 "value", valueWidth, "from", "allowed", rangeWidth,
                                 "meaning (*: must be equal on all ranks)");
  for (const ConfigRow& row : configRows()) {
    const std::string value = config.get(row.variable);
    text += fmt::format("{:<{}}  {:<{}}  {:<11}  {:<{}}  {}{}\n", row.variable, nameWidth,
                        value.empty() ? "-" : value, valueWidth,
                        fromEnvironment(row) ? "environment" : "default", allowedText(row),
                        rangeWidth, row.policy ? "* " : "", row.help);
  }
  return text;
}

void addConfigCommand(CLI::App& app, int* exitCode) {
  CLI::App* command =
      app.add_subcommand("config", "every HOCCL_* variable, its value and where that came from");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "print JSON");
  command->callback([json, exitCode] {
    std::string problems;
    std::fputs(renderConfig(*json, &problems).c_str(), stdout);
    std::fputs(problems.c_str(), stderr);
    *exitCode = problems.empty() ? 0 : 1;
  });
}

}  // namespace hoccl
