#include "test/conformance/processes.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

namespace conformance {
namespace {

std::size_t entriesOf(const char* folder) {
  DIR* const directory = ::opendir(folder);
  if (directory == nullptr) return 0;
  std::size_t count = 0;
  while (const dirent* entry = ::readdir(directory)) count += entry->d_name[0] != '.' ? 1 : 0;
  ::closedir(directory);
  return count;
}

// Starts a child whose output comes to the pipe.
pid_t startChild(int output, const std::function<void()>& body) {
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(2);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(output, STDERR_FILENO);
  ::close(output);
  ::setvbuf(stdout, nullptr, _IONBF, 0);
  body();
  ::_exit(0);
}

Outcome waitFor(std::vector<pid_t> children, int output, double seconds) {
  seconds *= patience();
  Outcome outcome;
  // Virtual machines stand still for many seconds at times: a gap between two looks is no time in
  // which the children have run.
  constexpr double kLongestGap = 1;
  double last = now();
  outcome.statuses.assign(children.size(), -1);
  std::size_t left = children.size();
  while (left > 0) {
    pollfd readable{output, POLLIN, 0};
    (void)::poll(&readable, 1, 2);
    char buffer[4096];
    for (ssize_t got; (got = ::read(output, buffer, sizeof buffer)) > 0;) {
      outcome.output.append(buffer, static_cast<std::size_t>(got));
    }
    for (std::size_t i = 0; i < children.size(); ++i) {
      if (children[i] > 0 && ::waitpid(children[i], &outcome.statuses[i], WNOHANG) > 0) {
        children[i] = 0;
        --left;
      }
    }
    const double at = now();
    outcome.seconds += std::min(at - std::exchange(last, at), kLongestGap);
    if (left > 0 && outcome.seconds > seconds && !outcome.timedOut) {
      outcome.timedOut = true;
      for (const pid_t child : children) {
        if (child > 0) ::kill(child, SIGKILL);
      }
    }
  }
  char buffer[4096];
  for (ssize_t got; (got = ::read(output, buffer, sizeof buffer)) > 0;) {
    outcome.output.append(buffer, static_cast<std::size_t>(got));
  }
  ::close(output);
  return outcome;
}

struct OutputPipe {
  int ends[2] = {-1, -1};
  OutputPipe() {
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
  }
};

// --- Pairs whose processes run in two guests of the RDMA lab, each of which runs this program.

/// Tests of such a program go in step, and so do the channels of their pairs.
int channelToNode(int node, const char* peer) {
  const double seconds = 30 * patience();
  static std::uint16_t port = 17000;
  ++port;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  const double start = now();
  if (node == 0) {
    const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    ::setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(listener, 1) != 0) {
      std::abort();
    }
    pollfd comes{listener, POLLIN, 0};
    const bool came = ::poll(&comes, 1, static_cast<int>(seconds * 1000)) == 1;
    const int channel = came ? ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
    ::close(listener);
    return channel;
  }
  ::inet_pton(AF_INET, peer, &address.sin_addr);
  while (now() - start < seconds) {
    const int channel = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(channel, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) {
      return channel;
    }
    ::close(channel);
    ::usleep(20000);
  }
  return -1;
}

}  // namespace

void giveUp(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  ::_exit(1);
}

void Side::give(const void* data, std::size_t bytes) const {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t wrote = ::send(fd_, at, bytes, MSG_NOSIGNAL);
    if (wrote <= 0) giveUp(__FILE__, __LINE__, "the other side of the test is gone");
    at += wrote;
    bytes -= static_cast<std::size_t>(wrote);
  }
}

void Side::take(void* data, std::size_t bytes) const {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(fd_, at, bytes, 0);
    if (got <= 0) giveUp(__FILE__, __LINE__, "the other side of the test is gone");
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
}

void Side::meet() const {
  char here = 1;
  give(&here, 1);
  take(&here, 1);
}

bool Outcome::ok() const {
  if (timedOut) return false;
  for (const int status : statuses) {
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return false;
  }
  return true;
}

std::string Outcome::text() const {
  std::string text = timedOut ? "timed out; " : "";
  for (const int status : statuses) {
    text += WIFEXITED(status) ? "exit " + std::to_string(WEXITSTATUS(status)) + "; "
                              : "signal " + std::to_string(WTERMSIG(status)) + "; ";
  }
  return text + std::to_string(seconds) + " s\n" + output;
}

Outcome runPair(const std::function<void(const Side&)>& body, double seconds) {
  OutputPipe output;
  const char *node = std::getenv("NODE"), *nodes = std::getenv("NODES");
  const char* peer = std::getenv("PEER_MANAGEMENT_ADDRESS");
  if (node != nullptr && nodes != nullptr && peer != nullptr && std::string(nodes) == "2") {
    const int rank = std::atoi(node);
    const int channel = channelToNode(rank, peer);
    const pid_t child = startChild(output.ends[1], [&] {
      ::close(output.ends[0]);
      if (channel < 0) giveUp(__FILE__, __LINE__, "the other node of the test does not come");
      body(Side(rank, channel));
    });
    if (channel >= 0) ::close(channel);
    ::close(output.ends[1]);
    return waitFor({child}, output.ends[0], seconds);
  }
  int channel[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel) != 0) std::abort();
  std::vector<pid_t> children;
  for (int rank = 0; rank < 2; ++rank) {
    children.push_back(startChild(output.ends[1], [&] {
      ::close(channel[1 - rank]);
      ::close(output.ends[0]);
      body(Side(rank, channel[rank]));
    }));
  }
  ::close(channel[0]);
  ::close(channel[1]);
  ::close(output.ends[1]);
  return waitFor(std::move(children), output.ends[0], seconds);
}

Outcome runAlone(const std::function<void()>& body, double seconds) {
  OutputPipe output;
  const pid_t child = startChild(output.ends[1], [&] {
    ::close(output.ends[0]);
    body();
  });
  ::close(output.ends[1]);
  return waitFor({child}, output.ends[0], seconds);
}

Outcome runProgram(const std::vector<std::string>& command,
                   const std::vector<std::string>& environment, const std::string& folder,
                   double seconds) {
  OutputPipe output;
  const pid_t child = startChild(output.ends[1], [&] {
    for (const std::string& entry : environment) {
      const std::size_t equals = entry.find('=');
      if (equals == std::string::npos) {
        ::unsetenv(entry.c_str());
      } else {
        ::setenv(entry.substr(0, equals).c_str(), entry.c_str() + equals + 1, 1);
      }
    }
    if (!folder.empty() && ::chdir(folder.c_str()) != 0) ::_exit(3);
    std::vector<char*> arguments;
    for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    ::execv(arguments[0], arguments.data());
    std::fprintf(stderr, "cannot start %s\n", arguments[0]);
    ::_exit(3);
  });
  ::close(output.ends[1]);
  return waitFor({child}, output.ends[0], seconds);
}

double now() {
  timespec time;
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

double patience() {
  const char* const text = std::getenv("CONFORMANCE_PATIENCE");
  return text != nullptr ? std::max(1.0, std::atof(text)) : 1.0;
}

std::size_t threadCount() { return entriesOf("/proc/self/task"); }
std::size_t threadsWithoutPlugin() {
  std::thread([] {}).join();
  return threadCount();
}
bool threadsSettleAt(std::size_t count) {
  const double start = now();
  while (threadCount() != count && now() - start < 2) ::usleep(1000);
  return threadCount() == count;
}
std::size_t descriptorCount() { return entriesOf("/proc/self/fd"); }

}  // namespace conformance
