#include "common/net/tcp/socket_workers.h"

#include <fmt/format.h>
#include <linux/sockios.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <system_error>

#include "common/base/time.h"

namespace hoccl {
namespace {

constexpr std::size_t kRing = 128;  ///< transfers that wait to be sent
/// What one socket may move before its worker looks at the next.
constexpr std::size_t kBudget = 1 << 20;
constexpr int kSendsInARow = 8;
/// Rounds in which something moved, until events of the sockets that did not are looked for.
constexpr unsigned kRoundsPerLook = 16;
/// Pieces are not made smaller than this to reach more sockets.
constexpr std::uint64_t kSmallestPiece = 64 << 10;
/// In the middle of a payload a worker is woken only when so much is there, not by every segment.
constexpr std::uint64_t kWakeBytes = 128 << 10;

void ring(int eventFd) {
  const std::uint64_t one = 1;
  [[maybe_unused]] ssize_t put = ::write(eventFd, &one, sizeof one);
}

}  // namespace

struct SocketWorkers::Socket {
  Socket(UniqueFd fd, const FrameLimits& limits) : framed(std::move(fd), limits) {}
  FramedSocket framed;
  bool readable = true, writable = true;  // until the socket says otherwise
  bool hungUp = false;                    ///< the peer's end lies behind what there is to read
  bool paused = false;                    ///< the sink said not now
  bool held = false;                      ///< and again after everybody could know
  bool holding = false;                   ///< counted in holding_; until it has moved on
  bool ended = false;                     ///< brings nothing more
  bool sendEnded = false;
  int wakeBytes = 1;  ///< SO_RCVLOWAT
};

struct SocketWorkers::Worker {
  unsigned index = 0;
  UniqueFd epoll, event;
  std::vector<Socket> sockets;
  std::thread thread;
  alignas(kCacheLine) std::atomic<int> sleep{kAwake};
  std::atomic<bool> paused{false};  ///< a socket waits for resume()
  std::atomic<bool> resumed{false};
};

SocketWorkers::SocketWorkers(Sockets sockets, const BundleOptions& options, FrameSink* sink,
                             std::string peerText)
    : options_(options),
      sink_(sink),
      peerText_(std::move(peerText)),
      life_(std::move(sockets.life)),
      control_(sockets.control),
      watchEvent_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      ring_(kRing),
      dataSockets_(static_cast<unsigned>(sockets.data.size())),
      open_(dataSockets_) {
  const std::size_t threads =
      std::clamp<std::size_t>(options.threads, 1, std::max<std::size_t>(sockets.data.size(), 1));
  for (std::size_t i = 0; i < threads; ++i) {
    auto worker = std::make_unique<Worker>();
    worker->index = static_cast<unsigned>(i);
    workers_.push_back(std::move(worker));
  }
  const FrameLimits limits{
      .maxPayload = BundleOptions::kMaxPieceBytes, .readAhead = sizeof(FrameHeader), .queue = 1};
  for (std::size_t i = 0; i < sockets.data.size(); ++i) {
    workers_[i % threads]->sockets.emplace_back(std::move(sockets.data[i]), limits);
  }
}

SocketWorkers::~SocketWorkers() {
  stop_.store(true);
  for (auto& worker : workers_) {
    if (worker->event) ring(worker->event.get());
  }
  for (auto& worker : workers_) {
    if (worker->thread.joinable()) worker->thread.join();
    // In order, behind what the kernel has taken.
    for (Socket& socket : worker->sockets) ::shutdown(socket.framed.fd(), SHUT_WR);
  }
}

Status SocketWorkers::start() {
  if (!watchEvent_) return Status::fromErrno("eventfd", errno);
  for (auto& worker : workers_) {
    worker->epoll.reset(::epoll_create1(EPOLL_CLOEXEC));
    worker->event.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!worker->epoll || !worker->event) {
      return Status::fromErrno("epoll or eventfd of a socket thread", errno);
    }
    auto add = [&](int fd, std::uint32_t events, void* who) {
      epoll_event event{};
      event.events = events;
      event.data.ptr = who;
      return ::epoll_ctl(worker->epoll.get(), EPOLL_CTL_ADD, fd, &event) == 0;
    };
    bool added = add(worker->event.get(), EPOLLIN, &worker->event);
    for (Socket& socket : worker->sockets) {
      added = added && add(socket.framed.fd(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, &socket);
    }
    if (worker->index == 0) added = added && add(life_.get(), EPOLLIN | EPOLLRDHUP, &life_);
    if (worker->index == 0) watchControl(EPOLL_CTL_ADD, 0);
    if (!added) return Status::fromErrno("epoll_ctl of a socket thread", errno);
  }
  // Signals are for the application's own threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    for (auto& worker : workers_) {
      worker->thread = std::thread([this, each = worker.get()] { run(*each); });
      ::pthread_setname_np(
          worker->thread.native_handle(),
          fmt::format("{}-{}", options_.name, worker->index).substr(0, 15).c_str());
    }
  } catch (const std::system_error& error) {
    status = Status::fromErrno("cannot start a socket thread", error.code().value());
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

bool SocketWorkers::post(const Transfer& transfer) {
  if (ending()) return false;
  // Enough pieces for every socket to get some, and not more than need be.
  const std::uint64_t share = transfer.bytes / (2 * std::max(dataSockets_, 1u));
  const std::uint64_t piece = std::clamp(share / kSmallestPiece * kSmallestPiece, kSmallestPiece,
                                         std::max(options_.pieceBytes, kSmallestPiece));
  if (!ring_.post(transfer, piece)) return false;
  std::uint64_t pieces = (transfer.bytes + piece - 1) / piece;
  // After the post is visible (ring_.post); a worker looks again after it has said that it sleeps.
  for (std::size_t i = 0; i < workers_.size() && pieces > 0; ++i) {
    Worker& worker = *workers_[nextWake_++ % workers_.size()];
    if (worker.sleep.load(std::memory_order_seq_cst) != kCanSend) continue;
    wake(worker);
    --pieces;
  }
  return true;
}

void SocketWorkers::wake(Worker& worker) {
  if (worker.sleep.exchange(kAwake, std::memory_order_seq_cst) != kAwake) {
    ring(worker.event.get());
  }
}

void SocketWorkers::resume() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (auto& worker : workers_) {
    if (!worker->paused.load(std::memory_order_seq_cst)) continue;
    worker->resumed.store(true, std::memory_order_seq_cst);
    wake(*worker);
  }
}

