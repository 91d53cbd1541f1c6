#pragma once

#include <string>

#include "tools/bench/options.h"

namespace hoccl::bench {

/// `hoccl bench sendrecv`: measures, prints, compares. Returns the exit status (see
/// bench_command.h). `command` is the command line, for the JSON header.
int runSendRecv(const CommandLine& line, const std::string& command);

}  // namespace hoccl::bench
