#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "common/base/config.h"
#include "common/base/fd.h"
#include "common/base/shared_memory.h"
#include "common/gpu/host_registration.h"
#include "common/net/transport.h"
#include "common/runtime/import_drops.h"
#include "common/runtime/mapped_spans.h"
#include "common/runtime/mover_protocol.h"
#include "common/runtime/segment.h"
#include "common/runtime/staging_pool.h"

namespace hoccl {

/// The application's side of one mover: starts the process, gives it operations, notices its death.
/// One per process and GPU, for all communicators there; lives until the process ends.
class MoverClient {
 public:
  /// A launch slot taken for one stream of one group.
  struct Slot {
    std::uint32_t index = 0;
    std::uint64_t sequence = 0;
  };

  /// Starts the mover for the device of `context`, which is made current for the call. Bounded by
  /// HOCCL_TIMEOUT_MS for each step. Error: why there is no mover (executable missing, its own
  /// message, no answer). `memoryOpWaits`: StreamWaits::mayUseMemoryOps.
  static Status start(const Driver* driver, CUcontext context, const Config& config,
                      bool memoryOpWaits, std::unique_ptr<MoverClient>* out);
  ~MoverClient();

  [[nodiscard]] const PeerId& id() const { return id_; }
  /// Where its peers reach it by each transport; empty where it does not listen.
  [[nodiscard]] const std::string& shmAddress() const { return shmAddress_; }
  [[nodiscard]] const std::string& tcpAddress() const { return tcpAddress_; }
  /// Why `tcpAddress` is empty.
  [[nodiscard]] const std::string& tcpProblem() const { return tcpProblem_; }
  [[nodiscard]] const std::string& verbsAddress() const { return verbsAddress_; }
  /// Why `verbsAddress` is empty.
  [[nodiscard]] const std::string& verbsProblem() const { return verbsProblem_; }
  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] const Segment& segment() const { return segment_; }

  /// Tells the mover of a communicator and gives it an index. The mover knows it when this returns.
  /// `table` is what the two share of it (pairCountsOf).
  Status addCommunicator(std::uint64_t id, std::int32_t rank, const std::vector<PeerRecord>& peers,
                         std::uint32_t* index, SharedMemory* table);
  /// Ends a communicator: at once (Abort), or when its operations are over (Close). Returns when the
  /// mover has quiesced its copies, or is dead. Abort is bounded by HOCCL_TIMEOUT_MS; a mover that does
  /// not answer by then is killed.
  Status endCommunicator(std::uint32_t index, OpKind kind);
  /// Of one that has ended, when what the mover has counted is read: the index may be another's. False:
  /// it has not ended yet, since another thread waits for that (endCommunicator).
  bool freeCommunicator(std::uint32_t index);
  /// Gives the mover host memory that operations name by `id`. The mover has it registered when this
  /// returns. Bounded by HOCCL_TIMEOUT_MS and 5 s for each GB. Any thread; takes a lock.
  Status addStaging(std::uint64_t id, const SharedMemory& memory);
  /// Gives the mover segments of a span; the answer says whether it has mapped them. `answered` becomes
  /// false where there is none within HOCCL_TIMEOUT_MS. Any thread; takes a lock.
  Status addSpan(const AddSpan& message, std::span<const int> segments, MoverReply* reply,
                 bool* answered);
  /// What went wrong in that communicator; ok if nothing.
  [[nodiscard]] Status communicatorStatus(std::uint32_t index) const;

  /// Asks the mover to let go of imports (Drop, DropIdle). Sequence 0: it cannot be asked in time, or it
  /// is dead and has none.
  DropRequest askDrop(OpKind kind, std::uint64_t allocation, const Deadline& deadline);
  /// The same of all spans that reach into a range of addresses.
  DropRequest askDropSpans(CUdeviceptr address, std::size_t bytes, const Deadline& deadline);
  [[nodiscard]] ImportDrops& drops() const { return *drops_; }
  /// What the mover has of memory that has no handle.
  [[nodiscard]] MappedSpans& spans() const { return *spans_; }
  /// Memory for buffers that the mover cannot map.
  [[nodiscard]] StagingPool& staging() const { return *staging_; }

