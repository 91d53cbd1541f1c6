#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/base/shared_memory.h"
#include "common/gpu/stream_waits.h"
#include "common/runtime/mover_client.h"
#include "common/runtime/pair_counts.h"
#include "plugin-tuner/agreement.h"

namespace hoccl {

/// Where an operation went, and why it did not go the other way.
enum class Path : std::uint8_t {
  Staged,     ///< through the movers
  AppCopies,  ///< the same, by the application's copies to or from staging memory
  Direct,     ///< from GPU to GPU; the mover counts these, of what was counted as Staged
  OwnBlock,   ///< of the rank to itself, by a kernel of the application's stream (HOCCL_OWN_BLOCK)
  NcclSmall,  ///< under HOCCL_MIN_BYTES
  NcclUnsteered,  ///< the communicator is plain NCCL, for the reason it carries
  NcclPair,       ///< this pair of ranks cannot be reached by a transport
  NcclCapture,    ///< the stream is being captured
  kCount,
};
const char* pathName(Path path);

struct PathCounters {
  std::atomic<std::uint64_t> ops{0}, bytes{0};
};

/// How the ranks of a split find out which of them are in it together: all ranks of the parent tell
/// their color where the parent agrees.
struct RollCall {
  AgreementKey key;
  Tail root;
  int rank = 0, ranks = 0;  ///< of the parent
  std::int64_t color = 0;   ///< NCCL_SPLIT_NOCOLOR: in none
  std::vector<Tail> rankRoots;
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
  Tail root;  ///< where this communicator agrees, then where its descendants do
  std::shared_ptr<const RollCall> rollCall;  ///< of a split: before the ranks agree
  bool hasRoot = false;                      ///< the unique id came from a process with HOCCL
  std::uint64_t splits = 0, grows = 0;
  std::map<std::uint64_t, std::uint64_t>
      shrinks;                  ///< how many without the same ranks, by their hash
  std::vector<Tail> rankRoots;  ///< by rank: where what shrinks out of this communicator agrees

  CUcontext context = nullptr;
  MoverClient* mover = nullptr;  ///< null: plain NCCL
  StreamWaits* waits = nullptr;  ///< of the communicator's context; set with `mover`
  std::uint32_t moverIndex = 0;
  std::uint64_t moverGeneration = 0;  ///< of that index
  std::string reason;                 ///< why it is plain NCCL
  std::string transport;              ///< by which its movers reach each other: "shm", "shm+verbs"
  std::atomic<bool> ended{false};     ///< aborted or revoked: the mover knows it no more
  std::vector<bool> reachable;        ///< by rank; itself where it has a mover
  /// By rank: whether all other ranks can be reached from there. The same on all ranks.
  std::vector<bool> reachesAll;
  bool allReachAll = false;
  std::vector<bool> direct;  ///< by rank: a GPU of this node that may be copied to directly
  /// Numbers of the next operation with each peer: sends and receives, and shares in collectives.
  std::vector<std::uint64_t> sendSequence, recvSequence;
  std::vector<std::uint64_t> collectiveSendSequence, collectiveRecvSequence;
  /// Calls with each peer that were passed on to NCCL, those of groups that are still open as well
  /// (pair_counts.h).
  std::vector<std::uint64_t> passedSends, passedReceives;
  SharedMemory peerTable;
  PairCounts* pairCounts = nullptr;  ///< by rank, in `peerTable`; set with `mover`
  [[nodiscard]] PairDirection& counts(int peer, bool send) const {
    PairCounts& pair = pairCounts[peer];
    return send ? pair.sends : pair.receives;
  }
  [[nodiscard]] std::uint64_t& passed(int peer, bool send) {
    return (send ? passedSends : passedReceives)[static_cast<std::size_t>(peer)];
  }

  std::mutex setupMutex;
  std::unique_ptr<CommSetup> setup;  ///< while the ranks are agreeing; guarded by setupMutex
  std::atomic<bool> settingUp{false};
  std::mutex errorMutex;
  Status failed;  ///< set-up failure or a launch that could not be made; guarded by errorMutex
  std::atomic<bool> hasFailed{false};
  /// What ncclGetLastError returns, the newest in front, and what it may have returned before: the
  /// caller has a pointer to the text and no lock. Guarded by errorMutex.
  std::deque<std::string> lastErrors;
  static constexpr std::size_t kLastErrors = 64;
  void noteLastError(std::string text);

  PathCounters counters[static_cast<int>(Path::kCount)];
  std::mutex countMutex;
  bool leftMover = false;  ///< `moverIndex` may be another's; guarded by countMutex

  [[nodiscard]] bool steering() const { return mover != nullptr; }
  void count(Path path, std::uint64_t bytes) { count(path, 1, bytes); }
  /// Of an operation that goes another way after all.
  void recount(Path from, Path to, std::uint64_t bytes) {
    count(from, -1ull, -bytes);
    count(to, bytes);
  }
  struct Moved {
    std::uint64_t ops, bytes;
  };
  /// What has gone that way.
  [[nodiscard]] Moved moved(Path path) const;
  /// Fetches what the mover counts. Any thread.
  void countDirect();
  /// When the mover has ended the communicator: fetches it for the last time and leaves the index
  /// to others. Does nothing while another thread still waits for that end, who then leaves it.
  void leaveMover();
  /// Why the communicator cannot be used any more; ok while it can.
  [[nodiscard]] Status health();
  void fail(const Status& status);

 private:
  void count(Path path, std::uint64_t ops, std::uint64_t bytes) {
    PathCounters& counter = counters[static_cast<int>(path)];
    // One thread at a time uses a communicator, as NCCL demands; others only read.
    const auto add = [](std::atomic<std::uint64_t>& to, std::uint64_t n) {
      to.store(to.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
    };
    add(counter.ops, ops);
    add(counter.bytes, bytes);
  }
};

/// Communicators by NCCL's handle: look-ups take no lock. A removed one's memory is kept until many
/// more have been removed, since another thread may just be looking at it.
class CommTable {
 public:
  static constexpr std::size_t kCapacity = 1 << 14;  // power of two
  static constexpr std::size_t kKept = 256;          ///< removed ones
  /// What the removed ones that are not kept any more had counted.
  struct Forgotten {
    std::uint64_t communicators = 0;
    std::uint64_t ops[static_cast<int>(Path::kCount)] = {},
                  bytes[static_cast<int>(Path::kCount)] = {};
  };

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
  [[nodiscard]] Forgotten forgotten() const {
    std::lock_guard lock(mutex_);
    return forgotten_;
  }

 private:
  struct Entry {
    std::atomic<ncclComm_t> key{nullptr};
    std::atomic<SteeredComm*> value{nullptr};
  };
  static std::size_t hash(ncclComm_t comm);
  std::vector<Entry> entries_{kCapacity};
  mutable std::mutex mutex_;  ///< writers
  std::deque<std::unique_ptr<SteeredComm>> all_;
  std::deque<SteeredComm*> removed_;  ///< of all_, the one removed first in front
  Forgotten forgotten_;
};

}  // namespace hoccl
