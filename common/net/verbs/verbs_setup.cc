// How a verbs connection comes about: memory, queue pairs, and what the two ends tell each other of
// them.

#include <fmt/format.h>
#include <sys/epoll.h>

#include <cerrno>
#include <utility>

#include "common/base/log.h"
#include "common/net/verbs/verbs_connection.h"
#include "common/net/verbs/work_request.h"

namespace hoccl {
namespace {

constexpr std::size_t kPage = 4096;
/// Work requests a queue pair holds to send; what finds no room waits.
constexpr std::uint32_t kSendDepth = 512;
/// Receives beyond those that can be used up before this side looks.
constexpr std::uint32_t kSpareReceives = 32;

constexpr std::size_t roundUp(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

struct SlotFlags {
  Flag ready, credit, mirrored;
};

std::size_t headBytes(const StagingGeometry& geometry) {
  return roundUp(2 * geometry.slots * sizeof(SlotFlags) + 2 * kMessageWindow * sizeof(Message),
                 kPage);
}

/// What to change when no queue pair comes about.
const char* reachText(bool pairs) {
  return pairs
             ? ". Do these NICs reach each other (HOCCL_IB_HCA and HOCCL_IB_GID_INDEX choose them "
               "and their addresses)? HOCCL_TRANSPORT=tcp goes without them"
             : "";
}

/// The data socket of a bundle, which a verbs connection does not use.
struct NoData final : FrameSink {
  std::byte* place(const FrameHeader&, Status* bad) override {
    *bad = Status::error(Code::Remote, "bytes on the data socket of a verbs connection");
    return nullptr;
  }
  void arrived(const FrameHeader&) override {}
};

}  // namespace

Status VerbsConnection::create(const PeerId& peer, const StagingGeometry& geometry,
                               const VerbsSettings& settings, bool connecting,
                               std::unique_ptr<VerbsConnection>* out) {
  if (geometry.slots > Immediate::kMostSlots) {
    return Status::error(Code::InvalidConfig,
                         fmt::format("HOCCL_SLOTS={} are more than the verbs transport has: {}",
                                     geometry.slots, Immediate::kMostSlots));
  }
  SharedMemory memory;
  const std::size_t bytes =
      headBytes(geometry) + 2 * geometry.slots * roundUp(geometry.slotBytes, kPage);
  if (Status status = SharedMemory::create("hoccl-verbs", bytes, &memory); !status) return status;
  memory.closeFd();
  out->reset(new VerbsConnection(peer, geometry, std::move(memory), settings, connecting));
  return {};
}

VerbsConnection::VerbsConnection(const PeerId& peer, const StagingGeometry& geometry,
                                 SharedMemory memory, const VerbsSettings& settings,
                                 bool connecting)
    : peer_(peer),
      memory_(std::move(memory)),
      settings_(settings),
      connecting_(connecting),
      out_(geometry.slots),
      in_(geometry.slots),
      returned_(geometry.slots),
      noData_(std::make_unique<NoData>()) {
  auto* base = static_cast<std::byte*>(memory_.data());
  auto* flags = reinterpret_cast<SlotFlags*>(base);
  said_ = reinterpret_cast<Message*>(flags + 2 * geometry.slots);
  heard_ = said_ + kMessageWindow;
  std::byte* slots = base + headBytes(geometry);
  staging_.base = base;
  staging_.bytes = memory_.size();
  staging_.slotBytes = geometry.slotBytes;
  for (std::uint32_t i = 0; i < 2 * geometry.slots; ++i) {
    const Slot slot{.data = slots + i * roundUp(geometry.slotBytes, kPage),
                    .ready = &flags[i].ready,
                    .credit = &flags[i].credit,
                    .mirrored = &flags[i].mirrored};
    (i < geometry.slots ? staging_.out : staging_.in).push_back(slot);
  }
  queue_.reserve(geometry.slots);
}

Status VerbsConnection::makeRails(const Nics& all, const Extent& extent) {
  const Nics nics(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(extent.rails));
  settings_.qpsPerPeer = extent.pairs;
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return Status::fromErrno("epoll of a verbs connection", errno);
  if (Status status = mender_.open(); !status) return status;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = mender_.fd();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, mender_.fd(), &event) != 0) {
    return Status::fromErrno("epoll_ctl of a verbs connection", errno);
  }
  const unsigned pairs = settings_.qpsPerPeer;
  const auto slots = static_cast<std::uint32_t>(staging_.out.size());
  // Numbers of paths, and of pieces, have to fit into what names them.
  if (nics.size() * pairs > Immediate::kMostPieces) {
    return Status::error(Code::Internal, "more queue pairs than a connection can have");
  }
  const auto most = static_cast<std::uint32_t>(nics.size() * pairs);
  // Receives for all that the peer can send before this side gives anything back: even a mover that
  // sleeps, or is stopped, then turns nothing away.
  shape_ = {.sendDepth = kSendDepth,
            .receiveDepth = slots * most + kMessageWindow + slots + kSpareReceives,
            .inlineBytes = sizeof(Message)};
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
    rail->nic = nic;
    rail->adaptive = settings_.adaptiveRouting == VerbsSettings::Choice::On ||
                     (settings_.adaptiveRouting == VerbsSettings::Choice::Auto &&
                      nic->address().linkLayer == IBV_LINK_LAYER_INFINIBAND);
    if (Status status = CompletionQueue::create(
            *nic, pairs * (shape_.sendDepth + shape_.receiveDepth), &rail->completions);
        !status) {
      return status;
    }
    if (Status status =
            MemoryRegion::create(*nic, settings_, staging_.base, staging_.bytes, &rail->region);
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

Status VerbsConnection::open(BundleSetup& setup) {
  if (Status status = setup.take(noData_.get(), &bundle_); !status) return status;
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = bundle_->watchFd();
  bool added = ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bundle_->watchFd(), &event) == 0;
  // Once for what has come: the thread of the calls reads it.
  event.events = EPOLLIN | EPOLLET;
  event.data.fd = bundle_->controlFd();
  added = added && ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bundle_->controlFd(), &event) == 0;
  if (!added) return Status::fromErrno("epoll_ctl of a verbs connection", errno);
  sendOffer();
  return {};
}

