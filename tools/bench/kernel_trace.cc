#include "tools/bench/kernel_trace.h"

#include <glob.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

namespace hoccl::bench {
namespace {

using Json = nlohmann::json;

// A larger memset is a kernel, a smaller one is not.
constexpr std::uint64_t kLargeMemsetBytes = 64 << 10;

std::string withPid(const std::string& pattern, const std::string& pid) {
  std::string path = pattern;
  for (std::size_t at = path.find("%p"); at != std::string::npos;
       at = path.find("%p", at + pid.size()))
    path.replace(at, 2, pid);
  return path;
}

bool needsSm(const std::string& kind, std::uint64_t bytes) {
  return kind == "kernel" || kind == "DtoD" || (kind == "memset" && bytes > kLargeMemsetBytes);
}

/// One process's file: {"flushed_ns": n, "lost": n, "error": text, "events": [[kind, start, end,
/// bytes, name], …]}. False where it does not cover the window.
bool addFile(const Json& file, const TimeWindow& window, std::uint64_t* sum) {
  if (!file.is_object() || file.value("flushed_ns", std::uint64_t{0}) < window.endNs ||
      file.value("lost", std::uint64_t{0}) != 0 || !file.value("error", std::string()).empty())
    return false;
  for (const Json& event : file.at("events")) {
    const std::uint64_t start = event.at(1).get<std::uint64_t>();
    if (start >= window.beginNs && start < window.endNs &&
        needsSm(event.at(0).get<std::string>(), event.at(3).get<std::uint64_t>()))
      ++*sum;
  }
  return true;
}

}  // namespace

std::string kernelTracePattern() {
  if (const char* pattern = std::getenv("KERNELTRACE_OUT"); pattern && *pattern) return pattern;
  if (const char* folder = std::getenv("GPU_CHECK_TRACE_DIR"); folder && *folder)
    return std::string(folder) + "/%p.json";
  return "";
}

std::vector<std::optional<std::uint64_t>> countTracedKernels(
    const std::string& pattern, const std::vector<pid_t>& ranks,
    const std::vector<TimeWindow>& windows) {
  std::vector<std::optional<std::uint64_t>> counts(windows.size());
  if (pattern.find("%p") == std::string::npos) return counts;
  for (const pid_t pid : ranks)
    if (!std::ifstream(withPid(pattern, std::to_string(pid)))) return counts;
  glob_t found{};
  std::vector<Json> files;
  if (::glob(withPid(pattern, "*").c_str(), 0, nullptr, &found) == 0)
    for (std::size_t i = 0; i < found.gl_pathc; ++i) {
      std::ifstream file(found.gl_pathv[i]);
      files.push_back(Json::parse(file, nullptr, false));
    }
  ::globfree(&found);
  for (std::size_t i = 0; i < windows.size(); ++i) {
    std::uint64_t sum = 0;
    bool known = true;
    for (const Json& file : files) {
      // A process of an earlier set that had ended before this window began has nothing to add.
      if (file.is_object() && file.value("flushed_ns", std::uint64_t{0}) < windows[i].beginNs &&
          file.contains("pid") &&
          std::find(ranks.begin(), ranks.end(), file["pid"].get<pid_t>()) == ranks.end())
        continue;
      try {
        known = addFile(file, windows[i], &sum) && known;
      } catch (const Json::exception&) {
        known = false;
      }
    }
    if (known) counts[i] = sum;
  }
  return counts;
}

}  // namespace hoccl::bench
