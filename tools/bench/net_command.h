#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace hoccl::bench {

/// `hoccl bench net` as typed.
struct NetCommandLine {
  std::string minBytes, maxBytes, address, jsonFile;
  std::vector<std::string> over, figures;
  std::optional<long long> factor, batches, threads, sockets;
};

/// Adds `net` to the bench command; `line` is filled when it is parsed.
CLI::App* addNetCommand(CLI::App& bench, const std::shared_ptr<NetCommandLine>& line);

/// Measures the transports between two processes that it starts itself, and bare sockets beside
/// them. The exit status: 0, 1 for a failure, 2 for usage.
int runNetBench(const NetCommandLine& line, const std::string& command);

}  // namespace hoccl::bench
