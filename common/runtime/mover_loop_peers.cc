// What the mover's loop does about communicators and peers: messages, links, failures, closes.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/runtime/mover_loop.h"

namespace hoccl {

namespace {

/// How long a peer that died is given for copies its driver may still be ending.
constexpr std::uint64_t kLastBreathNs = 100'000'000;

/// A size for messages; 0: one that was not steered and is not known here.
std::string describeSize(std::uint64_t bytes) {
  return bytes > 0 ? fmt::format("{} bytes", bytes)
                   : "fewer bytes than HOCCL_MIN_BYTES (which NCCL makes)";
}

}  // namespace

/// Peers that died: takes what they sent before, then ends what they will not send.
void MoverLoop::takeLeave() {
  const std::uint64_t now = monotonicNs();
  for (std::size_t i = 0; i < dying_.size();) {
    if (now - dying_[i].sinceNs < kLastBreathNs) {
      ++i;
      continue;
    }
    const Dying dying = std::move(dying_[i]);
    dying_.erase(dying_.begin() + static_cast<std::ptrdiff_t>(i));
    auto position = links_.find(dying.peer);
    std::vector<Op*> torn;
    if (position != links_.end()) {
      position->second->abandonPeer(&torn);
      releaseHolds(*position->second);
    }
    for (auto& communicator : communicators_) {
      if (!communicator) continue;
      for (std::size_t rank = 0; rank < communicator->info.peers.size(); ++rank) {
        if (communicator->info.peers[rank].mover != dying.peer) continue;
        const bool isTorn = std::any_of(torn.begin(), torn.end(), [&](const Op* op) {
          return op->communicator == communicator.get() &&
                 op->descriptor.peer == static_cast<std::int32_t>(rank);
        });
        settle(*communicator, static_cast<std::int32_t>(rank));
        pairEnded(*communicator, static_cast<std::int32_t>(rank), !isTorn, dying.why);
      }
    }
  }
  // A dead link goes when no copy touches its memory any more, and none is still to be made.
  leaving_ = abandoned_ = false;
  for (auto position = links_.begin(); position != links_.end();) {
    Link& link = *position->second;
    if (!link.abandoned() || link.needed()) {
      abandoned_ = abandoned_ || link.abandoned();
      leaving_ = leaving_ || (link.abandoned() && !link.holdsEarly());
      ++position;
      continue;
    }
    ControlRequest retire;
    retire.kind = ControlRequest::Kind::Retire;
    retire.peer = position->first;
    link.imports().abandon();
    tendTargets(link);
    link.dismantle(&retire.connection, &retire.registration);
    request(std::move(retire));
    position = links_.erase(position);
  }
}

/// Fails the communicator on both sides; each names both sizes. `link` is null where the peer has
/// gone.
void MoverLoop::mismatch(Communicator& communicator, Link* link, std::int32_t peer,
                         std::uint64_t pairSequence, bool send, std::uint64_t own,
                         std::uint64_t theirs) {
  if (link && link->up()) {
    Message message{};
    message.type = MessageType::Failed;
    message.slot = static_cast<std::uint32_t>(FailReason::SizeMismatch);
    message.communicator = communicator.info.id;
    message.source = communicator.info.rank;
    message.destination = peer;
    message.pairSequence = pairSequence;
    message.offset = send ? 1 : 0;
    message.bytes = own;
    message.length = theirs;
    link->send(message);
  }
  failCommunicator(communicator, Code::InvalidArgument,
                   fmt::format("{} of {} {} {} met a {} of {} there ({}): the two ranks' counts "
                               "differ",
                               send ? "send" : "receive", describeSize(own), send ? "to" : "from",
                               describePeer(communicator, peer), send ? "receive" : "send",
                               describeSize(theirs), describeSequence(pairSequence)));
}

Communicator* MoverLoop::byId(std::uint64_t id) {
  auto position = communicatorById_.find(id);
  return position == communicatorById_.end() ? nullptr : position->second;
}

std::string MoverLoop::describePeer(const Communicator& communicator, std::int32_t peer) const {
  const PeerInfo& info = communicator.info.peers[static_cast<std::size_t>(peer)];
  return fmt::format("rank {} (host {}, process {})", peer, info.host, info.pid);
}

void MoverLoop::onMessage(Link& link, const Message& message) {
  switch (message.type) {
    case MessageType::Ready:
      onReady(link, message);
      return;
    case MessageType::Failed:
      onFailed(link, message);
      return;
    case MessageType::Chunk:
    case MessageType::Direct:
    case MessageType::Pull:
      if (!link.announce(message)) break;
      answerIfEnded(link, message);
      return;
    case MessageType::Waiting:
      answerIfEnded(link, message);
      return;
    case MessageType::Stalled:
      onStalled(link, message);
      return;
    case MessageType::Handle:
      if (link.imports().tell(message)) return;
      break;
    case MessageType::Refused:
      if (!link.takeBack(message)) break;
      if (message.offset != 0) link.told().refused(message.length);
      return;
    case MessageType::Forget:
      link.imports().forget(message.turn);
      return;
    case MessageType::Forgotten:
      onForgotten(link, message);
      return;
    case MessageType::Settled: {
      Communicator* communicator = byId(message.communicator);
      if (communicator && communicator->failed && message.source >= 0 &&
          static_cast<std::size_t>(message.source) < communicator->pairs.size()) {
        settle(*communicator, message.source);
      }
      return;
    }
  }
  peerGone(link.peer(), fmt::format("its mover sent a message of type {} that makes no sense here",
                                    static_cast<std::uint32_t>(message.type)));
}

/// Whether nothing has been asked of that peer in this communicator yet. A peer that ended it when
/// there was no link could not tell; its mover may be asleep, and looks at no message until it is
/// woken. Once there is a link a peer tells of its end, so that once is enough.
bool MoverLoop::firstOfPair(const Op& op) {
  if (op.descriptor.peer == op.communicator->info.rank) return false;
  Communicator::Pair& pair = op.communicator->pairs[static_cast<std::size_t>(op.descriptor.peer)];
  return !std::exchange(pair.asked, true);
}

/// A send asks whether the communicator goes on there: a direct one says nothing before its receive
/// has come.
void MoverLoop::tellWaiting(const Op& op) {
  if (!firstOfPair(op)) return;
  Message message{};
  message.type = MessageType::Waiting;
  address(op, &message);
  op.link->send(message);
  op.link->connection()->nudge();
}

/// A communicator that ended here before there was a link could not tell this peer, whose bytes are
/// thrown away: it must not take them for received.
void MoverLoop::answerIfEnded(Link& link, const Message& message) {
  const Communicator* communicator = byId(message.communicator);
  if (communicator && !communicator->failed) return;
  Message answer = message;
  answer.type = MessageType::Failed;
  answer.slot =
      static_cast<std::uint32_t>(communicator ? communicator->reason : FailReason::Aborted);
  std::swap(answer.source, answer.destination);
  link.send(answer);
}

void MoverLoop::onReady(Link& link, const Message& message) {
  Communicator* communicator = byId(message.communicator);
  const bool known = communicator && !communicator->failed &&
                     message.source == communicator->info.rank && message.destination >= 0 &&
                     static_cast<std::size_t>(message.destination) < communicator->pairs.size();
  if (!known) {
    Message answer = message;
    answer.type = MessageType::Failed;
    answer.slot = static_cast<std::uint32_t>(FailReason::Aborted);
    link.send(answer);
    return;
  }
  Communicator::Pair& pair = communicator->pairs[static_cast<std::size_t>(message.destination)];
  PairWindow::Entry* entry = pair.sends.find(message.pairSequence);
  if (!entry) receiveCame(*communicator, message);
  if (!entry || entry->peerReady) return;  // over already on this side
  entry->peerReady = true;
  entry->peerBytes = message.bytes;
  entry->offer = message.turn;
  entry->offerOffset = message.offset;
  entry->pulls = message.slot != 0;
  if (entry->op) match(entry->op, *entry);
}

Claim MoverLoop::claim(const Message& message, Op** op) {
  Communicator* communicator = byId(message.communicator);
  if (!communicator || message.source < 0 ||
      static_cast<std::size_t>(message.source) >= communicator->pairs.size()) {
    return Claim::Unwanted;
  }
  PairWindow::Entry* entry =
      communicator->pairs[static_cast<std::size_t>(message.source)].receives.find(
          message.pairSequence);
  if (!entry) return Claim::Unwanted;
  // A direct copy began before the peer knew of the failure: its end has to be waited for.
  const bool overtaken =
      message.type == MessageType::Direct && entry->op && entry->op->failed && entry->op->offered;
  if (overtaken) {
    --unsettled_;
    *op = entry->op;
    return Claim::Ready;
  }
  if (communicator->failed) return Claim::Unwanted;
  if (!entry->op) return Claim::Early;
  if (entry->op->waiting != 0) return Claim::Early;
  *op = entry->op;
  if (entry->op->descriptor.bytes == message.bytes) return Claim::Ready;
  mismatch(*communicator, entry->op->link, message.source, message.pairSequence, false,
           entry->op->descriptor.bytes, message.bytes);
  return Claim::Mismatch;
}

void MoverLoop::onFailed(Link& link, const Message& message) {
  Communicator* communicator = byId(message.communicator);
  if (link.connection()->sharedSlots()) {
    // Behind the announcement of every direct copy of this pair. This side makes no further one:
    // what is not announced is failed below.
    Message answer{};
    answer.type = MessageType::Settled;
    answer.communicator = message.communicator;
    answer.source = message.destination;
    answer.destination = message.source;
    link.send(answer);
    // With nothing left to do there it may have gone to sleep before what has been lent to it in
    // the meantime came.
    if (link.lends()) link.connection()->nudge();
  }
  if (!communicator || message.source < 0 ||
      static_cast<std::size_t>(message.source) >= communicator->pairs.size()) {
    return;
  }
  const std::string who = describePeer(*communicator, message.source);
  // Nor does the peer, whose own part is failed or over.
  settle(*communicator, message.source);
  switch (static_cast<FailReason>(message.slot)) {
    case FailReason::SizeMismatch:
      failCommunicator(
          *communicator, Code::InvalidArgument,
          fmt::format("{} of {} met a {} of {} by {} ({}): the two ranks' counts differ",
                      message.offset ? "receive" : "send", describeSize(message.length),
                      message.offset ? "send" : "receive", describeSize(message.bytes), who,
                      describeSequence(message.pairSequence)));
      return;
    case FailReason::Aborted:
      pairEnded(*communicator, message.source, true,
                "it has aborted or destroyed the communicator");
      return;
    case FailReason::LocalError:
      pairEnded(*communicator, message.source, false,
                "it reports an error of its own: see its log");
      return;
  }
}

Link* MoverLoop::linkTo(const PeerInfo& peer) {
  auto [position, added] = links_.try_emplace(peer.mover);
  if (added) {
    position->second = std::make_unique<Link>(this, peer.mover, importCapacity_);
    ControlRequest connect;
    connect.kind = ControlRequest::Kind::Connect;
    connect.peer = peer.mover;
    connect.address = peer.address;
    request(std::move(connect));
  }
  return position->second.get();
}

void MoverLoop::linkUp(LoopEvent& event) {
  auto [position, added] = links_.try_emplace(event.peer);
  if (added) position->second = std::make_unique<Link>(this, event.peer, importCapacity_);
  Link& link = *position->second;
  link.establish(std::move(event.connection), std::move(event.registration));
  scratch_.clear();  // activating an operation may change the windows walked here
  for (auto& communicator : communicators_) {
    if (!communicator) continue;
    for (std::size_t rank = 0; rank < communicator->pairs.size(); ++rank) {
      if (communicator->info.peers[rank].mover != event.peer) continue;
      // It failed when there was no link to tell this peer by, and may be asleep when the peer
      // asks.
      if (communicator->failed) tellPeer(*communicator, rank, link, communicator->reason);
      auto collect = [&](PairWindow::Entry& entry) {
        if (entry.op && (entry.op->waiting & Op::kForLink)) scratch_.push_back(entry.op);
      };
      communicator->pairs[rank].sends.forEach(collect);
      communicator->pairs[rank].receives.forEach(collect);
    }
  }
  for (Op* op : scratch_) arrived(op, Op::kForLink);
}

void MoverLoop::peerGone(const PeerId& peer, const std::string& why) {
  auto position = links_.find(peer);
  if (position == links_.end() || position->second->leaving()) return;
  position->second->setLeaving();
  // A link that never stood has nothing to take leave of.
  const std::uint64_t now = monotonicNs();
  dying_.push_back({peer, why, position->second->up() ? now : now - kLastBreathNs});
}

/// Nothing more comes from that rank. Operations that can still end by themselves do (what was
/// announced is in the slots, unless `takeAnnounced` is false); any other fails the communicator.
void MoverLoop::pairEnded(Communicator& communicator, std::int32_t peer, bool takeAnnounced,
                          const std::string& why) {
  Communicator::Pair& pair = communicator.pairs[static_cast<std::size_t>(peer)];
  // Once more when the peer first aborts and then dies: what had been announced may now be torn.
  if (!pair.dead) pair.why = fmt::format("{}: {}", describePeer(communicator, peer), why);
  pair.dead = true;
  if (!takeAnnounced) {
    // Nor by a receive that comes only now: the copy behind an announcement may never be made.
    const auto link = links_.find(communicator.info.peers[static_cast<std::size_t>(peer)].mover);
    if (link != links_.end()) link->second->dropEarly(communicator.info.id, peer);
  }
  bool doomed = false;
  pair.sends.forEach([&](PairWindow::Entry& entry) {
    doomed = doomed || (entry.op && entry.op->issued < entry.op->descriptor.bytes);
  });
  pair.receives.forEach([&](PairWindow::Entry& entry) {
    if (!entry.op) return;
    const OpDescriptor& d = entry.op->descriptor;
    const std::uint64_t here =
        entry.op->announced +
        entry.op->link->earlyBytes(communicator.info.id, peer, d.pairSequence);
    doomed = doomed || !takeAnnounced || here < d.bytes;
  });
  if (doomed) failCommunicator(communicator, Code::Remote, pair.why);
}

void MoverLoop::failCommunicator(Communicator& communicator, Code code, const std::string& text) {
  if (communicator.failed) return;
  communicator.failed = true;
  // Less than the application waits for the end of an abort.
  communicator.settleByNs = monotonicNs() + timeoutNs_ / 2;
  CommunicatorRecord& record = *communicator.record;
  if (code != Code::Aborted) {
    logError("rank {} of communicator {:016x}: {}", communicator.info.rank, communicator.info.id,
             text);
    const std::size_t length = std::min(text.size(), sizeof record.errorText - 1);
    std::memcpy(record.errorText, text.data(), length);
    record.errorText[length] = 0;
  }
  record.errorCode.store(static_cast<std::uint32_t>(code), std::memory_order_release);
  tellPeers(communicator, code == Code::Aborted ? FailReason::Aborted : FailReason::LocalError);
  std::vector<Op*> all;
  for (Communicator::Pair& pair : communicator.pairs) {
    auto collect = [&](PairWindow::Entry& entry) {
      if (entry.op) all.push_back(entry.op);
    };
    pair.sends.forEach(collect);
    pair.receives.forEach(collect);
  }
  all.insert(all.end(), communicator.mirrors.begin(), communicator.mirrors.end());
  for (Op* op : all) failOp(op);
  for (auto& [peer, link] : links_) link->dropEarly(communicator.info.id);
}

void MoverLoop::tellPeers(Communicator& communicator, FailReason reason) {
  communicator.reason = reason;
  for (std::size_t rank = 0; rank < communicator.info.peers.size(); ++rank) {
    auto position = links_.find(communicator.info.peers[rank].mover);
    if (position == links_.end() || !position->second->up()) continue;
    tellPeer(communicator, rank, *position->second, reason);
  }
}

void MoverLoop::tellPeer(Communicator& communicator, std::size_t rank, Link& link,
                         FailReason reason) {
  if (communicator.pairs[rank].dead) return;
  Message message{};
  message.type = MessageType::Failed;
  message.slot = static_cast<std::uint32_t>(reason);
  message.communicator = communicator.info.id;
  message.source = communicator.info.rank;
  message.destination = static_cast<std::int32_t>(rank);
  link.send(message);
}

/// Communicators whose Abort or Close has nothing left to wait for end here, between two rounds, so
/// that nobody else has to expect it.
void MoverLoop::acknowledgeCloses() {
  for (std::uint32_t index : closable_) {
    Communicator* communicator = communicators_[index].get();
    if (!communicator || communicator->closesAsked == 0 || communicator->pending > 0) continue;
    if (!communicator->failed) tellPeers(*communicator, FailReason::Aborted);
    for (auto& [peer, link] : links_) link->dropEarly(communicator->info.id);
    CommunicatorRecord& record = *communicator->record;
    const std::uint32_t closes = communicator->closesAsked;
    communicatorById_.erase(communicator->info.id);
    communicators_[index].reset();
    record.state.store(static_cast<std::uint32_t>(CommunicatorState::Closed),
                       std::memory_order_release);
    record.closes.fetch_add(closes, std::memory_order_release);
  }
  closable_.clear();
}

/// A driver call failed. Everything ends in an error; then the process does, which ends what may
/// still be queued on its streams, and the application's watcher releases whatever waits for it.
void MoverLoop::fatal(const Status& status) {
  if (std::exchange(broken_, true)) return;
  logError("nothing can be moved any more: {}", status.withOrigin());
  for (auto& communicator : communicators_) {
    if (communicator) failCommunicator(*communicator, Code::Cuda, status.message());
  }
  stopping_ = true;
  stopDeadlineNs_ = monotonicNs() + timeoutNs_;
}

void MoverLoop::request(ControlRequest request) {
  if (!requests_.empty() || !queues_->toControl.tryPush(request)) {
    requests_.push_back(std::move(request));
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] ssize_t put = ::write(queues_->controlEventFd, &one, sizeof one);
}

void MoverLoop::unmapImports() {
  BufferRef which;
  for (CUdeviceptr address = 0; imports_.nextUnmap(&address, &which);) {
    takeBack(which.allocationId);
    ControlRequest unmap;
    unmap.buffer = which;
    unmap.kind = ControlRequest::Kind::Unmap;
    unmap.mapped = address;
    request(std::move(unmap));
  }
}

/// The operations that hold an import, for somebody who waits until it can go.
std::string MoverLoop::describeUsers(const Import* import) const {
  const Op* first = nullptr;
  auto lookAt = [&](const Op* op) {
    if (!first && op && op->import == import) first = op;
  };
  auto look = [&](const PairWindow::Entry& entry) { lookAt(entry.op); };
  for (const auto& communicator : communicators_) {
    if (!communicator) continue;
    for (Communicator::Pair& pair : communicator->pairs) {
      pair.sends.forEach(look);
      pair.receives.forEach(look);
    }
    for (const Op* mirror : communicator->mirrors) lookAt(mirror);
  }
  if (!first) return fmt::format("{} operations", import->users);
  // A mirror that could go on waits for what its send waits for.
  const bool follows = first->mirror() && first->waiting == 0 && first->partner;
  const Op& op = follows ? *first->partner : *first;
  const char* why = "its bytes are on the way";
  if (op.waiting & Op::kForStart) {
    why = "its stream has not reached it";
  } else if (op.waiting & Op::kForLink) {
    why = "the connection to the peer's mover does not stand yet";
  } else if (op.waiting & Op::kForImport) {
    why = "its buffer is just being mapped";
  } else if (op.waiting & Op::kForMirror) {
    why = "where the rank's own block goes is just being mapped";
  } else if (op.send() && !op.matched) {
    why = "the peer has not called its receive";
  } else if (op.descriptor.kind == OpKind::Recv && op.announced == 0) {
    why = "the peer has sent nothing";
  }
  const OpDescriptor& d = first->descriptor;
  const char* what = first->send() ? "send" : first->mirror() ? "copy of a send" : "receive";
  return fmt::format("{} operation{}, the first a {} of {} bytes {} {}: {}", import->users,
                     import->users == 1 ? "" : "s", what, d.bytes,
                     d.kind == OpKind::Recv ? "from" : "to",
                     describePeer(*first->communicator, d.peer), why);
}

}  // namespace hoccl
