// What a set of paths does about queue pairs that fail. One that does is stopped on both sides
// before anything it carried goes again, so that no late write lands in a slot in use:
//
//   fails (a completion, or the peer's report) → stopped, until all that was posted has come back
//   → the peer is told what has arrived here → its report: what it lacks goes over other paths
//   → later: a new queue pair for the path, made by the connecting side's order → probed → in use
//
// What fails all queue pairs of a NIC may be over in a moment (a link that flaps, a host that stood
// still): with none left that has worked, new ones are tried for a while before that is the end.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/net/verbs/path_set.h"

namespace hoccl {
namespace {

constexpr std::uint64_t kNsPerMs = 1'000'000;
/// A path that has worked so long begins anew.
constexpr std::uint64_t kSteadyNs = 10'000'000'000;
/// One that is tried again so seldom has no hurry.
constexpr std::uint64_t kSeldomNs = 1'000'000'000;

}  // namespace

std::string Path::text() const {
  return fmt::format("{} to {}, queue pair {:#x} to {:#x}", rail->nic->text(),
                     rail->peerText.empty() ? "a peer" : rail->peerText, pair.number(),
                     peer.number);
}

/// One that has failed and is being tried again is no hope: else a dead network would go on for
/// ever. noneLeft gives it its time.
bool PathSet::anyAlive() const {
  return std::any_of(paths_.begin(), paths_.end(), [](const Path& p) {
    return p.state == Path::State::Up || (p.alive() && p.generation == 1);
  });
}

void PathSet::end(const std::string& why) {
  if (gone()) return;
  goneText_ = why;
  gone_.store(true, std::memory_order_release);
  (void)user_.tell(verbs_wire::kRefuse, why.data(), std::min(why.size(), heard_.size()));
}

void PathSet::nonsense(const std::string& what) {
  end(fmt::format("it sent something that makes no sense: {}", what));
}

bool PathSet::settling() const {
  return failedOver_ && std::any_of(paths_.begin(), paths_.end(), [](const Path& p) {
           return p.state == Path::State::Draining || p.reportDue;
         });
}

bool PathSet::owing() const {
  return failedOver_ && std::any_of(paths_.begin(), paths_.end(), [](const Path& p) {
           return p.state == Path::State::Draining ||
                  (p.state == Path::State::Resting && !p.peerReported);
         });
}

void PathSet::stop() {
  for (Path& path : paths_) {
    sendsOut_ -= path.sends;
    path.sends = path.receives = path.usedReceives = 0;
    path.bytes = 0;
    path.state = Path::State::Unusable;
    path.reportDue = false;
    path.pair = QueuePair();  // behind this the NIC touches no memory for it
  }
}

// --- A path goes out of use ----------------------------------------------------------------------

void PathSet::takeDown(Path& path, const std::string& why) {
  if (!path.alive() && path.state != Path::State::Mending) return;
  const std::uint64_t now = monotonicNs();
  const bool steady = path.state == Path::State::Up && now - path.upSinceNs > kSteadyNs;
  const bool tried = path.state != Path::State::Up && path.generation > 1;
  if (steady) path.backoffNs = 0;
  path.backoffNs = nextBackoffNs(path);
  path.state = Path::State::Draining;
  path.problem = why;
  path.drainByNs = now + settings_.drainMs * kNsPerMs;
  path.overdue = false;
  press();
  if (path.pair) {
    if (Status status = path.pair.toError(); !status) {
      // Without a queue pair nothing lands either. But what it has brought goes with it: first the
      // completion queue is emptied.
      logWarn("verbs: {}: {}", path.text(), status.message());
      path.unstopped = true;
      path.drainByNs = now;
    }
  }
  // What a peer that has ended leaves behind is no news, nor is one more try that has not worked.
  const bool ending = user_.ending();
  logf(ending || tried ? LogLevel::Debug : LogLevel::Warn,
       "verbs: {} is out of use: {}; {} of {} are left", path.text(), why,
       std::count_if(paths_.begin(), paths_.end(), [](const Path& p) { return p.alive(); }),
       paths_.size());
  if (!ending && !anyAlive()) return noneLeft(path, why);
  // What broke it may have broken others that carry nothing just now: they are asked at once, not
  // when their turn comes.
  for (Path& other : paths_) {
    if (other.state == Path::State::Up && other.sends == 0) probe(other);
  }
}

void PathSet::noneLeft(const Path& path, const std::string& why) {
  // What broke the last one that worked is why there is none; a try since then only says that it
  // has not been mended.
  (lastChance() ? lastTry_ : lastProblem_) = fmt::format("{}: {}", path.text(), why);
  const bool hopeless =
      std::all_of(rails_.begin(), rails_.end(), [](const auto& rail) { return rail->broken; });
  if (!stood_ || settings_.lastChanceMs == 0 || hopeless) return end(noneLeftText());
  if (lastChance()) return;
  lastTry_.clear();
  logWarn("verbs: no queue pair to {} is left; new ones are tried for {} ms (HOCCL_TIMEOUT_MS)",
          path.rail->peerText, settings_.lastChanceMs);
  const std::uint64_t now = monotonicNs();
  lastChanceByNs_ = now + settings_.lastChanceMs * kNsPerMs;
  for (Path& each : paths_) each.retryAtNs = std::min(each.retryAtNs, now);
}

std::string PathSet::noneLeftText() const {
  std::string text = "no queue pair to it is left; the last was " + lastProblem_;
  if (!lastTry_.empty()) text += "; the last try since then was " + lastTry_;
  return text;
}

void PathSet::tendPaths() {
  const std::uint64_t now = monotonicNs();
  if (lastChance() && now >= lastChanceByNs_ && !gone() && !user_.ending()) {
    return end(fmt::format("{}; no new one has worked within {} ms (HOCCL_TIMEOUT_MS)",
                           noneLeftText(), settings_.lastChanceMs));
  }
  failedOver_ = pressing_ = lastChance();
  Mender::Order order;
  if (mender_.take(&order)) onMended(std::move(order));
  for (Path& path : paths_) {
    if (path.state == Path::State::Draining && drained(path, now)) drainedPath(path);
    if (path.reportDue) sendReport(path);
    failedOver_ =
        failedOver_ || (path.state != Path::State::Up && path.state != Path::State::Unusable);
  }
  mendNext();
  for (const Path& path : paths_) pressing_ = pressing_ || presses(path, now);
}

bool PathSet::presses(const Path& path, std::uint64_t now) const {
  switch (path.state) {
    case Path::State::Draining:
    case Path::State::Mending:
      return true;
    case Path::State::Resting:
      if (!path.peerReported || path.reportDue) return true;
      if (!connecting_) return path.peerTries;
      return !path.rail->broken && (path.backoffNs <= kSeldomNs || now >= path.retryAtNs);
    case Path::State::Offered:
    case Path::State::Probing:
    case Path::State::Up:
    case Path::State::Unusable:
      return path.reportDue;
  }
  return false;
}

/// All that was posted has come back, or what has not does not.
bool PathSet::drained(Path& path, std::uint64_t now) {
  if ((path.sends == 0 && path.receives == 0) || path.rail->broken) return true;
  if (now < path.drainByNs) return false;
  // This thread may have stood still: what came back in time may lie in the queue.
  if (!std::exchange(path.overdue, true)) path.rail->emptied = false;
  return path.rail->emptied;
}

/// Nothing more comes over it: the peer may be told what has.
void PathSet::drainedPath(Path& path) {
  if (std::exchange(path.unstopped, false)) path.pair = QueuePair();
  sendsOut_ -= path.sends;
  path.sends = path.receives = path.usedReceives = 0;
  path.bytes = 0;
  path.spent = true;
  path.state = Path::State::Resting;
  path.retryAtNs = retryAtNs(path);
  path.reportDue = true;
}

std::uint64_t PathSet::nextBackoffNs(const Path& path) const {
  const std::uint64_t first = settings_.firstBackoffMs * kNsPerMs,
                      last = settings_.lastBackoffMs * kNsPerMs;
  return path.backoffNs == 0 ? first : std::min(path.backoffNs * 2, last);
}

/// With none left there is no time to wait longer than at first.
std::uint64_t PathSet::retryAtNs(const Path& path) const {
  const std::uint64_t first = settings_.firstBackoffMs * kNsPerMs;
  return monotonicNs() + (lastChance() ? std::min(path.backoffNs, first) : path.backoffNs);
}

void PathSet::sendReport(Path& path) {
  verbs_wire::Report report;
  report.path = path.index;
  report.generation = path.generation;
  user_.fillReport(&report);
  verbs_wire::setText(report.why, path.problem);
  path.reportDue = !user_.tell(verbs_wire::kReport, &report, sizeof report) && !user_.ending();
}

/// The peer takes nothing more over that path: what it lacks goes again.
void PathSet::onReport(const verbs_wire::Report& report) {
  if (report.path >= paths_.size()) return nonsense("a report of a path that does not exist");
  Path& path = paths_[report.path];
  if (!connecting_ && report.generation == path.generation + 1) return onGivenUp(path, report);
  if (report.generation != path.generation || path.peerReported) return;
  takeDown(path, fmt::format("its side says: {}", verbs_wire::getText(report.why)));
  if (gone()) return;
  path.peerReported = true;
  press();
  user_.failedOver(path, report);
}

/// Accepting side: the peer has given up a new queue pair before this side has made its own.
/// Nothing has gone over it, but the peer goes on only when this side has given it up, too.
void PathSet::onGivenUp(Path& path, const verbs_wire::Report& report) {
  if (path.state == Path::State::Mending) {
    path.givenUp = report.generation;  // until the mender has done
    return;
  }
  if (path.state != Path::State::Resting) return nonsense("a report of a queue pair to come");
  path.generation = report.generation;
  path.problem = fmt::format("its side says: {}", verbs_wire::getText(report.why));
  path.peerTries = false;
  path.peerReported = path.reportDue = true;
  press();
}

// --- And into use again --------------------------------------------------------------------------

/// Gives the mender its next order. The rails take turns, and the paths of each: a NIC whose tries
/// take long (an address that is not resolved) leaves the others theirs.
void PathSet::mendNext() {
  const std::size_t all = paths_.size(), pairs = all / rails_.size();
  for (std::size_t i = 0, first = nextMend_; i < all && mender_.idle(); ++i) {
    const std::size_t turn = (first + i) % all;
    Path& path = paths_[turn % rails_.size() * pairs + turn / rails_.size()];
    if (path.state == Path::State::Resting) {
      mend(path);
    } else if (path.state == Path::State::Mending && path.answered) {
      connectMended(path);
    }
    if (!mender_.idle()) nextMend_ = turn + 1;
  }
}

/// Orders a new queue pair for a path that rests: on the connecting side when it is time, on the
/// other when the peer has one.
void PathSet::mend(Path& path) {
  if (!path.peerReported || path.reportDue) return;
  if (connecting_ ? path.rail->broken || monotonicNs() < path.retryAtNs : !path.peerTries) return;
  if (path.rail->broken) {
    // The peer is to give its try up, and hears why.
    path.generation = path.again.generation;
    path.problem = path.rail->problem;
    path.peerTries = path.peerReported = false;
    path.reportDue = true;
    return;
  }
  Mender::Order order;
  order.kind = connecting_ ? Mender::Order::Kind::Make : Mender::Order::Kind::MakeAndConnect;
  order.path = &path;
  order.old = std::move(path.pair);
  order.generation = path.generation + 1;
  if (!connecting_) {
    path.peer.number = path.again.number;
    path.peer.sequence = path.again.sequence;
    order.peer = path.peer;
    path.peerTries = false;
  }
  path.state = Path::State::Mending;
  mender_.place(std::move(order));
}

void PathSet::onMended(Mender::Order order) {
  Path& path = *order.path;
  path.pair = std::move(order.pair);
  if (path.state != Path::State::Mending) {
    // The peer has given this try up meanwhile.
    if (path.pair) (void)path.pair.toError();
    return;
  }
  if (order.kind == Mender::Order::Kind::Make && !order.status) {
    // The peer knows nothing of it.
    path.state = Path::State::Resting;
    path.backoffNs = nextBackoffNs(path);
    path.retryAtNs = retryAtNs(path);
    return;
  }
  if (order.kind != Mender::Order::Kind::Connect) {
    path.generation = order.generation;
    path.receives = path.pair ? shape_.receiveDepth : 0;
    path.peerReported = path.answered = path.spent = false;
  }
  if (path.givenUp == path.generation) {
    path.peerReported = true;
    return takeDown(path, "its side has given it up");
  }
  if (!order.status) return takeDown(path, order.status.message());
  if (path.rail->broken) return takeDown(path, path.rail->problem);
  if (order.kind == Mender::Order::Kind::Connect) {
    const verbs_wire::PathEnd end{path.index, path.generation, 0, 0};
    path.state = Path::State::Probing;
    if (!user_.tell(verbs_wire::kAgainGo, &end, sizeof end))
      return takeDown(path, "it cannot be told");
    return probe(path);
  }
  const verbs_wire::PathEnd end{path.index, path.generation, path.pair.number(),
                                path.pair.sequence()};
  if (!user_.tell(connecting_ ? verbs_wire::kAgain : verbs_wire::kAnswer, &end, sizeof end)) {
    takeDown(path, "it cannot be told");
  }
}

/// Accepting side: the peer has made a new queue pair.
void PathSet::onAgain(const verbs_wire::PathEnd& end) {
  if (connecting_ || end.path >= paths_.size()) return nonsense("a try of its own");
  Path& path = paths_[end.path];
  if (end.generation != path.generation + 1) return nonsense("a try out of turn");
  path.again = end;
  path.peerTries = true;
  press();
}

/// Connecting side: the peer has one, too, that is connected.
void PathSet::onAnswer(const verbs_wire::PathEnd& end) {
  if (!connecting_ || end.path >= paths_.size()) return nonsense("an answer to nothing");
  Path& path = paths_[end.path];
  if (end.generation != path.generation || path.state != Path::State::Mending) return;
  path.peer.number = end.number;
  path.peer.sequence = end.sequence;
  path.answered = true;  // until the mender is free
  press();
}

void PathSet::connectMended(Path& path) {
  path.answered = false;
  Mender::Order order;
  order.kind = Mender::Order::Kind::Connect;
  order.path = &path;
  order.pair = std::move(path.pair);
  order.peer = path.peer;
  order.generation = path.generation;
  mender_.place(std::move(order));
}

void PathSet::onAgainGo(const verbs_wire::PathEnd& end) {
  if (connecting_ || end.path >= paths_.size()) return nonsense("a go to nothing");
  Path& path = paths_[end.path];
  if (end.generation != path.generation || path.state != Path::State::Mending) return;
  path.state = Path::State::Probing;
  probe(path);
}

}  // namespace hoccl
