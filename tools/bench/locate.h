#pragma once

#include <string>
#include <vector>

#include "common/base/status.h"

namespace hoccl::bench {

/// Where the project's parts lie beside the running program, in a build tree
/// (tools/hoccl, plugin-tuner/…, test/emulator/…) and installed (bin/hoccl, lib/…).
class Locations {
 public:
  /// `program`: path of the running hoccl executable.
  explicit Locations(std::string program) : program_(std::move(program)) {}
  /// From /proc/self/exe.
  static Status ofThisProgram(Locations* out);

  [[nodiscard]] const std::string& program() const { return program_; }
  /// The preloaded steering library. Error: lists where it was looked for.
  Status shim(std::string* path) const;
  /// The net plugin. Error: the same.
  Status netPlugin(std::string* path) const;
  /// Folders with the emulated libcuda.so.1 and the stand-in libnccl.so.2, "a:b" for
  /// LD_LIBRARY_PATH.
  Status emulatorPath(std::string* folders) const;

 private:
  Status library(const char* what, const char* file, const char* builtIn, std::string* path) const;

  std::string program_;
};

/// What to dlopen for NCCL, in this order: the value of HOCCL_NCCL_LIB alone where given, else
/// "libnccl.so.2" (the loader's search path), then those of the Python installations in
/// $VIRTUAL_ENV, $CONDA_PREFIX and beside the python3 of $PATH. `places` says where was looked, for
/// an error.
std::vector<std::string> ncclCandidates(const std::string& configured, std::string* places);

}  // namespace hoccl::bench
