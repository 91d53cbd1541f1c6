#pragma once

#include <string>

namespace CLI {
class App;
}

namespace hoccl {

/// Adds `hoccl config [--json]`: every variable, its value in force and where it came from. Exit
/// status 1, with one line for each bad or unknown variable on standard error, where there is one.
void addConfigCommand(CLI::App& app, int* exitCode);

/// What the command prints; `problems` gets one line a bad variable.
std::string renderConfig(bool json, std::string* problems);

}  // namespace hoccl
