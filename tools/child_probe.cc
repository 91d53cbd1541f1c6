#include "tools/child_probe.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "common/base/fd.h"
#include "common/base/time.h"

namespace hoccl {
namespace {

// How often the parent looks whether the child has ended, for the case that a grandchild keeps the
// pipe open.
constexpr int kLookMs = 20;

[[noreturn]] void runChild(const std::function<std::string()>& work, int out) {
  const rlimit noCore{0, 0};
  ::setrlimit(RLIMIT_CORE, &noCore);
  ::dup2(STDERR_FILENO, STDOUT_FILENO);
  std::string text;
  try {
    text = work();
  } catch (...) {
    ::_exit(1);
  }
  const char* at = text.data();
  std::size_t left = text.size();
  while (left > 0) {
    const ssize_t wrote = ::write(out, at, left);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) ::_exit(1);
    at += wrote;
    left -= static_cast<std::size_t>(wrote);
  }
  ::_exit(0);  // without the libraries' destructors
}

// Reads what is there; true at the end of the stream.
bool drain(int fd, std::string* output) {
  char buffer[4096];
  for (;;) {
    const ssize_t got = ::read(fd, buffer, sizeof buffer);
    if (got > 0) {
      output->append(buffer, static_cast<std::size_t>(got));
    } else if (got == 0) {
      return true;
    } else if (errno != EINTR) {
      return errno != EAGAIN;
    }
  }
}

}  // namespace

ChildResult runInChild(const std::function<std::string()>& work, std::uint64_t timeoutMs) {
  ChildResult result;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    result.problem = fmt::format("cannot make a pipe: {}", std::strerror(errno));
    return result;
  }
  UniqueFd readEnd(ends[0]);
  UniqueFd writeEnd(ends[1]);
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child < 0) {
    result.problem = fmt::format("cannot fork: {}", std::strerror(errno));
    return result;
  }
  if (child == 0) runChild(work, writeEnd.get());
  writeEnd.reset();
  ::fcntl(readEnd.get(), F_SETFL, O_NONBLOCK);

  const Deadline deadline = Deadline::afterMs(timeoutMs);
  bool ended = false;
  bool streamEnded = false;
  bool killed = false;
  int status = 0;
  while (!ended) {
    pollfd entry{streamEnded ? -1 : readEnd.get(), POLLIN, 0};
    ::poll(&entry, 1, kLookMs);
    if (!streamEnded) streamEnded = drain(readEnd.get(), &result.output);
    const pid_t waited = ::waitpid(child, &status, killed ? 0 : WNOHANG);
    ended = waited == child || (waited < 0 && errno != EINTR);
    if (!ended && !killed && deadline.passed()) {
      killed = true;
      ::kill(child, SIGKILL);
    }
  }
  if (!streamEnded) drain(readEnd.get(), &result.output);
  if (killed) {
    result.problem = fmt::format("no end within {} ms", timeoutMs);
  } else if (WIFSIGNALED(status)) {
    result.problem =
        fmt::format("ended by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  } else if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    result.problem = fmt::format("ended the process with status {}", WEXITSTATUS(status));
  } else {
    result.ok = true;
  }
  return result;
}

}  // namespace hoccl
