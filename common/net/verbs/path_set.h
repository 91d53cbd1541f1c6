#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/net/verbs/mender.h"
#include "common/net/verbs/path.h"
#include "common/net/verbs/verbs_wire.h"
#include "common/net/verbs/work_request.h"

namespace hoccl {

/// How many NICs and queue pairs a connection has: of both sides' numbers the smaller.
struct PathExtent {
  std::uint32_t rails = 0, pairs = 0;
};

/// What a queue pair is asked to take inside a request: a message of movers, or a record.
inline constexpr std::uint32_t kPathInlineBytes = 64;

/// A write to the peer's memory.
struct PathWrite {
  const void* data = nullptr;
  std::uint64_t bytes = 0;  ///< 0: the immediate alone
  std::uint32_t localKey = 0;
  std::uint64_t target = 0;
  std::uint32_t remoteKey = 0;
  /// A few bytes of the set's own memory that arrive behind the data and with the immediate.
  const void* record = nullptr;
  std::uint32_t recordBytes = 0;
  std::uint64_t recordTarget = 0;  ///< in the peer's
};

/// What uses a set of paths: it carries what they say to each other, and hears of what comes.
class PathUser {
 public:
  virtual ~PathUser() = default;
  /// To the peer's set, in order; false: no room now, or the connection has ended.
  [[nodiscard]] virtual bool tell(std::uint16_t kind, const void* payload, std::size_t bytes) = 0;
  /// The connection is ending anyway: what fails is no news.
  [[nodiscard]] virtual bool ending() const = 0;
  /// An immediate of any kind but Probe has come; false: it makes no sense.
  [[nodiscard]] virtual bool heard(std::uint32_t immediate) = 0;
  /// A piece is the peer's, and no queue pair reads it any more.
  virtual void landed(const WorkId& id) = 0;
  /// What has arrived here, for the peer, of whose paths one has failed.
  virtual void fillReport(verbs_wire::Report* report) = 0;
  /// The same of the peer's: over `path` comes nothing more, and what it lacks has to go again.
  virtual void failedOver(const Path& path, const verbs_wire::Report& report) = 0;
};

/// The queue pairs of a connection on one or more NICs, from their set-up through their failures.
/// Not thread-safe, but for gone(), goneText() behind it, and work().
class PathSet {
 public:
  PathSet(PathUser& user, const VerbsSettings& settings, bool connecting)
      : user_(user), settings_(settings), connecting_(connecting) {}

  // --- Set-up (path_setup.cc).
  /// Makes the queue pairs on the first of the NICs and registers the set's own memory, [base, base
  /// + bytes), with them. `receives`: as many as the peer can use up before it hears from here.
  Status make(const Nics& all, const PathExtent& extent, void* base, std::size_t bytes,
              std::uint32_t receives);
  /// Tells the peer of them. What it says comes in by `place` and `arrived`.
  void offer();
  static constexpr bool owns(std::uint16_t kind) {
    return kind >= verbs_wire::kFirst && kind <= verbs_wire::kLast;
  }
  std::byte* place(const FrameHeader& header, Status* bad);
  void arrived(const FrameHeader& header);
  /// Some queue pair is known to carry something.
  [[nodiscard]] bool stands() const { return up() > 0; }

  // --- Data (path_set.cc).
  /// Takes completions; what they say goes to the user.
  void poll();
  /// The path with the least to send, of those with room; null: none now.
  [[nodiscard]] Path* pathFor();
  /// False: no room, or the path has failed right now; nothing has gone.
  bool post(Path& path, WorkId id, std::uint32_t immediate, const PathWrite& write);
  /// Of the set's own memory.
  bool postOwn(Path& path, WorkId id, std::uint32_t immediate, const void* data,
               std::uint64_t bytes, std::uint64_t offset);
  [[nodiscard]] std::uint64_t peerBase() const { return peerBase_; }

  // --- Failures (path_failover.cc).
  /// What is to be done about paths that have failed; cheap while none has.
  void tend() {
    if (failedOver_ && (pressing_ || ++untended_ % kTendsApart == 0)) tendPaths();
  }
  /// The connection ends for that reason, which the peer is told.
  void end(const std::string& why);
  void nonsense(const std::string& what);
  /// Nothing goes or comes any more, now: what was posted has come back when this returns, or never
  /// will.
  void stop();