  // The launch path: any thread, no lock, no allocation, no system call unless the mover sleeps.
  /// Takes free launch slots, all or none; while too few are free it waits. Error: more than there are
  /// (HOCCL_FLAG_POOL), the mover is dead, or `cancelled` says so.
  Status takeSlots(std::span<Slot* const> slots, const std::function<bool()>& cancelled = {});
  /// Asks for the cache lines that the next launch will touch and that the GPU or the mover wrote last,
  /// so that they arrive while the thread is in the driver.
  void prefetchLaunch() const;
  /// Device addresses of a slot's flags.
  [[nodiscard]] CUdeviceptr startAddress(const Slot& slot) const {
    return registration_.deviceAddress(segment_.launch(slot.index).start);
  }
  [[nodiscard]] CUdeviceptr finishAddress(const Slot& slot) const {
    return registration_.deviceAddress(segment_.launch(slot.index).finish);
  }
  /// Takes the place in the op ring of an operation that `push` has to give it, whatever happens; false
  /// while the ring is full. Before the stream operations are issued: a locked instruction behind them
  /// waits until the GPU has its doorbell.
  [[nodiscard]] bool claim(std::uint64_t* place) { return segment_.tryClaim(place); }
  void push(const OpDescriptor& descriptor, std::uint64_t place) {
    segment_.fill(place, descriptor);
  }
  /// Gives the mover an operation whose slot's stream operations have been issued.
  void push(const OpDescriptor& descriptor);
  /// After the last push of a launch: wakes the mover if it sleeps.
  void ring();
  /// A slot none of whose stream operations has been issued.
  void giveBack(const Slot& slot);
  /// A slot whose start is on the stream, for a launch that is not handed over.
  void letGo(const Slot& slot);

 private:
  MoverClient() = default;
  Status spawn(const std::string& executable, int socket);
  Status ask(const void* request, std::size_t bytes, std::span<const int> fds,
             std::uint64_t boundMs, MoverReply* reply, bool* answered);
  Status ask(const void* request, std::size_t bytes, int fd, std::uint64_t boundMs);
  DropRequest askDrop(OpDescriptor descriptor, const Deadline& deadline);
  Status greet(const std::string& gpuUuid, bool memoryOpWaits);
  void watch();
  void releaseAll(const std::string& why);
  Status endUnresponsive(std::uint32_t index);
  bool tryTakeSlot(std::uint64_t sequence, Slot* slot);
  [[nodiscard]] std::uint32_t candidate(std::uint32_t last, std::uint32_t i) const;

  const Driver* driver_ = nullptr;
  CUcontext context_ = nullptr;
  std::uint64_t timeoutMs_ = 0;
  SharedMemory memory_;
  Segment segment_;
  HostRegistration registration_;
  UniqueFd bell_, socket_, moverPidfd_, stopWatch_;
  pid_t pid_ = -1;
  bool up_ = false;  ///< the mover has answered
  PeerId id_;
  std::string shmAddress_, tcpAddress_, tcpProblem_, verbsAddress_, verbsProblem_;
  std::string gpuUuid_;
  std::thread watcher_;
  bool silent_ = false;  ///< a request was not answered: a late answer would be taken for another's
  std::mutex control_;   ///< one request at a time on the socket; never taken on the launch path

  std::unique_ptr<ImportDrops> drops_;
  std::unique_ptr<MappedSpans> spans_;
  std::unique_ptr<StagingPool> staging_;
  std::unique_ptr<std::atomic<std::uint64_t>[]> lastSequence_;  ///< by slot
  std::atomic<std::uint64_t> nextSequence_{0};
  std::atomic<std::uint32_t> nextSlot_{0};
};

}  // namespace hoccl
