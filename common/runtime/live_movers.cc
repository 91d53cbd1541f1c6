#include "common/runtime/live_movers.h"

#include <utility>

namespace hoccl {
namespace {
constexpr useconds_t kNapUs = 100;
}

LiveMovers& LiveMovers::ofThisProcess() {
  static auto* movers = new LiveMovers;  // memory is freed while the process ends, too
  return *movers;
}

bool LiveMovers::inherited() const { return ::getpid() != owner_; }

void LiveMovers::add(MoverClient* client) {
  auto entry = std::make_shared<Entry>();
  entry->client = client;
  std::lock_guard lock(mutex_);
  entries_.push_back(std::move(entry));
}

void LiveMovers::remove(MoverClient* client) {
  std::shared_ptr<Entry> gone;
  {
    std::lock_guard lock(mutex_);
    for (auto i = entries_.begin(); i != entries_.end(); ++i) {
      if ((*i)->client != client) continue;
      gone = std::move(*i);
      entries_.erase(i);
      break;
    }
  }
  // A visitor's wait is bounded by its own deadline.
  while (gone && gone->visitors.load(std::memory_order_acquire) > 0) ::usleep(kNapUs);
}

void LiveMovers::visit(const std::function<void(const std::vector<MoverClient*>&)>& visitor) {
  std::vector<std::shared_ptr<Entry>> entries;
  {
    std::lock_guard lock(mutex_);
    entries = entries_;
    for (auto& entry : entries) entry->visitors.fetch_add(1, std::memory_order_relaxed);
  }
  std::vector<MoverClient*> clients;
  for (auto& entry : entries) clients.push_back(entry->client);
  visitor(clients);
  for (auto& entry : entries) entry->visitors.fetch_sub(1, std::memory_order_release);
}

}  // namespace hoccl
