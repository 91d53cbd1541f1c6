#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "plugin-tuner/agreement_wire.h"
#include "plugin-tuner/unique_id_tail.h"

namespace hoccl {

/// How all ranks of a new communicator agree whether to steer. Each rank sends the root what it can
/// do; the root alone decides, from everybody's answer, and all ranks get the same verdict. No CUDA
/// and no NCCL in here.

/// The service in the process that made a communicator's unique id. It serves every communicator of
/// every id this process made, and their splits: one listening socket, one thread that sleeps while
/// there is nothing to do.
class AgreementRoot {
 public:
  struct Options {
    /// From the first rank's message of a phase until a silent rank means plain NCCL for all.
    std::uint64_t agreeTimeoutMs = 10000;
    /// A connection that says nothing, or takes nothing, for so long is closed.
    std::uint64_t timeoutMs = 5000;
    /// Communicators whose verdict is kept for latecomers; the oldest go first.
    std::size_t maxVerdicts = 4096;
  };

  AgreementRoot();
  ~AgreementRoot();
  AgreementRoot(const AgreementRoot&) = delete;
  AgreementRoot& operator=(const AgreementRoot&) = delete;

  /// The root of this process: made on first use, never destroyed (its thread may outlive main).
  /// After a fork the child gets one of its own.
  static AgreementRoot& ofThisProcess();

  /// Opens the listening socket and starts the thread; does nothing when they run already.
  Status start(const Options& options);
  /// Makes a new nonce and gives the tail to write into the id NCCL has just filled. The address is
  /// the one NCCL advertises in it, else that of an interface. Needs start().
  Status newCommunicator(const char id[kUniqueIdBytes], Tail* tail);
  /// The same without an id of NCCL's: for communicators that shrink out of one, whose lowest rank
  /// may be this process. Needs start().
  Status newRoot(Tail* tail);
  /// When the process ends: waits until every verdict that stands has gone out, for at most so
  /// long. Does nothing where this process has no root.
  static void drainThisProcess(std::uint64_t timeoutMs);
  /// Ends thread and connections. Members that wait see their connection close.
  void stop();

 private:
  class Service;
  std::unique_ptr<Service> service_;
};

/// One rank's side, for one communicator. Not thread-safe; several in one thread: start() all, then
/// waitAll(). A phase is an all-gather of a payload that ends in a verdict; phases follow each
/// other over one connection (1: capabilities, 2: readiness). After a verdict of no there is no
/// further phase.
class Agreement {
 public:
  struct Options {
    Tail root;  ///< from the unique id: address and nonce
    AgreementKey key;
    std::uint32_t rank = 0;
    std::uint32_t nranks = 0;
    std::uint64_t policyDigest = 0;  ///< Config::policyDigest(): any difference means plain NCCL
    std::string policyText;          ///< Config::policyText(), for the message about a difference
    std::string host;                ///< for messages; empty: this host's name
    std::uint64_t agreeTimeoutMs = 10000;
    std::uint64_t timeoutMs = 5000;
  };
  enum class State {
    Idle,     ///< start() not called, or failed
    Pending,  ///< under way
    Done,     ///< verdict() holds what the root decided
    Failed,   ///< status() says why the verdict could not be learnt: fail the communicator
  };
  using Clock = std::chrono::steady_clock;

  explicit Agreement(Options options);
  ~Agreement();
  Agreement(Agreement&&) noexcept;
  Agreement& operator=(Agreement&&) noexcept;

  /// Begins a phase (1, then 2, …) with this rank's payload, at most wire::kMaxPayload bytes. A
  /// veto that is not empty says why this rank cannot steer; the verdict is then no, with that
  /// reason. Never blocks.
  Status start(std::uint32_t phase, std::string payload, std::string veto = {});
  /// Makes what progress it can without blocking.
  State poll();
  /// Polls until the phase has ended or the deadline is over. The phase ends by itself at the
  /// latest after the root's agree timeout and twice timeoutMs.
  State wait(Clock::time_point deadline = Clock::time_point::max());
  /// wait() for several ranks of one thread; true when none is pending any more.
  static bool waitAll(std::span<Agreement* const> agreements,
                      Clock::time_point deadline = Clock::time_point::max());

  [[nodiscard]] State state() const;
  /// What start() was given is with the kernel; the root gets it even if nobody polls any more.
  [[nodiscard]] bool said() const;
  /// The last finished phase's verdict: the same on all ranks.
  [[nodiscard]] const wire::Verdict& verdict() const;
  /// After Failed: Code::Timeout or Code::Remote with rank, address and what to look at.
  [[nodiscard]] const Status& status() const;

 private:
  class Member;
  std::unique_ptr<Member> member_;
};

}  // namespace hoccl
