#include "common/runtime/mover_control.h"

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/log.h"
#include "common/base/shared_memory.h"
#include "common/base/unix_socket.h"
#include "common/net/loopback/loopback_connection.h"
#include "common/runtime/link.h"
#include "common/runtime/mover_protocol.h"

namespace hoccl {
namespace {

constexpr int kTickMs = 100;  // while a set-up with a deadline is under way

/// Half of what this process may have at once, which becomes as many as the system lets it have: an
/// application's soft limit is often 1024, and each segment of a span takes one. None where hardly
/// more than that is left for what comes in messages, sockets and files.
std::size_t descriptorsForSpans() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  const rlimit raised{limit.rlim_max, limit.rlim_max};
  if (::setrlimit(RLIMIT_NOFILE, &raised) == 0) limit = raised;
  constexpr rlim_t kMost = 1 << 20, kForTheRest = 256;
  const rlim_t all = std::min(limit.rlim_cur, kMost);
  return static_cast<std::size_t>(all > kForTheRest ? std::min(all / 2, all - kForTheRest) : 0);
}

}  // namespace

MoverControl::MoverControl(Dependencies d, const Config& config)
    : driver_(d.driver),
      context_(d.context),
      device_(d.device),
      pushOverPcie_(config.p2p == 2),
      pullAlways_(config.p2p == 3),
      queues_(d.queues),
      transport_(d.transport),
      self_(d.self),
      application_(d.application),
      applicationPidfd_(std::move(d.applicationPidfd)),
      timeoutMs_(config.timeoutMs),
      loopback_{static_cast<std::uint32_t>(config.slots), config.slotBytes},
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      spans_(d.driver, descriptorsForSpans()),
      peerSpans_(d.driver, config.timeoutMs, [this] { takeFromAll(); }) {
  watch(application_);
  watch(applicationPidfd_.get());
  watch(queues_->controlEventFd);
  watch(transport_->listenFd());
}

MoverControl::~MoverControl() = default;

void MoverControl::watch(int fd) {
  if (fd < 0) return;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
}

void MoverControl::requestStop() {
  stop_.store(true, std::memory_order_release);
  const std::uint64_t one = 1;
  [[maybe_unused]] ssize_t put = ::write(queues_->controlEventFd, &one, sizeof one);
}

void MoverControl::run() {
  driver_->cuCtxSetCurrent(context_);
  while (!stop_.load(std::memory_order_acquire)) {
    epoll_event events[32];
    const bool timed = !connecting_.empty() || !crossed_.empty() || !accepting_.empty();
    const int count = ::epoll_wait(epoll_.get(), events, 32, timed ? kTickMs : -1);
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == applicationPidfd_.get()) {
        LoopEvent stop;
        stop.kind = LoopEvent::Kind::Stop;
        post(std::move(stop));
        ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
      } else if (fd == application_) {
        applicationSays();
      } else if (fd == queues_->controlEventFd) {
        std::uint64_t rings = 0;
        [[maybe_unused]] ssize_t got = ::read(fd, &rings, sizeof rings);
      } else if (fd == transport_->listenFd()) {
        acceptAll();
      } else {
        for (auto& [peer, connection] : connections_) {
          if (connection->watchFd() != fd) continue;
          peerSpans_.take(connection);
          if (connection->peerGone()) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
          post(LoopEvent{});  // wakes the loop, which looks at the connection itself
        }
      }
    }
    takeRequests();
    advanceAttempts();
  }
}

void MoverControl::post(LoopEvent event) {
  // The loop drains this queue in every round; it is full only if the loop has stopped.
  while (!queues_->toLoop.tryPush(event)) {
    if (stop_.load(std::memory_order_acquire)) return;
    ::usleep(100);
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] ssize_t put = ::write(queues_->loopEventFd, &one, sizeof one);
}

void MoverControl::takeRequests() {
  for (ControlRequest request; queues_->toControl.tryPop(&request);) handle(request);
}

void MoverControl::handle(ControlRequest& request) {
  switch (request.kind) {
    case ControlRequest::Kind::None:
      return;
    case ControlRequest::Kind::Import:
      import(request);
      return;
    case ControlRequest::Kind::Connect:
      connect(request);
      return;
    case ControlRequest::Kind::Unmap:
      unmap(request);
      return;
    case ControlRequest::Kind::ShareSpan:
      shareSpan(request);
      return;
    case ControlRequest::Kind::Retire:
      if (auto known = connections_.find(request.peer);
          known != connections_.end() && known->second == request.connection.get()) {
        connections_.erase(known);
      }
      peerSpans_.abandon(request.peer);
      request.registration.reset();
      request.connection.reset();
      return;
  }
}

