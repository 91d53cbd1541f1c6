// What a verbs connection does about queue pairs that fail. One that does is stopped on both sides
// before anything it carried goes again, so that no late write lands in a slot in use:
//
//   fails (a completion, or the peer's report) → stopped, until all that was posted has come back
//   → the peer is told what has arrived here → its report: what it lacks goes over other paths
//   → later: a new queue pair for the path, made by the connecting side's order → probed → in use

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/net/verbs/verbs_connection.h"

namespace hoccl {
namespace {

/// What a stopped queue pair had is given back within microseconds; a device that is gone never
/// does.
constexpr std::uint64_t kDrainNs = 1'000'000'000;
/// The next try comes after so long, and twice as long each time, up to the last.
constexpr std::uint64_t kFirstBackoffNs = 250'000'000, kLastBackoffNs = 30'000'000'000;
/// A path that has worked so long begins anew.
constexpr std::uint64_t kSteadyNs = 10'000'000'000;

}  // namespace

std::string Path::text() const {
  return fmt::format("{} to {}, queue pair {:#x} to {:#x}", rail->nic->text(),
                     rail->peerText.empty() ? "a peer" : rail->peerText, pair.number(),
                     peer.number);
}

bool VerbsConnection::anyAlive() const {
  return std::any_of(paths_.begin(), paths_.end(), [](const Path& p) { return p.alive(); });
}

bool VerbsConnection::say(std::uint16_t kind, const void* payload, std::size_t bytes) {
  return bundle_ && bundle_->sendControl(kind, {}, payload, bytes);
}

void VerbsConnection::gone(const std::string& why) {
  if (gone_.load(std::memory_order_relaxed)) return;
  goneText_ = why;
  gone_.store(true, std::memory_order_release);
  say(verbs_wire::kRefuse, why.data(), std::min(why.size(), controlSink_.buffer.size()));
}

// --- A path goes out of use ----------------------------------------------------------------------

void VerbsConnection::takeDown(Path& path, const std::string& why) {
  if (!path.alive() && path.state != Path::State::Mending) return;
  const std::uint64_t now = monotonicNs();
  const bool steady = path.state == Path::State::Up && now - path.upSinceNs > kSteadyNs;
  path.backoffNs = path.backoffNs == 0 || steady ? kFirstBackoffNs
                                                 : std::min(path.backoffNs * 2, kLastBackoffNs);
  path.state = Path::State::Draining;
  path.problem = why;
  path.drainByNs = now + kDrainNs;
  failedOver_ = true;
  if (path.pair) {
    if (Status status = path.pair.toError(); !status) {
      // Without a queue pair nothing lands either.
      logWarn("verbs: {}: {}", path.text(), status.message());
      path.pair = QueuePair();
      path.drainByNs = now;
    }
  }
  // What a peer that has ended leaves behind is no news.
  const bool ending = bundle_->endingSinceNs() != 0;
  logf(ending ? LogLevel::Debug : LogLevel::Warn, "verbs: {} is out of use: {}; {} of {} are left",
       path.text(), why,
       std::count_if(paths_.begin(), paths_.end(), [](const Path& p) { return p.alive(); }),
       paths_.size());
  if (!ending && !anyAlive()) {
    gone(fmt::format("no queue pair to it is left; the last was {}: {}", path.text(), why));
    return;
  }
  // What broke it may have broken others that carry nothing just now: they are asked at once, not
  // when their turn comes.
  for (Path& other : paths_) {
    if (other.state == Path::State::Up && other.sends == 0) probe(other);
  }
}

void VerbsConnection::tendPaths() {
  const std::uint64_t now = monotonicNs();
  failedOver_ = false;
  Mender::Order order;
  if (mender_.take(&order)) onMended(std::move(order));
  for (Path& path : paths_) {
    if (path.state == Path::State::Draining &&
        ((path.sends == 0 && path.receives == 0) || now >= path.drainByNs)) {
      drainedPath(path);
    }
    if (path.reportDue) sendReport(path);
    if (path.state == Path::State::Resting && mender_.idle()) mend(path);
    if (path.state == Path::State::Mending && path.answered && mender_.idle()) connectMended(path);
    failedOver_ =
        failedOver_ || (path.state != Path::State::Up && path.state != Path::State::Unusable);
  }
}

/// Nothing more comes over it: the peer may be told what has.
void VerbsConnection::drainedPath(Path& path) {
  sendsOut_ -= path.sends;
  path.sends = path.receives = path.usedReceives = 0;
  path.bytes = 0;
  path.state = Path::State::Resting;
  path.retryAtNs = monotonicNs() + path.backoffNs;
  path.reportDue = true;
}

void VerbsConnection::sendReport(Path& path) {
  verbs_wire::Report report;
  report.path = path.index;
  report.generation = path.generation;
  report.nextMessage = receiving_.missing();
  for (std::size_t i = 0; i < in_.size(); ++i) report.slot[i] = in_[i].got;
  verbs_wire::setText(report.why, path.problem);
  path.reportDue = !say(verbs_wire::kReport, &report, sizeof report) && !bundle_->gone();
}

/// The peer takes nothing more over that path: what it lacks goes again.
void VerbsConnection::onReport(const verbs_wire::Report& report) {
  if (report.path >= paths_.size()) return nonsense("a report of a path that does not exist");
  Path& path = paths_[report.path];
  if (report.generation != path.generation || path.peerReported) return;
  takeDown(path, fmt::format("its side says: {}", verbs_wire::getText(report.why)));
  if (gone_.load(std::memory_order_relaxed)) return;
  path.peerReported = true;
  for (std::uint32_t slot = 0; slot < out_.size(); ++slot) {
    if (out_[slot].failedOver(path.index, report.slot[slot]) &&
        std::find(queue_.begin(), queue_.end(), slot) == queue_.end()) {
      queue_.push_back(slot);
    }
    settleSlot(slot);
  }
  if (messagePath_ != path.index) return;
  messagePath_ = -1;
  sending_.failedOver(report.nextMessage);
  for (std::uint32_t i = 0; i < returned_.size(); ++i) {
    if (returned_[i] > 0) creditsDue_ |= std::uint64_t{1} << i;
  }
  consumedDue_ = true;
}

// --- And into use again --------------------------------------------------------------------------

/// Orders a new queue pair for a path that rests: on the connecting side when it is time, on the
/// other when the peer has one.
void VerbsConnection::mend(Path& path) {
  if (!path.peerReported || path.reportDue) return;
  if (connecting_ ? monotonicNs() < path.retryAtNs : !path.peerTries) return;
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

void VerbsConnection::onMended(Mender::Order order) {
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
    path.backoffNs = std::min(path.backoffNs * 2, kLastBackoffNs);
    path.retryAtNs = monotonicNs() + path.backoffNs;
    return;
  }
  if (order.kind != Mender::Order::Kind::Connect) {
    path.generation = order.generation;
    path.receives = path.pair ? shape_.receiveDepth : 0;
    path.peerReported = path.answered = false;
  }
  if (!order.status) return takeDown(path, order.status.message());
  if (order.kind == Mender::Order::Kind::Connect) {
    const verbs_wire::PathEnd end{path.index, path.generation, 0, 0};
    path.state = Path::State::Probing;
    if (!say(verbs_wire::kAgainGo, &end, sizeof end)) return takeDown(path, "it cannot be told");
    return probe(path);
  }
  const verbs_wire::PathEnd end{path.index, path.generation, path.pair.number(),
                                path.pair.sequence()};
  if (!say(connecting_ ? verbs_wire::kAgain : verbs_wire::kAnswer, &end, sizeof end)) {
    takeDown(path, "it cannot be told");
  }
}

/// Accepting side: the peer has made a new queue pair.
void VerbsConnection::onAgain(const verbs_wire::PathEnd& end) {
  if (connecting_ || end.path >= paths_.size()) return nonsense("a try of its own");
  Path& path = paths_[end.path];
  if (end.generation != path.generation + 1) return nonsense("a try out of turn");
  path.again = end;
  path.peerTries = true;
  failedOver_ = true;
}

/// Connecting side: the peer has one, too, that is connected.
void VerbsConnection::onAnswer(const verbs_wire::PathEnd& end) {
  if (!connecting_ || end.path >= paths_.size()) return nonsense("an answer to nothing");
  Path& path = paths_[end.path];
  if (end.generation != path.generation || path.state != Path::State::Mending) return;
  path.peer.number = end.number;
  path.peer.sequence = end.sequence;
  path.answered = true;  // until the mender is free
  failedOver_ = true;
}

void VerbsConnection::connectMended(Path& path) {
  path.answered = false;
  Mender::Order order;
  order.kind = Mender::Order::Kind::Connect;
  order.path = &path;
  order.pair = std::move(path.pair);
  order.peer = path.peer;
  order.generation = path.generation;
  mender_.place(std::move(order));
}

void VerbsConnection::onAgainGo(const verbs_wire::PathEnd& end) {
  if (connecting_ || end.path >= paths_.size()) return nonsense("a go to nothing");
  Path& path = paths_[end.path];
  if (end.generation != path.generation || path.state != Path::State::Mending) return;
  path.state = Path::State::Probing;
  probe(path);
}

// --- The control socket --------------------------------------------------------------------------

void VerbsConnection::takeControl() {
  controlReady_.store(false, std::memory_order_relaxed);
  while (bundle_->receiveControl(controlSink_)) {
  }
}

std::byte* VerbsConnection::ControlSink::place(const FrameHeader& header, Status* bad) {
  using namespace verbs_wire;
  const std::size_t expected =
      header.kind == kOffer                                                        ? sizeof(Offer)
      : header.kind == kReport                                                     ? sizeof(Report)
      : header.kind == kNudge                                                      ? sizeof(Nudge)
      : header.kind == kAgain || header.kind == kAnswer || header.kind == kAgainGo ? sizeof(PathEnd)
                                                                                   : 0;
  const bool fits =
      header.kind == kRefuse ? header.bytes <= buffer.size() : header.bytes == expected;
  if (fits) return buffer.data();
  *bad = Status::error(Code::Remote,
                       fmt::format("a message of kind {} and {} bytes that makes no sense to a "
                                   "verbs connection",
                                   header.kind, header.bytes));
  return nullptr;
}

void VerbsConnection::ControlSink::arrived(const FrameHeader& header) {
  using namespace verbs_wire;
  const auto as = [this]<typename T>(T value) {
    std::memcpy(&value, buffer.data(), sizeof value);
    return value;
  };
  if (header.kind == kGo && header.bytes == 0) return owner->onGo();
  if (header.bytes == 0) return owner->nonsense("an empty message");
  switch (header.kind) {
    case kOffer:
      return owner->onOffer(as(Offer()));
    case kRefuse:
      return owner->gone(
          fmt::format("its mover says: {}",
                      std::string(reinterpret_cast<const char*>(buffer.data()), header.bytes)));
    case kReport:
      return owner->onReport(as(Report()));
    case kAgain:
      return owner->onAgain(as(PathEnd()));
    case kAnswer:
      return owner->onAnswer(as(PathEnd()));
    case kAgainGo:
      return owner->onAgainGo(as(PathEnd()));
    case kNudge:
      // Only up to what can have been sent: a peer that counts wrongly would keep this mover awake.
      owner->nudgedUpTo_ =
          std::min(as(Nudge()).upTo, owner->receiving_.next + std::uint64_t{kMessageWindow});
      return;
    default:
      return owner->nonsense(fmt::format("a message of kind {}", header.kind));
  }
}

}  // namespace hoccl
