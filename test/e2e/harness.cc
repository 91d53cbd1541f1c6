#include "test/e2e/harness.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "test/e2e/patience.h"

extern char** environ;

namespace e2e {
namespace {

constexpr useconds_t kPauseUs = 2000;
constexpr int kMoverSeconds = 5;  // rule 9's bound on tear-down
constexpr std::size_t kTranscriptBytes = 6000;

/// Empty if there is no such file or, below /proc, the process ends meanwhile.
std::string read(const std::string& path) {
  std::string text;
  if (FILE* file = std::fopen(path.c_str(), "re")) {
    char part[4096];
    while (const std::size_t got = std::fread(part, 1, sizeof part, file)) text.append(part, got);
    std::fclose(file);
  }
  return text;
}

/// Parent and state of a process; false if there is none.
bool statOf(pid_t pid, pid_t* parent, char* state) {
  const std::string text = read(fmt::format("/proc/{}/stat", pid));
  const std::size_t close = text.rfind(')');  // the name may hold anything
  return close != std::string::npos &&
         std::sscanf(text.c_str() + close + 1, " %c %d", state, parent) == 2;
}

/// Children of a process, those that have ended but are not reaped left out.
std::vector<pid_t> childrenOf(pid_t parent) {
  std::vector<pid_t> found;
  DIR* folder = ::opendir("/proc");
  if (!folder) return found;
  while (const dirent* entry = ::readdir(folder)) {
    const pid_t pid = static_cast<pid_t>(std::atoi(entry->d_name));
    pid_t its = 0;
    char state = 0;
    if (pid > 0 && statOf(pid, &its, &state) && its == parent && state != 'Z') found.push_back(pid);
  }
  ::closedir(folder);
  return found;
}

std::string nameOf(pid_t pid) {
  std::string name = read(fmt::format("/proc/{}/comm", pid));
  while (!name.empty() && name.back() == '\n') name.pop_back();
  return name;
}

bool startsWith(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

}  // namespace

Job::Job(std::string scenario, int ranks) : scenario_(std::move(scenario)), ranks_(ranks) {
  // Orphaned movers become this process's children instead of init's.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  static int serial = 0;
  session_ = fmt::format("e2e-{}-{}", ::getpid(), ++serial);
  std::string pattern = std::filesystem::temp_directory_path().string() + "/hoccl-e2e-XXXXXX";
  if (!::mkdtemp(pattern.data())) {
    ADD_FAILURE() << "mkdtemp " << pattern << ": " << std::strerror(errno);
  }
  folder_ = pattern;
  for (int rank = 0; rank < ranks; ++rank) {
    // Ranks of one node would reach each other by NCCL's own means and not be steered.
    env(rank, "NCCL_HOSTID", fmt::format("e2e-node-{}", rank));
  }
}

Job::~Job() {
  killAll();
  if (!::testing::Test::HasFailure()) {
    std::filesystem::remove_all(folder_);
  } else {
    std::fprintf(stderr, "what the ranks left: %s\n", folder_.c_str());
  }
}

Job& Job::argument(const std::string& name, const std::string& value) {
  arguments_[name] = value;
  return *this;
}
Job& Job::env(const std::string& name, const std::string& value) {
  environment_[name] = value;
  return *this;
}
Job& Job::env(int rank, const std::string& name, const std::string& value) {
  ranks_[rank].environment[name] = value;
  return *this;
}
Job& Job::oneNode() {
  env("EMUCUDA_DEVICES", std::to_string(ranks_.size()));
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    env(rank, "NCCL_HOSTID", "e2e-one-node")
        .env(rank, "CUDA_VISIBLE_DEVICES", std::to_string(rank));
  }
  return *this;
}
Job& Job::withoutPreload(int rank) {
  ranks_[rank].preload = false;
  return *this;
}

Job& Job::network(int rank, const std::string& name) {
  ranks_[rank].network = name;
  return *this;
}

std::string Job::script(const std::string& name, const std::string& text) {
  std::ofstream(path(name)) << text;
  ::chmod(path(name).c_str(), 0755);
  return path(name);
}

void Job::spawn(int rank) {
  RankState& state = ranks_[rank];
  std::map<std::string, std::string> environment;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    bool ours = false;
    for (const char* prefix : {"HOCCL_", "NCCL", "EMUCUDA_", "LD_PRELOAD=", "CUDA_", "PYTORCH_"}) {
      ours = ours || startsWith(text, prefix);
    }
    const std::size_t equals = text.find('=');
    if (!ours && equals != std::string::npos) {
      environment[text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  const std::string library = std::string(E2E_EMULATOR_DIR) + ":" + E2E_NCCL_DIR;
  std::string& search = environment["LD_LIBRARY_PATH"];
  search = search.empty() ? library : library + ":" + search;
  environment["EMUCUDA_SESSION"] = session_;
  environment["HOCCL_MOVER_PATH"] = E2E_MOVER;
  // Movers that spin while emulated copies take their time keep everything else from few CPUs.
  environment["HOCCL_SPIN_US"] = "2";
  // The ranks find the driver as a framework does, so that nothing tells whose frees are seen.
  environment["HOCCL_APP_COPIES"] = "unexportable";
  environment["HOCCL_SPANS"] = "on";
  // The same tests over another transport: E2E_TRANSPORT=tcp ctest -L e2e
  if (const char* transport = std::getenv("E2E_TRANSPORT")) {
    environment["HOCCL_TRANSPORT"] = transport;
  }
  // Nothing is known of the emulated GPUs' places, so they count as far apart.
  environment["NCCL_P2P_LEVEL"] = "SYS";
  // The same tests on GPUs that reach each other over PCIe: E2E_NVLINK=0
  if (const char* nvlink = std::getenv("E2E_NVLINK")) environment["EMUCUDA_NVLINK"] = nvlink;
  // The same tests with own blocks by kernel, of which some count that there is none:
  // E2E_OWN_BLOCK=kernel
  if (const char* how = std::getenv("E2E_OWN_BLOCK")) environment["HOCCL_OWN_BLOCK"] = how;
  environment["NCCLSTANDIN_LOG"] = path(fmt::format("calls{}", rank));
  environment["NCCLSTANDIN_TIMEOUT_MS"] = "15000";
  if (state.preload) environment["LD_PRELOAD"] = E2E_SHIM;
#if HOCCL_SANITIZED
  environment["ASAN_OPTIONS"] = "verify_asan_link_order=0:detect_leaks=0";
  // The watcher of a mover that died is joined with its client, which lives as long as the process.
  environment["TSAN_OPTIONS"] = "report_thread_leaks=0";
#endif
  for (const auto& [name, value] : environment_) environment[name] = value;
  for (const auto& [name, value] : state.environment) environment[name] = value;

  std::vector<std::string> texts{E2E_RANK, scenario_, std::to_string(rank),
                                 std::to_string(ranks_.size()), folder_};
  for (const auto& [name, value] : arguments_) texts.push_back(name + "=" + value);
  std::vector<std::string> variables;
  for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
  std::vector<char*> argv, envp;
  for (std::string& text : texts) argv.push_back(text.data());
  for (std::string& text : variables) envp.push_back(text.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  const std::string out = path(fmt::format("out{}", rank)), err = path(fmt::format("err{}", rank));
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {
    // If the test is killed, its ranks go as well, and movers follow them.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    if (!state.network.empty()) {
      const int space = ::open(("/run/netns/" + state.network).c_str(), O_RDONLY | O_CLOEXEC);
      if (space < 0 || ::setns(space, CLONE_NEWNET) != 0) ::_exit(126);
    }
    ::dup2(::open("/dev/null", O_RDONLY), 0);
    ::dup2(::open(out.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644), 1);
    ::dup2(::open(err.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644), 2);
    ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  if (pid < 0) ADD_FAILURE() << "fork: " << std::strerror(errno);
  state.pid = pid;
}

void Job::start() {
  started_ = true;
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) spawn(rank);
}

void Job::reap() {
  int status = 0;
  for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
    for (RankState& rank : ranks_) {
      if (rank.pid != pid) continue;
      rank.ended = true;
      rank.status = status;
    }
  }
}

template <typename Done>
bool Job::poll(int seconds, Done done) {
  Patience patience{std::chrono::seconds(seconds)};
  for (;;) {
    reap();
    if (done()) return true;
    if (patience.over()) return false;
    ::usleep(kPauseUs);
  }
}

bool Job::awaitEnd(int rank, int seconds) {
  return poll(seconds, [&] { return ranks_[rank].ended; });
}

void Job::finish(int seconds) {
  if (!started_) start();
  finished_ = true;
  const bool ended = poll(seconds, [&] {
    for (const RankState& rank : ranks_) {
      if (!rank.ended) return false;
    }
    return true;
  });
  std::string problems;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const RankState& rank = ranks_[i];
    if (!rank.ended) {
      problems += fmt::format("rank {} has not ended within {} s\n", i, seconds);
    } else if (!rank.diesExpected && rank.status != 0) {
      problems += WIFSIGNALED(rank.status)
                      ? fmt::format("rank {} was killed by signal {}\n", i, WTERMSIG(rank.status))
                      : fmt::format("rank {} ended with status {}\n", i, WEXITSTATUS(rank.status));
    }
  }
  if (ended) {
    // No other child exists, so whoever is still there is a process the ranks left behind.
    if (!poll(kMoverSeconds, [] { return childrenOf(::getpid()).empty(); })) {
      for (const pid_t pid : childrenOf(::getpid())) {
        problems += fmt::format("process {} ({}) is left behind after {} s\n", pid, nameOf(pid),
                                kMoverSeconds);
      }
    }
  }
#if HOCCL_SANITIZED
  // A mover's report changes no status that anybody sees.
  for (int rank = 0; rank < static_cast<int>(ranks_.size()); ++rank) {
    if (errors(rank).find("Sanitizer: ") == std::string::npos) continue;
    problems += fmt::format("a sanitizer reports something in rank {} or its mover\n", rank);
  }
#endif
  if (!problems.empty()) ADD_FAILURE() << scenario_ << ":\n" << problems << transcript();
}

void Job::killAll() {
  for (RankState& rank : ranks_) {
    if (rank.pid > 0 && !rank.ended) ::kill(rank.pid, SIGKILL);
  }
  // Movers of killed ranks end by themselves; those that do not are ended here.
  if (poll(kMoverSeconds, [] { return childrenOf(::getpid()).empty(); })) return;
  for (const pid_t pid : childrenOf(::getpid())) ::kill(pid, SIGKILL);
  poll(kMoverSeconds, [] { return childrenOf(::getpid()).empty(); });
}

void Job::post(const std::string& event) const { std::ofstream(path(event)) << ""; }

bool Job::await(const std::string& event, int seconds) {
  return poll(seconds, [&] { return ::access(path(event).c_str(), F_OK) == 0; });
}

bool Job::awaitAll(const std::string& event, int seconds) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (!await(fmt::format("{}.{}", event, i), seconds)) return false;
  }
  return true;
}

