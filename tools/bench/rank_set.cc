#include "tools/bench/rank_set.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "common/base/time.h"
#include "tools/bench/rank_process.h"
#include "tools/bench/start_page.h"

namespace hoccl::bench {
namespace {

// After one rank has failed the others get this long to say what they saw of it.
constexpr std::uint64_t kGraceMs = 1500;
// A killed process is gone well before; a process that stays longer hangs in the kernel.
constexpr std::uint64_t kReapMs = 5000;
constexpr int kTickMs = 100;

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

/// A copy of the descriptor above those that the child's numbered ones are laid onto.
Status aboveFixed(int fd, UniqueFd* out) {
  out->reset(::fcntl(fd, F_DUPFD_CLOEXEC, 10));
  return out->valid() ? Status() : Status::fromErrno("fcntl F_DUPFD_CLOEXEC", errno);
}

}  // namespace

Status RankSet::start(const RankSetPlan& plan, std::unique_ptr<RankSet>* out) {
  std::unique_ptr<RankSet> set(new RankSet);
  set->name_ = plan.name;
  set->timeoutMs_ = plan.timeoutMs;
  const std::size_t here = plan.environments.size();
  set->ranks_.resize(here + plan.remotes.size());
  Status status = SharedMemory::create("hoccl-bench", kStartPageBytes, &set->page_);
  if (!status) return status;
  if (plan.captureOutput) {
    set->output_.reset(::memfd_create("hoccl-bench-output", MFD_CLOEXEC));
    if (!set->output_) return Status::fromErrno("memfd_create", errno);
    // Several processes write to it: each at the end of what is there.
    ::fcntl(set->output_.get(), F_SETFL, O_APPEND);
  }
  for (std::size_t i = 0; i < here; ++i)
    if (!(status = set->spawn(plan, i))) return status;
  for (std::size_t i = here; i < set->ranks_.size(); ++i)
    if (!(status = set->startRemote(plan.remotes[i - here], i))) return status;
  *out = std::move(set);
  return {};
}

Status RankSet::spawn(const RankSetPlan& plan, std::size_t index) {
  int pair[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
    return Status::fromErrno("socketpair for a rank", errno);
  UniqueFd ours(pair[0]), theirs(pair[1]), channel, page, output;
  Status status = aboveFixed(theirs.get(), &channel);
  if (status) status = aboveFixed(page_.fd(), &page);
  if (status) status = aboveFixed(output_ ? output_.get() : STDERR_FILENO, &output);
  if (!status) return status;

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, channel.get(), kRankChannelFd);
  ::posix_spawn_file_actions_adddup2(&actions, page.get(), kRankPageFd);
  ::posix_spawn_file_actions_adddup2(&actions, output.get(), STDOUT_FILENO);
  std::vector<std::string> arguments{plan.program};
  arguments.insert(arguments.end(), plan.arguments.begin(), plan.arguments.end());
  Rank& rank = ranks_[index];
  const int error =
      ::posix_spawn(&rank.pid, plan.program.c_str(), &actions, nullptr, pointers(arguments).data(),
                    pointers(plan.environments[index]).data());
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    rank.pid = -1;
    return Status::fromErrno(fmt::format("cannot start rank {} ({})", index, plan.program), error);
  }
  pids_.push_back(rank.pid);
  rank.channel = LineChannel(std::move(ours));
  rank.heardNs = monotonicNs();
  return {};
}

Status RankSet::startRemote(const RemoteRank& where, std::size_t index) {
  UniqueFd channel;
  Status status = startRemoteRank(where.host, where.environment, timeoutMs_, &channel);
  if (!status) return status.inContext(fmt::format("rank {}", index));
  Rank& rank = ranks_[index];
  rank.remote = true;
  rank.channel = LineChannel(std::move(channel));
  rank.heardNs = monotonicNs();
  pids_.push_back(-1);
  return {};
}

RankSet::~RankSet() { killAll(); }

void RankSet::killAll() {
  for (Rank& rank : ranks_)
    if (rank.pid > 0) ::kill(rank.pid, SIGKILL);
  for (Rank& rank : ranks_) {
    bool good = false;
    if (rank.pid > 0) endOf(&rank, kReapMs, &good);
    rank.channel.close();
  }
}

std::string RankSet::endOf(Rank* rank, std::uint64_t timeoutMs, bool* good) {
  // Its end there is that of its channel.
  if (rank->remote) {
    *good = true;
    return "on another host has closed its channel";
  }
  const Deadline deadline = Deadline::afterMs(timeoutMs);
  for (;;) {
    int state = 0;
    const pid_t result = ::waitpid(rank->pid, &state, WNOHANG);
    if (result == rank->pid) {
      const pid_t pid = std::exchange(rank->pid, -1);
      *good = WIFEXITED(state) && WEXITSTATUS(state) == 0;
      if (WIFSIGNALED(state))
        return fmt::format("(pid {}) was killed by signal {} ({})", pid, WTERMSIG(state),
                           ::strsignal(WTERMSIG(state)));
      return fmt::format("(pid {}) ended with exit status {}", pid, WEXITSTATUS(state));
    }
    if (result < 0 && errno != EINTR) {
      rank->pid = -1;
      return "is no child of this process any more";
    }
    if (deadline.passed()) return "";
    ::usleep(2000);
  }
}

