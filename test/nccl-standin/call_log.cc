#include "call_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "comm.h"
#include "group.h"

namespace standin {
namespace {

/// Kept in memory; the older half goes when it is full.
constexpr std::size_t kMaxLog = 16 << 20;

struct Log {
  std::mutex mutex;
  std::string lines;
  int fd = -1;
  pid_t process = 0;

  /// Opened by each process for itself, so that children of fork write files of their own.
  void openFile() {
    if (process == getpid()) return;
    process = getpid();
    if (fd >= 0) close(fd);
    fd = -1;
    const char* variable = std::getenv("NCCLSTANDIN_LOG");
    if (!variable || !variable[0]) return;
    std::string path = variable;
    for (std::size_t at; (at = path.find("%p")) != std::string::npos;) {
      path.replace(at, 2, std::to_string(process));
    }
    fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0)
      fmt::print(stderr, "nccl stand-in: NCCLSTANDIN_LOG={}: {}\n", path, strerror(errno));
  }
};

/// Never destroyed: calls may come while the process exits.
Log& log() {
  static Log* const made = new Log;
  return *made;
}

}  // namespace

void record(const char* function, const Call& call) {
  const std::string line = fmt::format(
      "{} comm={} rank={} peer={} bytes={} dtype={} stream={} depth={}\n", function,
      call.comm ? static_cast<long>(call.comm->serial) : -1, call.comm ? call.comm->rank : -1,
      call.peer, call.bytes, call.dtype, fmt::ptr(call.stream), groupDepth());
  Log& all = log();
  const std::lock_guard lock(all.mutex);
  all.openFile();
  if (all.lines.size() + line.size() > kMaxLog) {
    all.lines.erase(0, all.lines.find('\n', all.lines.size() / 2) + 1);
  }
  all.lines += line;
  if (all.fd >= 0) [[maybe_unused]]
    const ssize_t n = write(all.fd, line.data(), line.size());
}

}  // namespace standin

extern "C" {

/// The lines recorded by this process so far, cut to n - 1 characters and ended by a zero; their
/// full length is returned (call with n = 0 to learn it).
std::size_t ncclStandinLog(char* out, std::size_t n) {
  auto& all = standin::log();
  const std::lock_guard lock(all.mutex);
  if (n > 0) {
    const std::size_t length = std::min(all.lines.size(), n - 1);
    std::memcpy(out, all.lines.data(), length);
    out[length] = '\0';
  }
  return all.lines.size();
}

/// Forgets what was recorded.
void ncclStandinLogClear() {
  auto& all = standin::log();
  const std::lock_guard lock(all.mutex);
  all.lines.clear();
}
}
