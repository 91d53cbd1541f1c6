#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/runtime/mover_client.h"
#include "plugin-tuner/agreement.h"

namespace hoccl {

/// Where an operation went, and why it did not go the other way.
enum class Path : std::uint8_t {
  Staged,          ///< through the movers
  NcclSmall,       ///< under HOCCL_MIN_BYTES
  NcclUnsteered,   ///< the communicator is plain NCCL, for the reason it carries
  NcclPair,        ///< this pair of ranks cannot be reached by a transport
  NcclCapture,     ///< the stream is being captured
  kCount,
};
const char* pathName(Path path);

struct PathCounters {
  std::atomic<std::uint64_t> ops{0}, bytes{0};
};

class CommSetup;

/// What HOCCL knows of one NCCL communicator.
struct SteeredComm {
  SteeredComm();
  ~SteeredComm();
  ncclComm_t comm = nullptr;
  std::uint64_t id = 0;  ///< the same on all ranks
  int rank = -1;
  int ranks = 0;
  AgreementKey key;
  Tail root;             ///< where this communicator, and its splits, agree
  bool hasRoot = false;  ///< the unique id came from a process with HOCCL
  std::uint64_t splits = 0;

  CUcontext context = nullptr;
  MoverClient* mover = nullptr;  ///< null: plain NCCL
  std::uint32_t moverIndex = 0;
  std::string reason;  ///< why it is plain NCCL
  std::vector<bool> reachable;  ///< by rank
  std::vector<std::uint64_t> sendSequence, recvSequence;  ///< steered operations, by peer

  std::mutex setupMutex;
  std::unique_ptr<CommSetup> setup;  ///< while the ranks are agreeing; guarded by setupMutex
  std::atomic<bool> settingUp{false};
  std::mutex errorMutex;
  Status failed;  ///< set-up failure or a launch that could not be made; guarded by errorMutex
  std::atomic<bool> hasFailed{false};
  std::string lastError;  ///< what ncclGetLastError returns; guarded by errorMutex

  PathCounters counters[static_cast<int>(Path::kCount)];

  [[nodiscard]] bool steering() const { return mover != nullptr; }
  void count(Path path, std::uint64_t bytes) {
    PathCounters& counter = counters[static_cast<int>(path)];
    counter.ops.fetch_add(1, std::memory_order_relaxed);
    counter.bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
  /// Why the communicator cannot be used any more; ok while it can.
  [[nodiscard]] Status health();
  void fail(const Status& status);
};

/// Communicators by NCCL's handle: look-ups take no lock. Entries are few and live long; a removed
/// one's memory is kept until the process ends, since another thread may just be looking at it.
class CommTable {
 public:
  static constexpr std::size_t kCapacity = 1 << 14;  // power of two

  [[nodiscard]] SteeredComm* find(ncclComm_t comm) const;
  /// Null if the table is full.
  SteeredComm* add(ncclComm_t comm);
  void remove(ncclComm_t comm);
  /// Visits live and removed ones, in the order of their creation.
  template <typename Visit>
  void forEach(Visit visit) {
    std::lock_guard lock(mutex_);
    for (auto& comm : all_) visit(*comm);
  }

 private:
  struct Entry {
    std::atomic<ncclComm_t> key{nullptr};
    std::atomic<SteeredComm*> value{nullptr};
  };
  static std::size_t hash(ncclComm_t comm);
  std::vector<Entry> entries_{kCapacity};
  std::mutex mutex_;  ///< writers
  std::vector<std::unique_ptr<SteeredComm>> all_;
};

}  // namespace hoccl
