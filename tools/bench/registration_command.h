#pragma once

#include <memory>
#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace hoccl::bench {

/// `hoccl bench regmr` as typed.
struct RegistrationCommandLine {
  std::string bytes, jsonFile;
  std::optional<long long> count;
};

/// Adds `regmr` to the bench command; `line` is filled when it is parsed.
CLI::App* addRegistrationCommand(CLI::App& bench,
                                 const std::shared_ptr<RegistrationCommandLine>& line);

/// Times the net plugin's registration of device memory (HOCCL_NET_STAGING=1), called as NCCL calls
/// it: of allocations it has not seen, and of the same ones once more. One after the other, on the
/// first GPU. The exit status: 0, 1 for a failure, 2 for usage.
int runRegistrationBench(const RegistrationCommandLine& line, const std::string& command);

}  // namespace hoccl::bench