void VerbsConnection::sendOffer() {
  verbs_wire::Offer offer;
  offer.rails = static_cast<std::uint32_t>(rails_.size());
  offer.pairs = settings_.qpsPerPeer;
  offer.base = reinterpret_cast<std::uint64_t>(staging_.base);
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
  say(verbs_wire::kOffer, &offer, sizeof offer);
}

void VerbsConnection::onOffer(const verbs_wire::Offer& offer) {
  if (std::exchange(offered_, true)) return nonsense("a second offer of queue pairs");
  if (offer.version != verbs_wire::kVersion) {
    return gone(fmt::format("verbs protocol {} here, {} there: the two builds of HOCCL differ",
                            verbs_wire::kVersion, offer.version));
  }
  if (offer.rails != rails_.size() || offer.pairs != settings_.qpsPerPeer) {
    return nonsense(fmt::format("{} NICs with {} queue pairs", offer.rails, offer.pairs));
  }
  peerBase_ = offer.base;
  for (std::size_t r = 0; r < rails_.size(); ++r) {
    const verbs_wire::RailOffer& its = offer.rail[r];
    rails_[r]->peerAddress = its.address;
    rails_[r]->peerKey = its.remoteKey;
    rails_[r]->peerText = fmt::format("{}:{} ({})", verbs_wire::getText(its.device), its.port,
                                      addressText(its.address));
  }
  for (Path& path : paths_) {
    const verbs_wire::RailOffer& its = offer.rail[path.index / settings_.qpsPerPeer];
    const verbs_wire::PairOffer& end = its.pairs[path.index % settings_.qpsPerPeer];
    path.peer = {its.address, end.number, end.sequence};
    if (its.address.linkLayer != path.rail->nic->address().linkLayer) {
      path.pair = QueuePair();
      path.state = Path::State::Unusable;
      path.problem = "one is InfiniBand and the other Ethernet";
    } else if (Status status = path.pair.connect(settings_, path.peer); !status) {
      takeDown(path, status.message());
    }
  }
  if (!anyAlive() && !gone_.load()) {
    gone(fmt::format("no queue pair: {}: {}", paths_[0].text(), paths_[0].problem));
  }
  if (!gone_.load()) say(verbs_wire::kGo, nullptr, 0);
}

/// The peer's queue pairs take what comes: whether something comes through is tried.
void VerbsConnection::onGo() {
  if (!offered_ || std::exchange(settled_, true)) return nonsense("a go out of turn");
  for (Path& path : paths_) {
    if (path.state != Path::State::Offered) continue;
    path.state = Path::State::Probing;
    probe(path);
  }
}

VerbsConnection::SetUp VerbsConnection::advanceSetUp() {
  watch();
  controlReady_.store(true, std::memory_order_relaxed);
  progress();
  if (peerGone()) {
    setUpStatus_ = Status::error(Code::Remote, fmt::format("{}: {}{}", bundle_->peerText(),
                                                           goneReason(), reachText(gone_.load())));
    return SetUp::Failed;
  }
  if (pathsUp() == 0) return SetUp::Pending;
  logInfo("verbs: {} queue pairs to {}, the first from {}", paths_.size(), bundle_->peerText(),
          paths_[0].text());
  return SetUp::Done;
}

}  // namespace hoccl
