#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/base/config.h"
#include "common/gpu/doorbell.h"
#include "common/gpu/host_registration.h"
#include "common/gpu/lane.h"
#include "common/runtime/import_keeper.h"
#include "common/runtime/link.h"
#include "common/runtime/mover_events.h"
#include "common/runtime/op.h"
#include "common/runtime/pair_window.h"
#include "common/runtime/segment.h"

namespace hoccl {

/// What is known of operations of one pair and direction that wait for the other side.
struct StallWatch {
  static constexpr std::uint64_t kNone = ~0ull;
  std::uint64_t front = kNone;  ///< the first that waited here at the last look
  std::uint64_t told = kNone;   ///< the last one that the peer has been told of
  /// The last one the peer has told of.
  std::uint64_t theirs = kNone, theirPassed = 0, theirBytes = 0;
};

/// A send that is over, all of its bytes being with the peer, and whose receive has not come yet.
struct LoneSend {
  std::uint64_t sequence = 0, passed = 0, bytes = 0;
};

/// A communicator inside the loop.
struct Communicator {
  struct Pair {
    PairWindows sends, receives;
    bool dead = false;
    bool asked = false;  ///< whether the communicator goes on there
    bool quiet = false;  ///< failed: no direct copy that is not announced will come from there
    std::string why;
    StallWatch sendWatch, receiveWatch;
    std::vector<LoneSend> loneSends;  ///< in no order; no more than slots, where their bytes lie
  };
  CommunicatorInfo info;
  std::vector<Pair> pairs;  ///< by rank
  /// Mirrors that are not over. They have no counterpart at a peer, so they take no number of any
  /// pair and are in no window: the count of the rank's operations with itself goes on as if there
  /// were none.
  std::vector<Op*> mirrors;
  CommunicatorRecord* record = nullptr;
  std::uint32_t pending = 0;    ///< operations
  std::uint32_t loneSends = 0;  ///< of all pairs
  std::uint32_t closesAsked = 0;
  bool failed = false;
  std::uint64_t settleByNs = 0;  ///< failed: until when its operations wait for their peers
  FailReason reason{};           ///< why, as its peers are told
};

/// The paper's CPU proxy: one thread that takes operations from the segment, moves their chunks
/// over the copy engines and the links, and ends their launches. It makes no call that can block,
/// takes no lock and, while it has something to do, makes no system call of its own.
class MoverLoop final : public LinkOwner {
 public:
  struct Dependencies {
    Segment segment;
    HostRegistration* segmentRegistration = nullptr;
    MoverQueues* queues = nullptr;
    std::array<std::unique_ptr<Lane>, SharedLanes::kCount> out, in, peer;
    std::unique_ptr<Doorbell> doorbell;  ///< of the application's GPU; none: it is not rung
  };
  MoverLoop(Dependencies dependencies, const Config& config);
  ~MoverLoop() override;

  /// Until a Stop event, and then until no copy is in flight.
  void run();

 private:
  // LinkOwner.
  SharedLanes& outLanes() override { return out_; }
  SharedLanes& inLanes() override { return in_; }
  SharedLanes& peerLanes() override { return peer_; }
  void movesDirectly(const Op& op) override;
  void lent(Op& op) override;
  void returned(Op& op, bool read) override;
  void borrow(Op& op, const Message& message) override;
  void refused(Op& op) override;
  bool mayGo(const Op& op) override;
  void directCopyTook(std::uint64_t bytes, std::uint64_t ns) override;
  FlagWrite finishWrite(const Op& op) override;
  void address(const Op& op, Message* message) override;
  void copyEnded(Op& op, std::uint64_t bytes) override;
  Claim claim(const Message& message, Op** op) override;
  void fatal(const Status& status) override;

  // One round of the loop; each says whether it found anything to do.
  bool takeOperations();
  bool takeEvents();
  bool pollStarts();
  bool progressLinks();
  void ringIfFinished();
  void takeLeave();
  void tryStop();
  void rest(bool moved);

  // Operations.
  void onDescriptor(const OpDescriptor& descriptor);
  Launch* launchOf(const OpDescriptor& descriptor);
  void admit(const OpDescriptor& descriptor, Communicator& communicator, Launch& launch);
  void admitMirror(Op* op, Communicator::Pair& pair);
  bool mapBuffer(Op* op);
  void arrived(Op* op, Op::Waiting what);
  void activate(Op* op);
  void match(Op* op, const PairWindow::Entry& entry);
  void mismatch(Communicator& communicator, Link* link, std::int32_t peer,
                std::uint64_t pairSequence, bool send, std::uint64_t own, std::uint64_t theirs);
  void failOp(Op* op);
  void finishOp(Op* op);
  void finishOutOfSequence(Op* op);
  void finishLaunch(Launch& launch);

