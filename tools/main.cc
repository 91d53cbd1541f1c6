// The command-line program `hoccl`. Exit status: 0 fine, 1 the command found something wrong,
// 2 usage or configuration.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "common/base/version.h"
#include "tools/config_command.h"
#include "tools/doctor_command.h"
#include "tools/version_command.h"
#ifdef HOCCL_HAVE_BENCH
#include "tools/bench/bench_command.h"
#endif

int main(int argc, char** argv) {
  constexpr int kUsageError = 2;
  int exitCode = 0;
  try {
    CLI::App app("HOCCL moves the data of NCCL operations off the GPU's SMs", "hoccl");
    app.set_version_flag("--version", hoccl::versionText());
    app.require_subcommand(1);
#ifdef HOCCL_HAVE_BENCH
    hoccl::addBenchCommand(app, &exitCode);
#endif
    hoccl::addDoctorCommand(app, &exitCode);
    hoccl::addConfigCommand(app, &exitCode);
    hoccl::addVersionCommand(app, &exitCode);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return app.exit(error) == 0 ? 0 : kUsageError;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hoccl: %s\n", error.what());
    return 1;
  }
  return exitCode;
}