void MoverControl::unmap(const ControlRequest& request) {
  Status status;
  switch (request.buffer.kind) {
    case BufferKind::Device:
      status = HOCCL_CU(driver_, cuIpcCloseMemHandle(request.mapped));
      break;
    case BufferKind::Span:
      status = request.serial ? unmapPeerSpan(request) : spans_.unmap(request.buffer.allocationId);
      break;
    case BufferKind::Staging:  // stays for good
      break;
  }
  if (!status) {
    logWarn("memory of {} stays mapped: {}", request.serial ? "a peer" : "the application",
            status.message());
  }
  LoopEvent unmapped;
  unmapped.kind = LoopEvent::Kind::Unmapped;
  unmapped.peer = request.peer;
  unmapped.serial = request.serial;
  unmapped.allocation = request.buffer.allocationId;
  post(std::move(unmapped));
}

void MoverControl::import(const ControlRequest& request) {
  LoopEvent event;
  event.kind = LoopEvent::Kind::Imported;
  event.allocation = request.buffer.allocationId;
  event.peer = request.peer;
  event.serial = request.serial;
  event.buffer = request.buffer;
  if (request.buffer.kind == BufferKind::Span && request.serial) {
    takeFrom(request.peer);
    event.status = peerSpans_.find(request.peer, request.buffer.allocationId, &event.address);
    post(std::move(event));
    return;
  }
  if (request.buffer.kind == BufferKind::Span) {
    // One that is mapped is in the loop's cache since then.
    event.status = Status::error(
        Code::Internal, fmt::format("an operation on memory at {:#x} that the mover has not "
                                    "been given",
                                    request.buffer.allocationBase));
    post(std::move(event));
    return;
  }
  if (request.buffer.kind == BufferKind::Staging) {
    auto known = staging_.find(request.buffer.allocationId);
    if (known == staging_.end()) {
      event.status = Status::error(Code::Internal,
                                   "an operation on staging memory that the mover "
                                   "has not been given");
    } else {
      event.address = reinterpret_cast<CUdeviceptr>(known->second.memory.data());
    }
    post(std::move(event));
    return;
  }
  CUipcMemHandle handle;
  static_assert(sizeof handle == kIpcHandleBytes);
  std::memcpy(&handle, request.buffer.ipcHandle, sizeof handle);
  event.status = HOCCL_CU(
      driver_, cuIpcOpenMemHandle(&event.address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
  if (!event.status) {
    event.status = event.status.inContext(
        fmt::format("the mover cannot map {}'s allocation at {:#x} ({} bytes)",
                    request.serial ? "a peer" : "the application", request.buffer.allocationBase,
                    request.buffer.allocationBytes));
  }
  post(std::move(event));
}

/// What was handed over before the messages that led here, even if nothing has told of it yet.
void MoverControl::takeFrom(const PeerId& peer) {
  const auto known = connections_.find(peer);
  if (known == connections_.end()) return;
  peerSpans_.take(known->second);
}

void MoverControl::takeFromAll() {
  for (auto& [peer, connection] : connections_) peerSpans_.take(connection);
  post(LoopEvent{});  // there may have been nudges
}

Status MoverControl::unmapPeerSpan(const ControlRequest& request) {
  takeFrom(request.peer);
  return peerSpans_.unmap(request.peer, request.buffer.allocationId);
}

void MoverControl::shareSpan(const ControlRequest& request) {
  LoopEvent event;
  event.kind = LoopEvent::Kind::SpanShared;
  event.peer = request.peer;
  event.buffer = request.buffer;
  const auto known = connections_.find(request.peer);
  event.status = known == connections_.end()
                     ? Status::error(Code::Remote, "its mover has gone")
                     : peerSpans_.share(known->second, spans_, request.buffer, &event.share);
  post(std::move(event));
}

void MoverControl::linkFailed(const PeerId& peer, const Status& status) {
  LoopEvent event;
  event.kind = LoopEvent::Kind::LinkFailed;
  event.peer = peer;
  event.status = status;
  post(std::move(event));
}

void MoverControl::connect(const ControlRequest& request) {
  const PeerId& peer = request.peer;
  if (connections_.count(peer) || connecting_.count(peer) || crossed_.count(peer)) return;
  if (peer == self_) {
    std::unique_ptr<Connection> loopback;
    if (Status status = LoopbackConnection::create(self_, loopback_, &loopback); !status) {
      linkFailed(peer, status.inContext("no staging memory for operations of a rank with itself"));
      return;
    }
    hasLoopback_ = true;
    makeDetour();  // before the link is up, so that the first operation can use it
    established(std::move(loopback));
    return;
  }
  // One from there that has been accepted is nearly there: a second one would break it off.
  for (const Attempt& each : accepting_) {
    if (!each.decided || !each.handshake->peer() || *each.handshake->peer() != peer) continue;
    awaited_[peer] = request.address;
    return;
  }
  Attempt attempt{nullptr, Deadline::afterMs(timeoutMs_)};
  if (Status status = transport_->connect(peer, request.address, &attempt.handshake); !status) {
    linkFailed(peer, status.inContext("its mover cannot be reached"));
    return;
  }
  watch(attempt.handshake->watchFd());
  connecting_.emplace(peer, std::move(attempt));
}

void MoverControl::acceptAll() {
  while (std::unique_ptr<Handshake> handshake = transport_->accept()) {
    watch(handshake->watchFd());
    accepting_.push_back({std::move(handshake), Deadline::afterMs(timeoutMs_)});
  }
}

/// Decides on a peer whose greeting has come. When both sides connect at once, the one with the
/// smaller id gives way.
void MoverControl::greet(Attempt& attempt) {
  const PeerId peer = *attempt.handshake->peer();
  if (connections_.count(peer)) {
    attempt.handshake->decide(Handshake::Decision::Refuse, "a connection from this mover stands");
    return;
  }
  if (auto own = connecting_.find(peer); own != connecting_.end()) {
    if (peer < self_) {
      attempt.handshake->decide(Handshake::Decision::Crossed, "crossed");
      return;
    }
    connecting_.erase(own);
  }
  crossed_.erase(peer);
  attempt.handshake->decide(Handshake::Decision::Accept, "");
}

void MoverControl::advanceAttempts() {
  for (auto position = accepting_.begin(); position != accepting_.end();) {
    Handshake& handshake = *position->handshake;
    Handshake::State state = handshake.advance();
    if (state == Handshake::State::Pending && handshake.peer() && !position->decided) {
      position->decided = true;
      greet(*position);
      state = handshake.advance();
    }
    if (state == Handshake::State::Pending && !position->deadline.passed()) {
      ++position;
      continue;
    }
    if (state == Handshake::State::Done) established(handshake.take());
    if (state == Handshake::State::Failed) {
      // A peer that closed has kept this side's connection instead, or is gone, which its link
      // tells.
      const Status why = handshake.status();
      logf(why.code() == Code::Remote ? LogLevel::Debug : LogLevel::Warn,
           "a connection to this mover was not made: {}", why.message());
    }
    const PeerId* peer = handshake.peer();
    const auto awaited = peer ? awaited_.find(*peer) : awaited_.end();
    if (awaited != awaited_.end()) {
      ControlRequest again;
      again.kind = ControlRequest::Kind::Connect;
      again.peer = awaited->first;
      again.address = awaited->second;
      awaited_.erase(awaited);
      position = accepting_.erase(position);
      connect(again);  // unless it stands now
      continue;
    }
    position = accepting_.erase(position);
  }
  for (auto position = connecting_.begin(); position != connecting_.end();) {
    Attempt& attempt = position->second;
    const PeerId peer = position->first;
    switch (attempt.handshake->advance()) {
      case Handshake::State::Pending:
        if (!attempt.deadline.passed()) {
          ++position;
          continue;
        }
        linkFailed(peer,
                   Status::error(Code::Timeout, fmt::format("its mover did not answer within {} ms "
                                                            "(HOCCL_TIMEOUT_MS)",
                                                            timeoutMs_)));
        break;
      case Handshake::State::Done:
        established(attempt.handshake->take());
        break;
      case Handshake::State::Crossed:
        crossed_.emplace(peer, Deadline::afterMs(timeoutMs_));
        break;
      case Handshake::State::Failed:
        linkFailed(peer, attempt.handshake->status().inContext("its mover refused the connection"));
        break;
    }
    position = connecting_.erase(position);
  }
  for (auto position = crossed_.begin(); position != crossed_.end();) {
    if (!position->second.passed()) {
      ++position;
      continue;
    }
    linkFailed(position->first,
               Status::error(Code::Timeout, "its mover's own connection never came"));
    position = crossed_.erase(position);
  }
}

void MoverControl::established(std::unique_ptr<Connection> connection) {
  LoopEvent event;
  event.kind = LoopEvent::Kind::LinkUp;
  event.peer = connection->peer();
  crossed_.erase(event.peer);
  const Staging& staging = connection->staging();
  if (Status status =
          HostRegistration::create(driver_, staging.base, staging.bytes, &event.registration);
      !status) {
    linkFailed(event.peer, status);
    return;
  }
  connections_[event.peer] = connection.get();
  watch(connection->watchFd());
  event.connection = std::move(connection);
  post(std::move(event));
}

}  // namespace hoccl
