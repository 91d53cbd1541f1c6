#pragma once

namespace CLI {
class App;
}

namespace hoccl {

/// Adds `bench` (with a subcommand for each operation) and the hidden `bench-rank`, which the bench
/// starts for its rank processes, to the program. When one of them is parsed it runs at once and
/// leaves the exit status in `exitCode`: 0 fine, 1 wrong bytes or a failed rank, 2 usage or
/// configuration. Syntax errors stay CLI11's own exceptions; the program turns those into 2.
void addBenchCommand(CLI::App& app, int* exitCode);

}  // namespace hoccl
