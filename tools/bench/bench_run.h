#pragma once

#include <string>

#include "tools/bench/options.h"

namespace hoccl::bench {

/// One run of `hoccl bench`: measures, prints, compares. Returns the exit status (see
/// bench_command.h). `command` is the command line, for the JSON header.
int runBench(const CommandLine& line, const std::string& command);

}  // namespace hoccl::bench