pid_t Job::moverOf(int rank) const {
  for (const pid_t pid : childrenOf(ranks_[rank].pid)) {
    if (startsWith(nameOf(pid), "hoccl-mover")) return pid;
  }
  return 0;
}

bool Job::awaitGone(pid_t pid, int seconds) {
  return poll(seconds, [&] {
    pid_t parent = 0;
    char state = 0;
    return !statOf(pid, &parent, &state) || state == 'Z';
  });
}

long Job::cpuMs(pid_t pid) {
  const std::string text = read(fmt::format("/proc/{}/stat", pid));
  const std::size_t close = text.rfind(')');
  long user = 0, system = 0;
  if (close == std::string::npos ||
      std::sscanf(text.c_str() + close + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %ld %ld",
                  &user, &system) != 2) {
    return 0;
  }
  return (user + system) * 1000 / ::sysconf(_SC_CLK_TCK);
}

std::string Job::said(int rank, const std::string& key) const {
  std::istringstream lines(read(path(fmt::format("out{}", rank))));
  std::string found;
  for (std::string line; std::getline(lines, line);) {
    if (startsWith(line, key + " ")) found = line.substr(key.size() + 1);
  }
  return found;
}

nlohmann::json Job::communicators(int rank, const std::string& key) const {
  const std::string text = said(rank, key);
  const auto parsed = nlohmann::json::parse(text, nullptr, false);
  if (!parsed.is_object()) {
    ADD_FAILURE() << "rank " << rank << " told no counters as '" << key << "': '" << text << "'\n"
                  << transcript();
    return nlohmann::json::array();
  }
  return parsed.value("communicators", nlohmann::json::array());
}

std::string Job::errors(int rank) const { return read(path(fmt::format("err{}", rank))); }

std::vector<std::string> Job::calls(int rank) const {
  std::istringstream lines(read(path(fmt::format("calls{}", rank))));
  std::vector<std::string> found;
  for (std::string line; std::getline(lines, line);) found.push_back(line);
  return found;
}

int Job::callCount(int rank, const std::string& function, const std::string& part) const {
  int count = 0;
  for (const std::string& line : calls(rank)) {
    if (startsWith(line, function + " ") && (line + " ").find(part) != std::string::npos) ++count;
  }
  return count;
}

std::string Job::transcript() const {
  std::string text;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    for (const char* kind : {"out", "err"}) {
      std::string part = read(path(fmt::format("{}{}", kind, i)));
      if (part.size() > kTranscriptBytes) part = "…" + part.substr(part.size() - kTranscriptBytes);
      if (!part.empty()) text += fmt::format("--- rank {} {}:\n{}", i, kind, part);
    }
  }
  return text;
}

}  // namespace e2e
