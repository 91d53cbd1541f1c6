#include "tools/bench/locate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <glob.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <vector>

namespace hoccl::bench {
namespace {

namespace fs = std::filesystem;

bool readable(const std::string& path) { return ::access(path.c_str(), R_OK) == 0; }

Status firstExisting(const std::string& program, const char* what, const char* file,
                     const std::vector<std::string>& folders, std::string* folder) {
  std::vector<std::string> tried;
  const fs::path base = fs::path(program).parent_path();
  for (const std::string& relative : folders) {
    const std::string candidate = (base / relative / file).lexically_normal().string();
    if (readable(candidate)) {
      *folder = fs::path(candidate).parent_path().string();
      return {};
    }
    tried.push_back(candidate);
  }
  return Status::error(Code::System,
                       fmt::format("{} not found; looked for {}", what, fmt::join(tried, ", ")));
}

std::vector<std::string> globbed(const std::string& pattern) {
  std::vector<std::string> paths;
  glob_t found{};
  if (::glob(pattern.c_str(), 0, nullptr, &found) == 0)
    for (std::size_t i = 0; i < found.gl_pathc; ++i) paths.emplace_back(found.gl_pathv[i]);
  ::globfree(&found);
  return paths;
}

/// Installation prefixes that may hold site-packages, the likeliest first.
std::vector<std::string> pythonPrefixes() {
  std::vector<std::string> prefixes;
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"})
    if (const char* value = std::getenv(variable)) prefixes.emplace_back(value);
  const char* path = std::getenv("PATH");
  std::string rest = path ? path : "";
  while (!rest.empty()) {
    const std::size_t colon = rest.find(':');
    const std::string folder = rest.substr(0, colon);
    rest = colon == std::string::npos ? "" : rest.substr(colon + 1);
    const fs::path python = fs::path(folder) / "python3";
    std::error_code ignored;
    if (folder.empty() || !fs::exists(python, ignored)) continue;
    // A virtual environment's python3 is a link: its own prefix first, then the one it points into.
    prefixes.push_back(fs::path(folder).parent_path().string());
    const fs::path real = fs::canonical(python, ignored);
    if (!ignored) prefixes.push_back(real.parent_path().parent_path().string());
  }
  return prefixes;
}

}  // namespace

Status Locations::ofThisProgram(Locations* out) {
  char buffer[PATH_MAX];
  const ssize_t length = ::readlink("/proc/self/exe", buffer, sizeof buffer);
  if (length <= 0) return Status::fromErrno("readlink /proc/self/exe", errno);
  *out = Locations(std::string(buffer, static_cast<std::size_t>(length)));
  return {};
}

Status Locations::shim(std::string* path) const {
  return library("the steering library", "libnccl-tuner-hoccl.so", "../plugin-tuner", path);
}

Status Locations::netPlugin(std::string* path) const {
  return library("the net plugin", "libnccl-net-hoccl.so", "../plugin-net", path);
}

Status Locations::library(const char* what, const char* file, const char* builtIn,
                          std::string* path) const {
  std::string folder;
  Status status = firstExisting(program_, what, file,
                                {builtIn, "../" HOCCL_LIBDIR, "../lib", "../lib64"}, &folder);
  if (status) *path = folder + "/" + file;
  return status;
}

Status Locations::emulatorPath(std::string* folders) const {
  std::string driver, nccl;
  Status status = firstExisting(
      program_, "the emulated driver", "libcuda.so.1",
      {"../test/emulator", "../" HOCCL_LIBDIR "/hoccl/emulator", "../lib/hoccl/emulator"}, &driver);
  if (!status) return status;
  status = firstExisting(
      program_, "the stand-in NCCL", "libnccl.so.2",
      {"../test/nccl-standin", "../" HOCCL_LIBDIR "/hoccl/emulator", "../lib/hoccl/emulator"},
      &nccl);
  if (!status) return status;
  *folders = driver == nccl ? driver : driver + ":" + nccl;
  return {};
}

std::vector<std::string> ncclCandidates(const std::string& configured, std::string* places) {
  if (!configured.empty()) {
    *places = configured + " (HOCCL_NCCL_LIB)";
    return {configured};
  }
  std::vector<std::string> candidates{"libnccl.so.2"};
  std::vector<std::string> looked{"the loader's search path"};
  for (const std::string& prefix : pythonPrefixes()) {
    looked.push_back(prefix + "/lib/python3*/{site,dist}-packages/nvidia/nccl/lib");
    for (const char* packages : {"lib/python3*/site-packages", "lib/python3*/dist-packages",
                                 "local/lib/python3*/dist-packages", "lib/python3/dist-packages"})
      for (std::string& found :
           globbed(fmt::format("{}/{}/nvidia/nccl/lib/libnccl.so.2", prefix, packages)))
        candidates.push_back(std::move(found));
  }
  *places = fmt::format("{}", fmt::join(looked, ", "));
  return candidates;
}

}  // namespace hoccl::bench
