#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/config.h"
#include "common/base/fd.h"
#include "common/base/shared_memory.h"
#include "common/base/time.h"
#include "common/gpu/p2p_level.h"
#include "common/gpu/peer_memory.h"
#include "common/runtime/mover_events.h"
#include "common/runtime/peer_spans.h"
#include "common/runtime/span_mapper.h"

namespace hoccl {

/// The mover's second thread: everything that may take long. Waits in epoll; no work, no CPU.
class MoverControl {
 public:
  struct Dependencies {
    const Driver* driver = nullptr;
    CUcontext context = nullptr;
    CUdevice device = 0;
    MoverQueues* queues = nullptr;
    Transport* transport = nullptr;
    PeerId self;
    int application = -1;  ///< socket to the application
    UniqueFd applicationPidfd;
  };
  MoverControl(Dependencies dependencies, const Config& config);
  ~MoverControl();

  /// The thread's body: until the application ends or `requestStop`.
  void run();
  void requestStop();

 private:
  struct Attempt {
    std::unique_ptr<Handshake> handshake;
    Deadline deadline;
    bool decided = false;  ///< accepting: what to do about it has been said, once
  };

  void takeRequests();
  void handle(ControlRequest& request);
  void import(const ControlRequest& request);
  void unmap(const ControlRequest& request);
  void connect(const ControlRequest& request);
  void applicationSays();
  Status addCommunicator(const void* data, std::size_t bytes, std::vector<UniqueFd>* fds);
  Reach reachOf(const std::string& gpuUuid, std::string* why);
  const P2pLimit& p2pLimit();
  [[nodiscard]] P2pLevel distanceTo(CUdevice peer) const;
  Status addStaging(const void* data, std::vector<UniqueFd>* fds);
  Status addSpan(const void* data, std::size_t bytes, std::vector<UniqueFd>& fds,
                 std::uint32_t* refused);
  Status makeScratch();
  void makeDetour();
  Status allocateDetour(Detour* detour);
  void acceptAll();
  void advanceAttempts();
  void greet(Attempt& attempt);
  void established(std::unique_ptr<Connection> connection);
  void takeFrom(const PeerId& peer);
  void takeFromAll();
  Status unmapPeerSpan(const ControlRequest& request);
  void shareSpan(const ControlRequest& request);
  void linkFailed(const PeerId& peer, const Status& status);
  void post(LoopEvent event);
  void watch(int fd);

  const Driver* driver_;
  CUcontext context_;
  CUdevice device_;
  bool pushOverPcie_, pullAlways_;
  std::optional<P2pLimit> p2pLimit_;  ///< once asked for
  MoverQueues* queues_;
  Transport* transport_;
  PeerId self_;
  int application_;
  UniqueFd applicationPidfd_;
  std::uint64_t timeoutMs_;
  StagingGeometry loopback_;
  UniqueFd epoll_;
  std::atomic<bool> stop_{false};

  std::map<PeerId, Attempt> connecting_;  ///< attempts of this side, by peer
  /// Peers that connected at the same time and keep theirs: until when theirs has to have come.
  std::map<PeerId, Deadline> crossed_;
  std::vector<Attempt> accepting_;
  /// Peers this side would have connected to, had it not accepted theirs: where they listen.
  std::map<PeerId, std::string> awaited_;
  /// What the application copies to and from by itself, by the number it gave it. Stays for good.
  struct StagingMemory {
    SharedMemory memory;
    HostRegistration registration;
  };
  std::map<std::uint64_t, StagingMemory> staging_;
  bool hasScratch_ = false;
  bool hasLoopback_ = false;
  /// A GPU that this one copies to directly.
  std::optional<CUdevice> neighbour_;
  bool detourTried_ = false;
  PeerMemory detour_;
  SpanMapper spans_;
  PeerSpans peerSpans_;
  std::map<PeerId, Connection*> connections_;  ///< owned by the loop until it retires them
};

}  // namespace hoccl