void RankSet::takeMessages(Rank* rank, nlohmann::json* answer) {
  for (;;) {
    nlohmann::json message;
    LineChannel::State state{};
    const Status status = rank->channel.tryReceive(&message, &state);
    if (!status) {
      rank->failure = fmt::format("sent something unreadable: {}", status.message());
    } else if (state == LineChannel::State::Nothing) {
      return;
    } else if (state == LineChannel::State::Closed && finishing_ && !rank->pending) {
      rank->channel.close();
      return;
    } else if (state == LineChannel::State::Closed) {
      // Also after its answer: the others may be waiting for it.
      bool good = false;
      const std::string end = endOf(rank, kReapMs, &good);
      rank->failure = end.empty() ? "closed its channel to the bench" : end;
    } else if (message.contains("stage") && message["stage"].is_string()) {
      rank->stage = message["stage"];
      rank->heardNs = monotonicNs();
      continue;
    } else if (message.contains("error") && message["error"].is_string()) {
      rank->failure = "says: " + message["error"].get<std::string>();
    } else {
      *answer = std::move(message);
      rank->pending = false;
      continue;
    }
    rank->pending = false;
    return;
  }
}

Status RankSet::failureStatus() const {
  std::string text;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const Rank& rank = ranks_[i];
    if (rank.failure.empty() && !rank.pending) continue;
    const std::string what =
        !rank.failure.empty()
            ? rank.failure
            : fmt::format("(pid {}) has been silent for {:.1f} s", rank.pid,
                          static_cast<double>(monotonicNs() - rank.heardNs) / 1e9);
    text += fmt::format("{}rank {} of the {} set {} [stage: {}]", text.empty() ? "" : "\n  ", i,
                        name_, what, rank.stage);
  }
  return Status::error(Code::Remote, text);
}

Status RankSet::ask(const std::string& stage, const std::vector<nlohmann::json>& commands,
                    std::vector<nlohmann::json>* answers) {
  answers->assign(ranks_.size(), nullptr);
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    if (commands[i].is_null()) continue;
    rank.stage = stage;
    rank.heardNs = monotonicNs();
    rank.pending = true;
    // A rank that died meanwhile is found by its closed channel below.
    const Status status = rank.channel.send(commands[i], timeoutMs_);
    if (!status && status.code() != Code::Remote) rank.failure = status.message();
  }
  std::uint64_t graceEndNs = 0;
  for (;;) {
    bool pending = false, failed = false;
    std::vector<pollfd> entries;
    const std::uint64_t now = monotonicNs();
    for (std::size_t i = 0; i < ranks_.size(); ++i) {
      Rank& rank = ranks_[i];
      if (rank.failure.empty() && rank.channel.fd() >= 0) takeMessages(&rank, &(*answers)[i]);
      // While another one's failure is being looked into, silence is nothing to blame a rank for.
      if (rank.pending && rank.failure.empty() && graceEndNs == 0 && now > rank.heardNs &&
          now - rank.heardNs > timeoutMs_ * 1000000)
        rank.failure = fmt::format("(pid {}) was silent for {} s", rank.pid, timeoutMs_ / 1000.0);
      failed |= !rank.failure.empty();
      if (rank.failure.empty()) {
        pending |= rank.pending;
        entries.push_back({rank.channel.fd(), POLLIN, 0});
      }
    }
    if (failed && graceEndNs == 0) graceEndNs = now + kGraceMs * 1000000;
    if (failed && (!pending || now >= graceEndNs)) break;
    if (!failed && !pending) return {};
    ::poll(entries.data(), entries.size(), kTickMs);
  }
  const Status status = failureStatus();
  killAll();
  return status;
}

Status RankSet::askAll(const std::string& stage, const nlohmann::json& command,
                       std::vector<nlohmann::json>* answers) {
  return ask(stage, std::vector<nlohmann::json>(ranks_.size(), command), answers);
}

Status RankSet::finish() {
  std::vector<nlohmann::json> answers;
  finishing_ = true;
  Status status = askAll("finishing", {{"do", "finish"}}, &answers);
  if (!status) return status;
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    bool good = false;
    const std::string end = endOf(&rank, timeoutMs_, &good);
    if (end.empty()) {
      rank.failure =
          fmt::format("(pid {}) did not exit within {} s", rank.pid, timeoutMs_ / 1000.0);
    } else if (!good) {
      rank.failure = end;
    }
    if (!rank.failure.empty()) {
      status = failureStatus();
      killAll();
      return status;
    }
  }
  return {};
}

std::string RankSet::output() const {
  std::string text;
  if (!output_) return text;
  char piece[16384];
  for (ssize_t got;
       (got = ::pread(output_.get(), piece, sizeof piece, static_cast<off_t>(text.size()))) > 0;)
    text.append(piece, static_cast<std::size_t>(got));
  return text;
}

}  // namespace hoccl::bench
