#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace e2e {

/// One scenario of e2e_rank run by real processes: the preloaded library, the mover, the emulated
/// driver and the stand-in NCCL. Every wait has a bound, and at its end nothing of it is left
/// running.
///
/// Movers outlive the process that started them for a moment, so the test adopts them (it is a
/// child subreaper): what it has as children is exactly what the scenario has left.
class Job {
 public:
  Job(std::string scenario, int ranks);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  Job& argument(const std::string& name, const std::string& value);
  /// An environment variable of all ranks, or of one.
  Job& env(const std::string& name, const std::string& value);
  Job& env(int rank, const std::string& name, const std::string& value);
  Job& withoutPreload(int rank);
  /// All ranks on one node, each with a GPU of its own, which its process alone sees.
  Job& oneNode();
  /// That rank, and so its mover, runs in a network namespace of `ip netns`.
  Job& network(int rank, const std::string& name);
  /// A file of the job's folder with that content and execute permission; returns its path.
  std::string script(const std::string& name, const std::string& text);

  void start();
  /// Waits until all ranks have ended and their movers have gone, and checks that all of it
  /// happened in time and every rank was content. Starts the ranks if need be.
  void finish(int seconds = 30);
  /// Only the waiting: true when that rank has ended in time.
  bool awaitEnd(int rank, int seconds);

  void post(const std::string& event) const;
  [[nodiscard]] bool await(const std::string& event, int seconds = 20);
  [[nodiscard]] bool awaitAll(const std::string& event, int seconds = 20);

  [[nodiscard]] pid_t pid(int rank) const { return ranks_[rank].pid; }
  /// The mover that rank has started; 0 if it has none.
  [[nodiscard]] pid_t moverOf(int rank) const;
  /// That rank is not expected to end by itself or with status 0.
  void expectDeath(int rank) { ranks_[rank].diesExpected = true; }
  /// Waits until a process of this job (an adopted mover, too) has gone.
  bool awaitGone(pid_t pid, int seconds);

  /// CPU time a process has used so far, in milliseconds.
  [[nodiscard]] static long cpuMs(pid_t pid);

  /// What a rank said: the last "key value" line of that key; empty without one.
  [[nodiscard]] std::string said(int rank, const std::string& key) const;
  /// HOCCL's counters of that rank's communicators, as told under that key; empty without HOCCL.
  [[nodiscard]] nlohmann::json communicators(int rank, const std::string& key = "stats") const;
  [[nodiscard]] std::string errors(int rank) const;
  /// The stand-in's log of that rank, one call a line.
  [[nodiscard]] std::vector<std::string> calls(int rank) const;
  /// How many lines begin with that function and contain `part`.
  [[nodiscard]] int callCount(int rank, const std::string& function,
                              const std::string& part = "") const;
  /// Everything the ranks wrote, for messages.
  [[nodiscard]] std::string transcript() const;

 private:
  struct RankState {
    std::map<std::string, std::string> environment;
    std::string network;
    bool preload = true;
    bool diesExpected = false;
    pid_t pid = 0;
    bool ended = false;
    int status = 0;
  };
  [[nodiscard]] std::string path(const std::string& name) const { return folder_ + "/" + name; }
  void spawn(int rank);
  /// Takes note of children that have ended.
  void reap();
  /// Polls `done` (after reaping) until it holds or the time is over.
  template <typename Done>
  bool poll(int seconds, Done done);
  void killAll();

  std::string scenario_, folder_, session_;
  std::vector<RankState> ranks_;
  std::map<std::string, std::string> arguments_;
  std::map<std::string, std::string> environment_;
  bool started_ = false;
  bool finished_ = false;
};

}  // namespace e2e
