#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/base/log.h"
#include "plugin-tuner/agreement.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {

/// Brings one communicator to a verdict after NCCL's own initialisation: the ranks tell each other
/// where they run, those with pairs to steer start their movers, all of them say whether that
/// worked, and everybody's mover learns the communicator before anybody uses it. Each step is a
/// phase of the agreement, so that the outcome is the same on all ranks: steered, plain NCCL, or
/// failed.
class CommSetup {
 public:
  explicit CommSetup(SteeredComm* comm) : comm_(comm) {}
  /// Ends what the mover was told of the communicator, unless the communicator has taken it over.
  ~CommSetup();
  CommSetup(const CommSetup&) = delete;
  CommSetup& operator=(const CommSetup&) = delete;

  /// Goes on as far as it can without waiting for other ranks. True when the outcome stands.
  bool advance();

 private:
  enum class Step { Begin, RollCall, Where, Movers, Known, Done };

  void begin();
  void onRollCall();
  void tellWhere();
  void onWhere();
  void onMovers();
  void nextPhase(Step step, std::uint32_t phase, std::string payload, std::string veto);
  void plain(const std::string& reason, LogLevel level = LogLevel::Warn);

  SteeredComm* comm_;
  Step step_ = Step::Begin;
  std::unique_ptr<Agreement> agreement_;
  MoverClient* mover_ = nullptr;
  std::uint32_t moverIndex_ = 0;
  bool added_ = false;
  std::vector<PeerRecord> peers_;
  std::vector<bool> reachable_;
  std::vector<std::string> transports_;  ///< to each reachable rank
};

/// The agreement in which a rank answers a roll call; finished when every rank of the parent has.
std::unique_ptr<Agreement> answerRollCall(const RollCall& call);

}  // namespace hoccl
