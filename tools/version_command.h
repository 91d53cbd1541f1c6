#pragma once

namespace CLI {
class App;
}

namespace hoccl {

/// Adds `hoccl version`: this build, and which libcuda and NCCL would be loaded here.
void addVersionCommand(CLI::App& app, int* exitCode);

}  // namespace hoccl
