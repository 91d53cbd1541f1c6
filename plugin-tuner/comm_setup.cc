#include "plugin-tuner/comm_setup.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string_view>

#include "common/base/host_identity.h"
#include "common/base/log.h"
#include "common/net/tcp/tcp_transport.h"
#include "common/net/transport_set.h"
#include "plugin-tuner/process_core.h"
#include "plugin-tuner/real_nccl.h"

namespace hoccl {
namespace {

/// First phase: where a rank runs.
struct Where {
  std::uint64_t node = 0;  ///< what NCCL takes for one node
  std::uint64_t host = 0;  ///< equal where two processes can share memory
  std::uint64_t pid = 0;
  char gpuUuid[48] = {};  ///< empty: not known
  char hostName[kHostBytes] = {};
  Tail root;  ///< where a communicator whose lowest rank it becomes agrees
};

/// Second phase: where its mover is reached; all zero for a rank without pairs to steer.
struct MoverPlace {
  PeerId mover;
  char shmAddress[kAddressBytes] = {};
  char tcpAddress[kAddressBytes] = {};
  char verbsAddress[kAddressBytes] = {};
};

template <typename T>
std::string pack(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
template <typename T>
bool unpack(const std::string& text, T* out) {
  if (text.size() != sizeof *out) return false;
  std::memcpy(out, text.data(), sizeof *out);
  return true;
}

std::uint64_t fnv(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3ull;
  return hash;
}

/// Why this process cannot steer, whatever the others say; empty if it can.
std::string ownVeto() {
  const Status& status = ProcessCore::get().configStatus();
  return status ? std::string() : status.message();
}

Agreement::Options agreementOptions() {
  const Config& config = ProcessCore::get().config();
  Agreement::Options options;
  options.host = shortHostName();
  options.agreeTimeoutMs = config.agreeTimeoutMs;
  options.timeoutMs = config.timeoutMs;
  return options;
}

/// Peers on other hosts come to it in vain. A verbs address is one of TCP, too, for the set-up.
bool listensOnLoopback(const std::string& tcpAddress) {
  SocketAddress address;
  BundleNonce nonce;
  return decodeTcpAddress(tcpAddress, &address, &nonce) && address.loopback();
}

/// How the movers of two ranks reach each other; null if they do not. HOCCL_TRANSPORT is part of the
/// policy, so that every rank answers alike.
const char* transportBetween(const Where& a, const Where& b) {
  const std::string& wanted = ProcessCore::get().config().transport;
  if (wanted == "tcp") return "tcp";
  if (wanted == "verbs") return "verbs";
  if (a.host == b.host) return "shm";
  return wanted == "shm" ? nullptr : "tcp";
}

/// Where `to` is reached. Between hosts `auto` prefers verbs where both have it; everybody knows both
/// movers' places, and so comes to the same answer.
std::string addressBetween(const MoverPlace& from, const MoverPlace& to,
                           const std::string& transport) {
  const bool both = from.verbsAddress[0] != 0 && to.verbsAddress[0] != 0;
  const bool prefer = transport == "tcp" && ProcessCore::get().config().transport == "auto" && both;
  if (prefer || transport == "verbs") {
    return TransportSet::prefixed("verbs", getText(to.verbsAddress));
  }
  return TransportSet::prefixed(transport,
                                getText(transport == "tcp" ? to.tcpAddress : to.shmAddress));
}

/// Two GPUs of a node, whose movers share memory. Whether they reach each other's memory, too, the
/// movers find out; where they do not, what they move is staged.
bool neighbours(const Where& a, const Where& b) {
  return a.node == b.node && a.host == b.host && a.gpuUuid[0] && b.gpuUuid[0] &&
         std::strcmp(a.gpuUuid, b.gpuUuid) != 0 && std::strcmp(transportBetween(a, b), "shm") == 0;
}

bool steerable(const Where& a, const Where& b) {
  if (a.node == b.node) return neighbours(a, b);
  return transportBetween(a, b) != nullptr;
}

/// The GPU of a communicator, as all processes of a machine know it; empty if the driver does not
/// tell.
std::string gpuOf(ncclComm_t comm) {
  int ordinal = 0;
  CUdevice device = 0;
  std::string uuid;
  const Driver* driver = nullptr;
  if (callReal(realNccl.ncclCommCuDevice, comm, &ordinal) != ncclSuccess ||
      !Driver::load(&driver) || driver->cuDeviceGet(&device, ordinal) != CUDA_SUCCESS ||
      !deviceUuid(driver, device, &uuid)) {
    return {};
  }
  return uuid;
}

}  // namespace

CommSetup::~CommSetup() {
  if (!added_ || comm_->mover) return;
  // Without operations there is nothing to wait for; an abort is bounded even if the mover is
  // stopped.
  if (Status status = mover_->endCommunicator(moverIndex_, OpKind::Abort); !status) {
    logError("rank {} of {}: {}", comm_->rank, comm_->ranks, status.message());
    return;
  }
  mover_->freeCommunicator(moverIndex_);
}

void CommSetup::plain(const std::string& reason, LogLevel level) {
  comm_->reason = reason;
  step_ = Step::Done;
  if (comm_->rank == 0) {
    logf(level, "communicator {:016x} of {} ranks stays with plain NCCL: {}", comm_->id,
         comm_->ranks, reason);
  }
}

bool CommSetup::advance() {
  if (step_ == Step::Begin) begin();
  while (step_ != Step::Done) {
    const Agreement::State state = agreement_->poll();
    if (state == Agreement::State::Pending) return false;
    if (state != Agreement::State::Done) {
      comm_->fail(agreement_->status().inContext("the ranks could not agree whether to steer"));
      logError("rank {} of {}: {}", comm_->rank, comm_->ranks, comm_->health().message());
      step_ = Step::Done;
      break;
    }
    if (!agreement_->verdict().steer) {
      plain(agreement_->verdict().reason);
      break;
    }
    switch (step_) {
      case Step::RollCall:
        onRollCall();
        break;
      case Step::Where:
        onWhere();
        break;
      case Step::Movers:
        onMovers();
        break;
      case Step::Known:
        comm_->reachable = std::move(reachable_);
        comm_->sendSequence.assign(static_cast<std::size_t>(comm_->ranks), 0);
        comm_->recvSequence.assign(static_cast<std::size_t>(comm_->ranks), 0);
        comm_->collectiveSendSequence.assign(static_cast<std::size_t>(comm_->ranks), 0);
        comm_->collectiveRecvSequence.assign(static_cast<std::size_t>(comm_->ranks), 0);
        comm_->passedSends.assign(static_cast<std::size_t>(comm_->ranks), 0);
        comm_->passedReceives.assign(static_cast<std::size_t>(comm_->ranks), 0);
        comm_->moverIndex = moverIndex_;
        if (added_) {
          comm_->moverGeneration = mover_->segment().communicator(moverIndex_).generation.load();
          comm_->pairCounts =
              pairCountsOf(comm_->peerTable.data(), static_cast<std::uint64_t>(comm_->ranks));
        }
        comm_->mover = added_ ? mover_ : nullptr;
        if (!added_) comm_->reason = "this rank has no peer within reach";
        step_ = Step::Done;
        logInfo("communicator {:016x}: rank {} of {} is steered", comm_->id, comm_->rank,
                comm_->ranks);
        break;
      case Step::Begin:
      case Step::Done:
        break;
    }
  }
  agreement_.reset();
  return true;
}

void CommSetup::nextPhase(Step step, std::uint32_t phase, std::string payload, std::string veto) {
  step_ = step;
  if (Status status = agreement_->start(phase, std::move(payload), std::move(veto)); !status) {
    comm_->fail(status.inContext("the ranks could not agree whether to steer"));
    logError("rank {} of {}: {}", comm_->rank, comm_->ranks, status.message());
    step_ = Step::Done;
  }
}

std::unique_ptr<Agreement> answerRollCall(const RollCall& call) {
  Agreement::Options options = agreementOptions();
  options.root = call.root;
  options.key = call.key;
  options.rank = static_cast<std::uint32_t>(call.rank);
  options.nranks = static_cast<std::uint32_t>(call.ranks);
  return std::make_unique<Agreement>(std::move(options));
}

void CommSetup::begin() {
  if (!comm_->rollCall) {
    tellWhere();
    return;
  }
  agreement_ = answerRollCall(*comm_->rollCall);
  nextPhase(Step::RollCall, 1, pack(comm_->rollCall->color), {});
}

/// From here on the ranks of the split are among themselves, in the process of the lowest of them:
/// the parent's own may end before they have agreed.
void CommSetup::onRollCall() {
  const auto& payloads = agreement_->verdict().payloads;
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    std::int64_t color = 0;
    if (!unpack(payloads[i], &color)) {
      plain(fmt::format("rank {} of the parent runs another build of HOCCL", i));
      return;
    }
    if (color != comm_->rollCall->color || i >= comm_->rollCall->rankRoots.size()) continue;
    comm_->root = comm_->rollCall->rankRoots[i];
    tellWhere();
    return;
  }
  plain("the roll call of the split does not name this rank's color");
}

void CommSetup::tellWhere() {
  const Config& config = ProcessCore::get().config();
  Agreement::Options options = agreementOptions();
  options.root = comm_->root;
  options.key = comm_->key;
  options.rank = static_cast<std::uint32_t>(comm_->rank);
  options.nranks = static_cast<std::uint32_t>(comm_->ranks);
  options.policyDigest = config.policyDigest();
  options.policyText = config.policyText();
  agreement_ = std::make_unique<Agreement>(std::move(options));
  Where where;
  where.node = fnv(nodeKey());
  where.host = fnv(hostKey());
  where.pid = static_cast<std::uint64_t>(::getpid());
  setText(where.gpuUuid, gpuOf(comm_->comm));
  setText(where.hostName, shortHostName());
  std::string veto = ownVeto();
  AgreementRoot& root = AgreementRoot::ofThisProcess();
  Status status =
      root.start({.agreeTimeoutMs = config.agreeTimeoutMs, .timeoutMs = config.timeoutMs});
  if (status) status = root.newRoot(&where.root);
  if (!status && veto.empty()) veto = status.message();
  nextPhase(Step::Where, 1, pack(where), veto);
}

void CommSetup::onWhere() {
  const auto& payloads = agreement_->verdict().payloads;
  std::vector<Where> places(payloads.size());
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    if (!unpack(payloads[i], &places[i])) {
      // Every rank sees the same payloads and so ends here.
      plain(fmt::format("rank {} runs another build of HOCCL", i));
      return;
    }
  }
  comm_->rankRoots.clear();
  for (const Where& place : places) comm_->rankRoots.push_back(place.root);
  comm_->root = comm_->rankRoots[0];  // where the process of the unique id may be none of its ranks
  bool anyPair = false;
  comm_->reachesAll.assign(places.size(), true);
  for (std::size_t a = 0; a < places.size(); ++a) {
    for (std::size_t b = a + 1; b < places.size(); ++b) {
      if (steerable(places[a], places[b])) {
        anyPair = true;
      } else {
        comm_->reachesAll[a] = comm_->reachesAll[b] = false;
      }
    }
  }
  comm_->allReachAll = std::all_of(comm_->reachesAll.begin(), comm_->reachesAll.end(),
                                   [](bool reaches) { return reaches; });
  if (!anyPair) {
    plain(ProcessCore::get().config().transport == "shm"
              ? "no two ranks are on different GPUs or nodes that the shm transport connects"
              : "all ranks are on one node, and not on different GPUs that share memory",
          LogLevel::Info);
    return;
  }
  const auto self = static_cast<std::size_t>(comm_->rank);
  const bool p2p = ProcessCore::get().config().p2p != 0;
  comm_->direct.assign(places.size(), false);
  bool own = false, otherHosts = false;
  reachable_.assign(places.size(), false);
  transports_.assign(places.size(), "");
  peers_.assign(places.size(), PeerRecord{});
  for (std::size_t i = 0; i < places.size(); ++i) {
    reachable_[i] = i != self && steerable(places[self], places[i]);
    own = own || reachable_[i];
    otherHosts = otherHosts || (reachable_[i] && places[i].host != places[self].host);
    if (reachable_[i]) transports_[i] = transportBetween(places[self], places[i]);
    comm_->direct[i] = p2p && i != self && neighbours(places[self], places[i]);
    peers_[i].direct = comm_->direct[i] ? 1 : 0;
    if (comm_->direct[i]) setText(peers_[i].gpuUuid, getText(places[i].gpuUuid));
    peers_[i].pid = places[i].pid;
    std::memcpy(peers_[i].host, places[i].hostName, sizeof peers_[i].host);
  }
  reachable_[self] = own;  // a rank's operations with itself go through its mover as well
  std::string veto;
  MoverPlace place;
  if (own) {
    int device = 0;
    Status status;
    if (callReal(realNccl.ncclCommCuDevice, comm_->comm, &device) != ncclSuccess) {
      status = Status::error(Code::Internal, "NCCL does not tell the communicator's device");
    }
    if (status)
      status = ProcessCore::get().moverFor(device, &comm_->context, &comm_->waits, &mover_);
    if (status) {
      place.mover = mover_->id();
      setText(place.shmAddress, mover_->shmAddress());
      setText(place.tcpAddress, mover_->tcpAddress());
      setText(place.verbsAddress, mover_->verbsAddress());
      const auto needs = [this](const char* transport) {
        return std::find(transports_.begin(), transports_.end(), transport) != transports_.end();
      };
      if (needs("tcp") && mover_->tcpAddress().empty()) {
        veto = fmt::format("its mover cannot be reached over tcp: {}", mover_->tcpProblem());
      } else if (needs("verbs") && mover_->verbsAddress().empty()) {
        veto = fmt::format("its mover cannot be reached over verbs: {}", mover_->verbsProblem());
      } else if (otherHosts && (listensOnLoopback(mover_->tcpAddress()) ||
                                listensOnLoopback(mover_->verbsAddress()))) {
        veto =
            "its mover cannot be reached from other hosts: no interface but loopback is up, or "
            "HOCCL_SOCKET_IFNAME or NCCL_SOCKET_IFNAME allows no other";
      }
      if (!veto.empty()) logError("rank {}: {}", comm_->rank, veto);
    } else {
      logError("rank {}: {}", comm_->rank, status.message());
      veto = status.message();
    }
  }
  nextPhase(Step::Movers, 2, pack(place), veto);
}

void CommSetup::onMovers() {
  std::set<std::string> used;
  const auto& payloads = agreement_->verdict().payloads;
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    MoverPlace place;
    if (!unpack(payloads[i], &place)) {
      plain(fmt::format("rank {} runs another build of HOCCL", i));
      return;
    }
    if (!reachable_[i]) continue;
    peers_[i].mover = place.mover;
    if (transports_[i].empty()) continue;  // this rank itself
    MoverPlace own;
    (void)unpack(payloads[static_cast<std::size_t>(comm_->rank)], &own);
    const std::string address = addressBetween(own, place, transports_[i]);
    setText(peers_[i].address, address);
    used.insert(address.substr(0, address.find(':')));
  }
  for (const std::string& each : used) {
    comm_->transport += (comm_->transport.empty() ? "" : "+") + each;
  }
  std::string veto;
  if (mover_) {
    Status status = mover_->addCommunicator(comm_->id, comm_->rank, peers_, &moverIndex_,
                                            &comm_->peerTable);
    added_ = status.ok();
    if (!status) {
      logError("rank {}: {}", comm_->rank, status.message());
      veto = status.message();
    }
  }
  nextPhase(Step::Known, 3, {}, veto);
}

}  // namespace hoccl
