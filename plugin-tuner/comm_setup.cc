#include "plugin-tuner/comm_setup.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstring>
#include <string_view>

#include "common/base/host_identity.h"
#include "common/base/log.h"
#include "plugin-tuner/process_core.h"
#include "plugin-tuner/real_nccl.h"

namespace hoccl {
namespace {

/// First phase: where a rank runs.
struct Where {
  std::uint64_t node = 0;  ///< what NCCL takes for one node
  std::uint64_t host = 0;  ///< equal where two processes can share memory
  std::uint64_t pid = 0;
  char hostName[kHostBytes] = {};
};

/// Second phase: where its mover is reached; all zero for a rank without pairs to steer.
struct MoverPlace {
  PeerId mover;
  char address[kAddressBytes] = {};
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
  if (!status) return status.message();
  for (const char* variable : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    const char* value = std::getenv(variable);
    if (value && std::string_view(value).find("expandable_segments:True") != std::string_view::npos) {
      return fmt::format("{}={}: memory of expandable segments cannot be mapped by the mover",
                         variable, value);
    }
  }
  return {};
}

bool steerable(const Where& a, const Where& b) { return a.node != b.node && a.host == b.host; }

}  // namespace

void CommSetup::plain(const std::string& reason, LogLevel level) {
  comm_->reason = reason;
  step_ = Step::Done;
  if (comm_->rank == 0) {
    logf(level, "communicator {:016x} of {} ranks stays with plain NCCL: {}", comm_->id, comm_->ranks,
         reason);
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
      if (added_) (void)mover_->endCommunicator(moverIndex_, OpKind::Close);
      plain(agreement_->verdict().reason);
      break;
    }
    switch (step_) {
      case Step::Where: onWhere(); break;
      case Step::Movers: onMovers(); break;
      case Step::Known:
        comm_->reachable = std::move(reachable_);
        comm_->sendSequence.assign(static_cast<std::size_t>(comm_->ranks), 0);
        comm_->recvSequence.assign(static_cast<std::size_t>(comm_->ranks), 0);
        comm_->moverIndex = moverIndex_;
        comm_->mover = added_ ? mover_ : nullptr;
        if (!added_) comm_->reason = "this rank has no peer on another node within reach";
        step_ = Step::Done;
        logInfo("communicator {:016x}: rank {} of {} is steered", comm_->id, comm_->rank, comm_->ranks);
        break;
      case Step::Begin:
      case Step::Done: break;
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

void CommSetup::begin() {
  const Config& config = ProcessCore::get().config();
  agreement_ = std::make_unique<Agreement>(Agreement::Options{
      .root = comm_->root,
      .key = comm_->key,
      .rank = static_cast<std::uint32_t>(comm_->rank),
      .nranks = static_cast<std::uint32_t>(comm_->ranks),
      .policyDigest = config.policyDigest(),
      .policyText = config.policyText(),
      .host = shortHostName(),
      .agreeTimeoutMs = config.agreeTimeoutMs,
      .timeoutMs = config.timeoutMs,
  });
  Where where;
  where.node = fnv(nodeKey());
  where.host = fnv(hostKey());
  where.pid = static_cast<std::uint64_t>(::getpid());
  setText(where.hostName, shortHostName());
  nextPhase(Step::Where, 1, pack(where), ownVeto());
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
  bool anyPair = false;
  for (std::size_t a = 0; a < places.size() && !anyPair; ++a) {
    for (std::size_t b = a + 1; b < places.size() && !anyPair; ++b) {
      anyPair = steerable(places[a], places[b]);
    }
  }
  if (!anyPair) {
    plain("no two ranks are on different nodes that the shm transport connects", LogLevel::Info);
    return;
  }
  const auto self = static_cast<std::size_t>(comm_->rank);
  bool own = false;
  reachable_.assign(places.size(), false);
  peers_.assign(places.size(), PeerRecord{});
  for (std::size_t i = 0; i < places.size(); ++i) {
    reachable_[i] = i != self && steerable(places[self], places[i]);
    own = own || reachable_[i];
    peers_[i].pid = places[i].pid;
    std::memcpy(peers_[i].host, places[i].hostName, sizeof peers_[i].host);
  }
  std::string veto;
  MoverPlace place;
  if (own) {
    int device = 0;
    Status status;
    if (callReal(realNccl.ncclCommCuDevice, comm_->comm, &device) != ncclSuccess) {
      status = Status::error(Code::Internal, "NCCL does not tell the communicator's device");
    }
    if (status) status = ProcessCore::get().moverFor(device, &comm_->context, &mover_);
    if (status) {
      place.mover = mover_->id();
      setText(place.address, mover_->address());
    } else {
      logError("rank {}: {}", comm_->rank, status.message());
      veto = status.message();
    }
  }
  nextPhase(Step::Movers, 2, pack(place), veto);
}

void CommSetup::onMovers() {
  const auto& payloads = agreement_->verdict().payloads;
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    MoverPlace place;
    if (!unpack(payloads[i], &place)) {
      plain(fmt::format("rank {} runs another build of HOCCL", i));
      return;
    }
    if (!reachable_[i]) continue;
    peers_[i].mover = place.mover;
    std::memcpy(peers_[i].address, place.address, sizeof peers_[i].address);
  }
  std::string veto;
  if (mover_) {
    Status status = mover_->addCommunicator(comm_->id, comm_->rank, peers_, &moverIndex_);
    added_ = status.ok();
    if (!status) {
      logError("rank {}: {}", comm_->rank, status.message());
      veto = status.message();
    }
  }
  nextPhase(Step::Known, 3, {}, veto);
}

}  // namespace hoccl
