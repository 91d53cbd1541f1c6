#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/base/shared_memory.h"
#include "common/base/status.h"
#include "tools/bench/line_channel.h"
#include "tools/bench/remote_rank.h"

namespace hoccl::bench {

/// Where a rank of another host runs, and the changes to that host's environment.
struct RemoteRank {
  RemoteHost host;
  RankEnvironment environment;
};

/// How the processes of a rank set are started.
struct RankSetPlan {
  std::string name;                                    ///< for messages: "hoccl", "nccl", "bare"
  std::string program;                                 ///< executable
  std::vector<std::string> arguments;                  ///< after the program's name
  std::vector<std::vector<std::string>> environments;  ///< one per rank of this host
  std::vector<RemoteRank> remotes;                     ///< the ranks behind those
  std::uint64_t timeoutMs = 60000;  ///< longest silence of a rank that has something to do
  bool captureOutput = false;       ///< keep what ranks write to standard output, see output()
};

/// The rank processes of one set: started together, asked together, never outliving this object.
/// Standard output of a rank goes to standard error, so that it cannot get into the table.
class RankSet {
 public:
  static Status start(const RankSetPlan& plan, std::unique_ptr<RankSet>* out);
  RankSet(const RankSet&) = delete;
  RankSet& operator=(const RankSet&) = delete;
  ~RankSet();

  [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }
  /// Sends rank i `commands[i]` (null: nothing for that rank) and waits for all answers. `stage`
  /// says for messages what the ranks do meanwhile. Error: names every rank that failed, ended or
  /// stayed silent for the timeout, with its last stage; the set is then killed and of no more use.
  Status ask(const std::string& stage, const std::vector<nlohmann::json>& commands,
             std::vector<nlohmann::json>* answers);
  /// The same command for all.
  Status askAll(const std::string& stage, const nlohmann::json& command,
                std::vector<nlohmann::json>* answers);
  /// Lets the ranks finish and waits for their end. Error: as above, or a rank that ends badly.
  Status finish();
  /// What the ranks wrote to standard output, with captureOutput.
  [[nodiscard]] std::string output() const;
  /// By rank; -1: on another host.
  [[nodiscard]] const std::vector<pid_t>& pids() const { return pids_; }

 private:
  struct Rank {
    pid_t pid = -1;  ///< -1 as long as it does not run, and on another host
    bool remote = false;
    LineChannel channel;
    std::string stage = "starting";
    std::uint64_t heardNs = 0;
    bool pending = false;
    std::string failure;  ///< empty: none
  };

  RankSet() = default;
  Status spawn(const RankSetPlan& plan, std::size_t index);
  Status startRemote(const RemoteRank& where, std::size_t index);
  void takeMessages(Rank* rank, nlohmann::json* answer);
  /// How the process ended, waiting for it up to `timeoutMs`; "" if it has not.
  std::string endOf(Rank* rank, std::uint64_t timeoutMs, bool* good);
  Status failureStatus() const;
  void killAll();

  std::string name_;
  std::uint64_t timeoutMs_ = 0;
  bool finishing_ = false;
  std::vector<Rank> ranks_;
  std::vector<pid_t> pids_;
  SharedMemory page_;
  UniqueFd output_;
};

}  // namespace hoccl::bench