  /// No path is left, or the peer has ended it.
  [[nodiscard]] bool gone() const { return gone_.load(std::memory_order_acquire); }
  [[nodiscard]] const std::string& goneText() const { return goneText_; }
  /// Some queue pair's requests are coming back, or the peer has not been told of it.
  [[nodiscard]] bool settling() const;
  /// Some path is not in use and may be again.
  [[nodiscard]] bool failing() const { return failedOver_; }
  /// Something is to be done about one, or to be heard of it, soon. Not while all there is to do is
  /// to try a NIC again that has stayed away for a while: that is to cost those in use nothing.
  [[nodiscard]] bool pressing() const { return failedOver_ && pressing_; }
  /// What has been posted on some path may have to go again: the peer has not said yet.
  [[nodiscard]] bool owing() const;
  /// None is, and new ones are being tried before that is the end.
  [[nodiscard]] bool lastChance() const { return lastChanceByNs_ != 0; }
  [[nodiscard]] std::uint64_t sendsOut() const { return sendsOut_; }
  [[nodiscard]] std::size_t up() const;
  [[nodiscard]] std::size_t upAt(const Rail& rail) const;

  /// Readable while there is work for `work`, on a thread that may wait.
  [[nodiscard]] int workFd() const { return mender_.fd(); }
  void work() { mender_.work(settings_, shape_); }

  [[nodiscard]] std::vector<Path>& paths() { return paths_; }
  [[nodiscard]] const std::vector<Path>& paths() const { return paths_; }
  [[nodiscard]] const std::vector<std::unique_ptr<Rail>>& rails() const { return rails_; }
  [[nodiscard]] const QueuePairShape& shape() const { return shape_; }

 private:
  /// While nothing presses, every so many calls see whether a retry is due.
  static constexpr std::uint32_t kTendsApart = 64;
  void onOffer(const verbs_wire::Offer& offer);
  void onGo();
  void onCompletion(const ibv_wc& completion);
  void breakRail(Rail& rail, int error);
  void probe(Path& path);
  void takeDown(Path& path, const std::string& why);
  void noneLeft(const Path& path, const std::string& why);
  [[nodiscard]] std::string noneLeftText() const;
  void tendPaths();
  static bool drained(Path& path, std::uint64_t now);
  void drainedPath(Path& path);
  [[nodiscard]] std::uint64_t nextBackoffNs(const Path& path) const;
  [[nodiscard]] std::uint64_t retryAtNs(const Path& path) const;
  void sendReport(Path& path);
  void onReport(const verbs_wire::Report& report);
  void onGivenUp(Path& path, const verbs_wire::Report& report);
  void mendNext();
  void mend(Path& path);
  void connectMended(Path& path);
  void onMended(Mender::Order order);
  void onAgain(const verbs_wire::PathEnd& end);
  void onAnswer(const verbs_wire::PathEnd& end);
  void onAgainGo(const verbs_wire::PathEnd& end);
  [[nodiscard]] bool anyAlive() const;
  [[nodiscard]] bool presses(const Path& path, std::uint64_t now) const;
  void press() { failedOver_ = pressing_ = true; }

  PathUser& user_;
  VerbsSettings settings_;
  QueuePairShape shape_;
  bool connecting_;
  std::byte* base_ = nullptr;
  std::uint64_t peerBase_ = 0;
  std::vector<std::unique_ptr<Rail>> rails_;
  std::vector<Path> paths_;  ///< paths_[rail * pairs + pair]
  std::size_t nextPath_ = 0, nextMend_ = 0;
  bool failedOver_ = false;     ///< some path is neither up nor unusable: tendPaths has work
  bool pressing_ = false;       ///< and that soon
  std::uint32_t untended_ = 0;  ///< calls since it had
  std::uint64_t sendsOut_ = 0;  ///< over all paths
  bool offered_ = false, settled_ = false;
  bool stood_ = false;  ///< some path has been up
  std::uint64_t lastChanceByNs_ = 0;
  std::string lastProblem_;  ///< what broke the last path that was left
  std::string lastTry_;      ///< and how the newest try of the last chance ended
  Mender mender_;
  std::atomic<bool> gone_{false};
  std::string goneText_;  ///< written before gone_
  alignas(8) std::array<std::byte,
                        std::max(sizeof(verbs_wire::Offer), sizeof(verbs_wire::Report))> heard_{};
};

}  // namespace hoccl