  // Communicators and peers.
  Communicator* byId(std::uint64_t id);
  void onMessage(Link& link, const Message& message);
  static bool firstOfPair(const Op& op);
  void tellWaiting(const Op& op);
  void answerIfEnded(Link& link, const Message& message);
  void onReady(Link& link, const Message& message);
  void onFailed(Link& link, const Message& message);
  Link* linkTo(const PeerInfo& peer);
  void linkUp(LoopEvent& event);
  void peerGone(const PeerId& peer, const std::string& why);
  void pairEnded(Communicator& communicator, std::int32_t peer, bool takeAnnounced,
                 const std::string& why);
  void failCommunicator(Communicator& communicator, Code code, const std::string& text);
  void acknowledgeCloses();
  void tellPeers(Communicator& communicator, FailReason reason);
  static void tellPeer(Communicator& communicator, std::size_t rank, Link& link, FailReason reason);
  std::string describePeer(const Communicator& communicator, std::int32_t peer) const;

  // Sends and receives of which one is steered and the other is NCCL's.
  void tellStalled(std::uint64_t now);
  bool tellStalled(Communicator& communicator, std::size_t rank, bool send);
  void noteLoneSend(const Op& op);
  void receiveCame(Communicator& communicator, const Message& ready);
  void onStalled(Link& link, const Message& message);
  void onDisagree(Communicator& communicator, const OpDescriptor& descriptor);

  // Direct copies within the node.
  [[nodiscard]] Reach reachOf(const Op& op) const;
  void giveTurns(Launch& launch);
  void leaveTurn(const Op& op);
  void offer(Op* op, Message* ready);
  [[nodiscard]] bool tellOf(Link& link, const BufferRef& buffer);
  void spanShared(const LoopEvent& event);
  [[nodiscard]] static bool mayDetour(const Op& send);
  void decideRoute(Op* op, const PairWindow::Entry& entry);
  PeerImport* importOf(Link& link, std::uint64_t allocation, std::uint64_t offset,
                       std::uint64_t bytes);
  void spinFor(std::uint64_t bytes);
  void countDirect(const Op& op);
  void targetImported(const LoopEvent& event);
  void unmapTarget(const PeerId& peer, const BufferRef& which, CUdeviceptr address,
                   std::uint64_t serial);
  void releaseTarget(Op* op);
  void tendTargets(Link& link);
  void takeBack(std::uint64_t allocation);
  static void askToForget(Link& link, std::uint64_t allocation);
  void tellStaged(const Status& why);
  void onForgotten(Link& link, const Message& message);
  void releaseHolds(Link& link);
  [[nodiscard]] bool awaitsPeer(const Op& op) const;
  void settle(Communicator& communicator, std::int32_t peer);
  void settleOverdue();
  void giveUpLent(Communicator& communicator, std::int32_t peer);

  void request(ControlRequest request);
  void unmapImports();
  std::string describeUsers(const Import* import) const;

  Segment segment_;
  HostRegistration* segmentRegistration_;
  MoverQueues* queues_;
  SharedLanes out_, in_, peer_;
  std::unique_ptr<Doorbell> doorbell_;
  bool finished_ = false;  ///< a launch, for which has not been rung yet
  std::uint64_t spinNs_, pollMaxNs_, timeoutNs_;
  std::size_t slots_;        ///< of a pair of movers and direction
  std::uint64_t slotBytes_;  ///< of any staging slot, and so of the largest copy

  OpPool pool_;
  std::vector<Launch> launches_;                              ///< by slot
  std::vector<std::uint32_t> starting_;                       ///< slots whose start has not come
  std::vector<std::unique_ptr<Communicator>> communicators_;  ///< by index
  std::unordered_map<std::uint64_t, Communicator*> communicatorById_;
  std::map<PeerId, std::unique_ptr<Link>> links_;
  struct Dying {
    PeerId peer;
    std::string why;
    std::uint64_t sinceNs;
  };
  std::vector<Dying> dying_;  ///< peers that went, until what they sent before has been taken
  ImportKeeper imports_;
  std::vector<ControlRequest> requests_;  ///< those the queue had no room for
  std::size_t importCapacity_;
  std::uint32_t pendingOps_ = 0;
  /// Operations that have failed and wait for their peer: receives, for its word; sends, for what
  /// is lent.
  std::uint32_t unsettled_ = 0;
  std::uint64_t lookForOverdueNs_ = 0;   ///< when next
  bool toldStaged_ = false;              ///< that some memory of peers cannot be mapped
  bool abandoned_ = false;               ///< a dead peer's link is still there
  bool leaving_ = false;                 ///< and has a copy in flight
  std::vector<std::uint32_t> closable_;  ///< communicators to look at for a close, by index
  std::vector<Op*> scratch_;
  CopyPace pace_;                ///< of direct copies
  std::uint32_t lentTurns_ = 0;  ///< sends that have a turn and are lent
  bool stopping_ = false;
  bool stopped_ = false;
  bool broken_ = false;
  std::uint64_t stopDeadlineNs_ = 0;
  std::uint64_t lookForStallsNs_ = 0;  ///< when next
  bool untold_ = false;                ///< a lone send may have to be told: no sleep before
  std::uint64_t lastProgressNs_ = 0;
  std::uint64_t napNs_ = 0;
  std::uint64_t rounds_ = 0;
  std::uint64_t spinUntilNs_ = 0;  ///< while copies are in flight
};

}  // namespace hoccl
