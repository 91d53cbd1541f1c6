#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace hoccl {

class MoverClient;

/// The movers of this process, for those who know an allocation but not whose it is. No lock is
/// held while a visitor looks at them; a client that goes waits for its visitors.
class LiveMovers {
 public:
  static LiveMovers& ofThisProcess();
  /// This is a forked child: what it has inherited is its parent's.
  [[nodiscard]] bool inherited() const;

  void add(MoverClient* client);
  /// Returns when nobody looks at the client any more.
  void remove(MoverClient* client);
  void visit(const std::function<void(const std::vector<MoverClient*>&)>& visitor);

 private:
  struct Entry {
    MoverClient* client;
    std::atomic<int> visitors{0};
  };
  const pid_t owner_ = ::getpid();
  std::mutex mutex_;
  std::vector<std::shared_ptr<Entry>> entries_;
};

}  // namespace hoccl
