#include "tools/version_command.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "build_info.h"
#include "common/base/version.h"
#include "tools/driver_probe.h"

namespace hoccl {
namespace {

void printLibrary(const char* label, const LibraryFacts& library, const std::string& version) {
  if (library.loads) {
    fmt::print("{:<10}{} ({})\n", label, library.version == 0 ? "version unknown" : version,
               library.file);
  } else {
    fmt::print("{:<10}does not load: {}\n", label, library.problem);
  }
}

void printVersion() {
  fmt::print("{:<10}{}\n", "hoccl", versionText());
  if (*HOCCL_GIT_COMMIT != '\0') fmt::print("{:<10}{}\n", "commit", HOCCL_GIT_COMMIT);
#ifdef __clang__
  fmt::print("{:<10}{}\n", "compiler", __VERSION__);
#else
  fmt::print("{:<10}GCC {}\n", "compiler", __VERSION__);
#endif
  const DriverFacts driver = probeDriver(false);
  printLibrary("libcuda", driver.library, "CUDA " + cudaVersionText(driver.library.version));
  const LibraryFacts nccl = probeNccl();
  printLibrary("libnccl", nccl, "NCCL " + ncclVersionText(nccl.version));
}

}  // namespace

void addVersionCommand(CLI::App& app, int* exitCode) {
  CLI::App* command =
      app.add_subcommand("version", "this build, and which libcuda and NCCL would be loaded here");
  command->callback([exitCode] {
    printVersion();
    *exitCode = 0;
  });
}

}  // namespace hoccl
