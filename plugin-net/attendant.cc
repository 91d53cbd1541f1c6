#include "plugin-net/attendant.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include "common/base/fd.h"
#include "common/base/log.h"
#include "common/base/time.h"

namespace hoccl::net_plugin {

/// A connection, as the thread knows it.
struct Entry {
  std::mutex mutex;              ///< held while the thread works on it, and while it leaves
  Attended* attended = nullptr;  ///< null: it has left
  int controlFd = -1, workFd = -1;
  std::uint64_t dueNs = 0;  ///< when it is looked at; 0: once its sockets say something
  std::uint64_t turnsSeen = 0;
};

namespace {

/// What the peer says is the caller's for so long.
constexpr std::uint64_t kPatienceNs = 20'000'000;
constexpr int kEvents = 32;

}  // namespace

class Attendant {
 public:
  static Attendant& ofThisProcess() {
    static auto* const instance = new Attendant;
    return *instance;
  }

  void join(Attended& attended) {
    auto entry = std::make_shared<Entry>();
    entry->attended = &attended;
    entry->controlFd = attended.controlFd();
    entry->workFd = attended.workFd();
    attended.entry_ = entry;
    const std::lock_guard<std::mutex> life(lifeMutex_);
    if (!thread_.joinable()) start();
    {
      const std::lock_guard<std::mutex> lock(listMutex_);
      entries_.push_back(entry);
    }
    watch(EPOLL_CTL_ADD, entry->controlFd, EPOLLIN | EPOLLONESHOT);
    watch(EPOLL_CTL_ADD, entry->workFd, EPOLLIN);
  }

  void leave(Attended& attended) {
    const std::shared_ptr<Entry> entry = std::move(attended.entry_);
    {
      const std::lock_guard<std::mutex> turn(entry->mutex);
      entry->attended = nullptr;
    }
    const std::lock_guard<std::mutex> life(lifeMutex_);
    // A connection that has failed has closed its socket, whose number may be another's by now.
    if (attended.controlFd() == entry->controlFd) watch(EPOLL_CTL_DEL, entry->controlFd, 0);
    watch(EPOLL_CTL_DEL, entry->workFd, 0);
    {
      const std::lock_guard<std::mutex> lock(listMutex_);
      std::erase(entries_, entry);
      if (!entries_.empty()) return;
    }
    stop_.store(true, std::memory_order_release);
    const std::uint64_t one = 1;
    [[maybe_unused]] ssize_t put = ::write(wake_.get(), &one, sizeof one);
    thread_.join();
  }

 private:
  void start() {
    epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
    wake_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    watch(EPOLL_CTL_ADD, wake_.get(), EPOLLIN);
    stop_.store(false, std::memory_order_release);
    thread_ = std::thread([this] { run(); });
    ::pthread_setname_np(thread_.native_handle(), "hoccl-net-verbs");
  }
  void watch(int operation, int fd, std::uint32_t events) {
    if (fd < 0) return;
    epoll_event event{};
    event.events = events;
    event.data.fd = fd;
    (void)::epoll_ctl(epoll_.get(), operation, fd, &event);
  }

  void run() {
    std::vector<std::shared_ptr<Entry>> all;
    bool anyDue = false;
    while (!stop_.load(std::memory_order_acquire)) {
      epoll_event events[kEvents];
      const int count = ::epoll_wait(epoll_.get(), events, kEvents,
                                     anyDue ? static_cast<int>(kPatienceNs / 1'000'000) : -1);
      if (stop_.load(std::memory_order_acquire)) return;
      {
        const std::lock_guard<std::mutex> lock(listMutex_);
        all = entries_;
      }
      const std::uint64_t now = monotonicNs();
      anyDue = false;
      for (const std::shared_ptr<Entry>& entry : all) {
        const auto rings = [&](int fd) {
          return std::any_of(events, events + std::max(count, 0),
                             [fd](const epoll_event& event) { return event.data.fd == fd; });
        };
        const std::lock_guard<std::mutex> turn(entry->mutex);
        if (entry->attended == nullptr) continue;
        if (rings(entry->workFd)) {
          entry->attended->work();
          if (entry->dueNs == 0) entry->dueNs = now;  // what has been made is to be taken
        }
        if (rings(entry->controlFd) && entry->dueNs == 0) {
          entry->dueNs = now + kPatienceNs;
          entry->turnsSeen = entry->attended->turns_.load(std::memory_order_relaxed);
        }
        if (entry->dueNs != 0 && now >= entry->dueNs) look(*entry, now);
        anyDue = anyDue || entry->dueNs != 0;
      }
      all.clear();
    }
  }

  void look(Entry& entry, std::uint64_t now) {
    Attended& its = *entry.attended;
    const std::uint64_t turns = its.turns_.load(std::memory_order_relaxed);
    if (turns == entry.turnsSeen) {
      const Attended::Turn turn(its);
      if (turn) its.attend();
    }
    const Attended::Turn turn(its);
    const bool uneasy = !turn || its.uneasy();
    entry.turnsSeen = its.turns_.load(std::memory_order_relaxed);
    entry.dueNs = uneasy ? now + kPatienceNs : 0;
    if (!turn || its.controlFd() != entry.controlFd) return;  // it has failed: nothing comes
    watch(EPOLL_CTL_MOD, entry.controlFd, EPOLLIN | EPOLLONESHOT);
  }

  std::mutex lifeMutex_;  ///< of who joins and leaves; the thread does not take it
  std::mutex listMutex_;
  std::vector<std::shared_ptr<Entry>> entries_;
  UniqueFd epoll_, wake_;
  std::thread thread_;
  std::atomic<bool> stop_{false};
};

void Attended::join() { Attendant::ofThisProcess().join(*this); }
void Attended::leave() {
  if (entry_) Attendant::ofThisProcess().leave(*this);
}

}  // namespace hoccl::net_plugin
