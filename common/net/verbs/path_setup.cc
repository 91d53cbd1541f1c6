// How a set of paths comes about: queue pairs, and what the two ends tell each other of them.

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "common/base/log.h"
#include "common/net/verbs/path_set.h"

namespace hoccl {
namespace {

/// Work requests a queue pair holds to send; what finds no room waits.
constexpr std::uint32_t kSendDepth = 512;

}  // namespace

Status PathSet::make(const Nics& all, const PathExtent& extent, void* base, std::size_t bytes,
                     std::uint32_t receives) {
  const Nics nics(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(extent.rails));
  settings_.qpsPerPeer = extent.pairs;
  base_ = static_cast<std::byte*>(base);
  if (Status status = mender_.open(); !status) return status;
  const unsigned pairs = settings_.qpsPerPeer;
  // Numbers of paths, and of pieces, have to fit into what names them.
  if (nics.size() * pairs > Immediate::kMostPieces) {
    return Status::error(Code::Internal, "more queue pairs than a connection can have");
  }
  shape_ = {.sendDepth = kSendDepth, .receiveDepth = receives, .inlineBytes = kPathInlineBytes};
  for (const auto& nic : nics) {
    shape_.sendDepth = std::min(shape_.sendDepth, nic->mostSendRequests());
    shape_.receiveDepth = std::min(shape_.receiveDepth, nic->mostSendRequests());
    // A queue that overflows is broken; with fewer receives the NIC asks the peer to wait.
    const std::uint32_t each = nic->mostCompletions() / pairs;
    if (each < 2 * shape_.sendDepth) shape_.sendDepth = std::max(each / 2, 4u);
    shape_.receiveDepth =
        std::min(shape_.receiveDepth, std::max(each - std::min(each, shape_.sendDepth), 4u));
  }
  paths_.resize(nics.size() * pairs);
  std::size_t index = 0;
  for (const auto& nic : nics) {
    auto rail = std::make_unique<Rail>();
    rail->index = static_cast<std::uint32_t>(rails_.size());
    rail->nic = nic;
    rail->adaptive = settings_.adaptiveRouting == VerbsSettings::Choice::On ||
                     (settings_.adaptiveRouting == VerbsSettings::Choice::Auto &&
                      nic->address().linkLayer == IBV_LINK_LAYER_INFINIBAND);
    if (Status status = CompletionQueue::create(
            *nic, pairs * (shape_.sendDepth + shape_.receiveDepth), &rail->completions);
        !status) {
      return status;
    }
    if (Status status = MemoryRegion::create(*nic, settings_, base, bytes, &rail->region);
        !status) {
      return status;
    }
    for (unsigned i = 0; i < pairs; ++i, ++index) {
      Path& path = paths_[index];
      path.index = static_cast<std::uint8_t>(index);
      path.rail = rail.get();
      if (Status status = QueuePair::create(nic, rail->completions, settings_, shape_, &path.pair);
          !status) {
        return status;
      }
      const int error = postReceives(path.pair, path.index, path.generation, shape_.receiveDepth);
      if (error != 0) return Status::fromErrno(nic->text() + ": no receives can be posted", error);
      path.receives = shape_.receiveDepth;
    }
    rails_.push_back(std::move(rail));
  }
  return {};
}

void PathSet::offer() {
  verbs_wire::Offer offer;
  offer.rails = static_cast<std::uint32_t>(rails_.size());
  offer.pairs = settings_.qpsPerPeer;
  offer.trafficClass = settings_.trafficClass;
  offer.serviceLevel = settings_.serviceLevel;
  offer.base = reinterpret_cast<std::uint64_t>(base_);
  for (std::size_t r = 0; r < rails_.size(); ++r) {
    const Rail& rail = *rails_[r];
    verbs_wire::RailOffer& its = offer.rail[r];
    its.address = rail.nic->address();
    verbs_wire::setText(its.device, rail.nic->device());
    its.port = rail.nic->port();
    its.remoteKey = rail.region.remoteKey();
    for (unsigned i = 0; i < settings_.qpsPerPeer; ++i) {
      const QueuePair& pair = paths_[r * settings_.qpsPerPeer + i].pair;
      its.pairs[i] = {pair.number(), pair.sequence()};
    }
  }
  (void)user_.tell(verbs_wire::kOffer, &offer, sizeof offer);
}

void PathSet::onOffer(const verbs_wire::Offer& offer) {
  if (std::exchange(offered_, true)) return nonsense("a second offer of queue pairs");
  if (offer.version != verbs_wire::kVersion) {
    return end(fmt::format("verbs protocol {} here, {} there: the two builds of HOCCL differ",
                           verbs_wire::kVersion, offer.version));
  }
  if (offer.rails != rails_.size() || offer.pairs != settings_.qpsPerPeer) {
    return nonsense(fmt::format("{} NICs with {} queue pairs", offer.rails, offer.pairs));
  }
  peerBase_ = offer.base;
  if (!connecting_) {
    settings_.trafficClass = offer.trafficClass;
    settings_.serviceLevel = offer.serviceLevel & 15;
  }
  for (std::size_t r = 0; r < rails_.size(); ++r) {
    const verbs_wire::RailOffer& its = offer.rail[r];
    rails_[r]->peerAddress = its.address;
    rails_[r]->peerKey = its.remoteKey;
    rails_[r]->peerText = fmt::format("{}:{} ({})", verbs_wire::getText(its.device), its.port,
                                      addressText(its.address));
  }
  for (Path& path : paths_) {
    const verbs_wire::RailOffer& its = offer.rail[path.index / settings_.qpsPerPeer];
    const verbs_wire::PairOffer& far = its.pairs[path.index % settings_.qpsPerPeer];
    path.peer = {its.address, far.number, far.sequence};
    if (its.address.linkLayer != path.rail->nic->address().linkLayer) {
      path.pair = QueuePair();
      path.state = Path::State::Unusable;
      path.problem = "one is InfiniBand and the other Ethernet";
    } else if (Status status = path.pair.connect(settings_, path.peer); !status) {
      takeDown(path, status.message());
    }
  }
  if (!anyAlive() && !gone()) {
    end(fmt::format("no queue pair: {}: {}", paths_[0].text(), paths_[0].problem));
  }
  if (!gone()) (void)user_.tell(verbs_wire::kGo, nullptr, 0);
}

/// The peer's queue pairs take what comes: whether something comes through is tried.
void PathSet::onGo() {
  if (!offered_ || std::exchange(settled_, true)) return nonsense("a go out of turn");
  for (Path& path : paths_) {
    if (path.state != Path::State::Offered) continue;
    path.state = Path::State::Probing;
    probe(path);
  }
}

std::byte* PathSet::place(const FrameHeader& header, Status* bad) {
  using namespace verbs_wire;
  const std::size_t expected =
      header.kind == kOffer                                                        ? sizeof(Offer)
      : header.kind == kReport                                                     ? sizeof(Report)
      : header.kind == kAgain || header.kind == kAnswer || header.kind == kAgainGo ? sizeof(PathEnd)
                                                                                   : 0;
  const bool fits =
      header.kind == kRefuse ? header.bytes <= heard_.size() : header.bytes == expected;
  if (fits) return heard_.data();
  if (header.kind == kOffer) {
    *bad = Status::error(Code::Remote,
                         fmt::format("an offer of queue pairs of {} bytes, which takes {} here: "
                                     "the two builds of HOCCL differ",
                                     header.bytes, sizeof(Offer)));
    return nullptr;
  }
  *bad = Status::error(Code::Remote,
                       fmt::format("a message of kind {} and {} bytes that makes no sense to a "
                                   "verbs connection",
                                   header.kind, header.bytes));
  return nullptr;
}

void PathSet::arrived(const FrameHeader& header) {
  using namespace verbs_wire;
  const auto as = [this]<typename T>(T value) {
    std::memcpy(&value, heard_.data(), sizeof value);
    return value;
  };
  if (header.kind == kGo && header.bytes == 0) return onGo();
  if (header.bytes == 0) return nonsense("an empty message");
  switch (header.kind) {
    case kOffer:
      return onOffer(as(Offer()));
    case kRefuse:
      return end(fmt::format(
          "it says: {}", std::string(reinterpret_cast<const char*>(heard_.data()), header.bytes)));
    case kReport:
      return onReport(as(Report()));
    case kAgain:
      return onAgain(as(PathEnd()));
    case kAnswer:
      return onAnswer(as(PathEnd()));
    case kAgainGo:
      return onAgainGo(as(PathEnd()));
    default:
      return nonsense(fmt::format("a message of kind {}", header.kind));
  }
}

}  // namespace hoccl