void SocketWorkers::nudge() {
  const char byte = 0;
  // A full socket holds nudges the peer has not taken yet, and a closed one nobody to wake.
  [[maybe_unused]] ssize_t sent = ::send(life_.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void SocketWorkers::sayEnd() { ::shutdown(life_.get(), SHUT_WR); }

Status SocketWorkers::status() const {
  const std::lock_guard<std::mutex> lock(statusMutex_);
  return status_;
}

bool SocketWorkers::drained() const {
  if (gone()) return true;
  if (piecesSent_.load(std::memory_order_acquire) != ring_.posted()) return false;
  for (const auto& worker : workers_) {
    for (const Socket& socket : worker->sockets) {
      int unsent = 0;
      if (::ioctl(socket.framed.fd(), SIOCOUTQ, &unsent) == 0 && unsent > 0) return false;
    }
  }
  return true;
}

void SocketWorkers::end(const Status& why, bool now) {
  {
    const std::lock_guard<std::mutex> lock(statusMutex_);
    if (status_) status_ = why.inContext(peerText_);
  }
  std::uint64_t none = 0;
  const bool first = endingSinceNs_.compare_exchange_strong(none, monotonicNs());
  if (now) {
    cut_.store(true, std::memory_order_release);
    gone_.store(true, std::memory_order_release);
    ring(watchEvent_.get());
  }
  if (!first && !now) return;
  // The peer, if it lives, learns it by its own life socket.
  ::shutdown(life_.get(), SHUT_RDWR);
  for (auto& worker : workers_) {
    if (worker->event) ring(worker->event.get());
  }
}

/// Worker 0: the end is complete when every data socket has brought what it had, or after a moment.
void SocketWorkers::finishEnding() {
  if (gone() || !ending()) return;
  if (open_.load() > 0) {
    if (options_.keepHeld && holding_.load() > 0) return;
    const std::uint64_t sinceNs = std::max(endingSinceNs_.load(), lastBytesNs_.load());
    if (monotonicNs() < sinceNs + Bundle::kLastBytesNs) return;
  }
  gone_.store(true, std::memory_order_release);
  ring(watchEvent_.get());
}

void SocketWorkers::setHolding(Socket& socket, bool holding) {
  if (std::exchange(socket.holding, holding) == holding) return;
  if (holding) {
    holding_.fetch_add(1);
  } else {
    holding_.fetch_sub(1);
  }
}

void SocketWorkers::ended(Socket& socket, const Status& why, bool now) {
  if (std::exchange(socket.ended, true)) return;
  open_.fetch_sub(1);
  end(why, now);
}

/// The message that a nudge is about comes on the control socket, perhaps after the nudge.
void SocketWorkers::watchControl(int operation, std::uint32_t events) {
  epoll_event event{};
  event.events = events | EPOLLONESHOT;
  event.data.ptr = &control_;
  ::epoll_ctl(workers_[0]->epoll.get(), operation, control_, &event);
}

void SocketWorkers::awaitControlRoom() { watchControl(EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT); }

bool SocketWorkers::readLife() {
  char bytes[64];
  for (;;) {
    const ssize_t got = ::recv(life_.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0) {
      ring(watchEvent_.get());
      watchControl(EPOLL_CTL_MOD, EPOLLIN);
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    const int error = got < 0 ? errno : 0;
    // Nothing but its own probes is ever unanswered on this socket, so its time-out means the host.
    const bool host = error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
    end(host
            ? Status::error(Code::Remote, fmt::format("the host has not answered for {} ms "
                                                      "(HOCCL_TIMEOUT_MS)",
                                                      options_.timeoutMs))
            : Status::error(Code::Remote, "the peer closed the connection (its process has ended)"),
        host);
    return false;
  }
}

bool SocketWorkers::takeEvents(Worker& worker, int timeoutMs) {
  epoll_event events[32];
  const int count = ::epoll_wait(worker.epoll.get(), events, 32, timeoutMs);
  bool any = false;
  for (int i = 0; i < count; ++i) {
    if (events[i].data.ptr == &worker.event) {
      std::uint64_t rings = 0;
      [[maybe_unused]] ssize_t got = ::read(worker.event.get(), &rings, sizeof rings);
      any = true;
      continue;
    }
    if (events[i].data.ptr == &control_) {
      ring(watchEvent_.get());
      continue;
    }
    if (events[i].data.ptr == &life_) {
      if (lifeEnded_ || !readLife()) {
        lifeEnded_ = true;
        ::epoll_ctl(worker.epoll.get(), EPOLL_CTL_DEL, life_.get(), nullptr);
      }
      continue;
    }
    auto* socket = static_cast<Socket*>(events[i].data.ptr);
    if (events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) socket->readable = true;
    if (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) socket->hungUp = true;
    if (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) socket->writable = true;
    any = true;
  }
  return any;
}

bool SocketWorkers::sendOn(Socket& socket) {
  bool moved = false;
  for (int i = 0; i < kSendsInARow; ++i) {
    if (!socket.framed.sending()) {
      OutFrame frame;
      if (!ring_.take(&frame)) return moved;
      [[maybe_unused]] const bool queued = socket.framed.push(frame);
    }
    switch (socket.framed.send()) {
      case FramedSocket::Io::Idle:
        piecesSent_.fetch_add(1, std::memory_order_release);
        moved = true;
        break;
      case FramedSocket::Io::Failed:
        socket.sendEnded = true;
        end(socket.framed.status(), false);
        return true;
      default:
        socket.writable = false;
        return true;
    }
  }
  return moved;
}

/// The kernel says by itself if more has come than it is set to wait for.
void SocketWorkers::wakeAt(Socket& socket, std::uint64_t missing) {
  const int bytes = static_cast<int>(std::clamp<std::uint64_t>(missing, 1, kWakeBytes));
  if (bytes == socket.wakeBytes) return;
  if (::setsockopt(socket.framed.fd(), SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes) == 0) {
    socket.wakeBytes = bytes;
  }
}

bool SocketWorkers::receiveOn(Worker& worker, Socket& socket) {
  const FramedSocket::Io io = socket.framed.receive(*sink_, kBudget);
  if (ending()) lastBytesNs_.store(monotonicNs());  // before it is no longer counted as holding
  setHolding(socket, io == FramedSocket::Io::Idle);
  switch (io) {
    case FramedSocket::Io::Moved:
      socket.paused = false;
      return true;
    case FramedSocket::Io::Blocked:
      socket.paused = false;
      socket.readable = socket.hungUp;  // then what is behind is read as well
      wakeAt(socket, socket.framed.missing());
      return true;
    case FramedSocket::Io::Idle:
      if (socket.paused) {
        socket.held = true;
        return false;
      }
      // Asked once more after resume() has somebody to find.
      socket.paused = true;
      worker.paused.store(true, std::memory_order_seq_cst);
      std::atomic_thread_fence(std::memory_order_seq_cst);
      return true;
    case FramedSocket::Io::Ended:
      ended(socket,
            Status::error(Code::Remote, "the peer closed the connection (its process has ended)"),
            false);
      return true;
    case FramedSocket::Io::Failed:
      // Of a peer that dies in the middle of a frame the other sockets may still bring whole ones;
      // a frame that makes no sense ends everything at once.
      ended(socket, socket.framed.status(), socket.framed.nonsense());
      return true;
  }
  return false;
}

void SocketWorkers::run(Worker& worker) {
  unsigned rounds = 0;
  std::uint64_t idleSinceNs = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    if (worker.resumed.exchange(false, std::memory_order_seq_cst)) {
      worker.paused.store(false, std::memory_order_seq_cst);
      for (Socket& socket : worker.sockets) socket.paused = socket.held = false;
    }
    bool moved = false, canSend = false;
    const bool over = gone();
    for (Socket& socket : worker.sockets) {
      if (over) break;
      if (socket.readable && !socket.held && !socket.ended) moved |= receiveOn(worker, socket);
      if (socket.writable && !socket.sendEnded) moved |= sendOn(socket);
      canSend = canSend || (socket.writable && !socket.sendEnded);
    }
    if (worker.index == 0) finishEnding();
    if (moved) {
      idleSinceNs = 0;
      if (++rounds % kRoundsPerLook == 0) takeEvents(worker, 0);
      continue;
    }
    // The next message mostly comes soon, and waking takes longer than moving it does.
    const std::uint64_t now = monotonicNs();
    if (idleSinceNs == 0) idleSinceNs = now;
    if (!over && now - idleSinceNs < options_.spinUs * 1000) {
      if (!takeEvents(worker, 0)) ::sched_yield();
      continue;
    }
    // From here on whoever posts rings; what was posted before shows now.
    worker.sleep.store(canSend ? kCanSend : kCannotSend, std::memory_order_seq_cst);
    const bool work = (canSend && !over && ring_.any()) || worker.resumed.load() || stop_.load();
    if (!work) {
      // While the connection ends somebody has to look at the clock.
      const bool watching = worker.index == 0 && ending() && !over;
      takeEvents(worker, watching ? 10 : -1);
    }
    worker.sleep.store(kAwake, std::memory_order_seq_cst);
  }
}

}  // namespace hoccl
