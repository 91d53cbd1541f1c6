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
  if (geometry.slots > kMostSlots) {
    return Status::error(Code::InvalidConfig,
                         fmt::format("HOCCL_SLOTS={} are more than the verbs transport has: {}",
                                     geometry.slots, kMostSlots));
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
      set_(*this, settings, connecting),
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

Status VerbsConnection::makeRails(const Nics& all, const PathExtent& extent) {
  const auto slots = static_cast<std::uint32_t>(staging_.out.size());
  // Receives for all that the peer can send before this side gives anything back: even a mover that
  // sleeps, or is stopped, then turns nothing away.
  const std::uint32_t receives =
      slots * extent.rails * extent.pairs + kMessageWindow + slots + kSpareReceives;
  if (Status status = set_.make(all, extent, staging_.base, staging_.bytes, receives); !status) {
    return status;
  }
  epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_) return Status::fromErrno("epoll of a verbs connection", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = set_.workFd();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, set_.workFd(), &event) != 0) {
    return Status::fromErrno("epoll_ctl of a verbs connection", errno);
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
  set_.offer();
  return {};
}

VerbsConnection::SetUp VerbsConnection::advanceSetUp() {
  watch();
  controlReady_.store(true, std::memory_order_relaxed);
  progress();
  if (peerGone()) {
    setUpStatus_ = Status::error(Code::Remote, fmt::format("{}: {}{}", bundle_->peerText(),
                                                           goneReason(), reachText(set_.gone())));
    return SetUp::Failed;
  }
  if (pathsUp() == 0) return SetUp::Pending;
  logInfo("verbs: {} queue pairs to {}, the first from {}", paths().size(), bundle_->peerText(),
          paths()[0].text());
  return SetUp::Done;
}

}  // namespace hoccl
