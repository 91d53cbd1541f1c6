#include "plugin-net/rendezvous.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "plugin-net/devices.h"
#include "plugin-net/handle.h"

namespace hoccl::net_plugin {
namespace {

/// Codes of a refusal.
constexpr std::uint32_t kOtherProtocol = 1, kNoQueuePairs = 2;

/// What both have. None where one has no NIC: the sockets then carry everything.
PathExtent common(const VerbsGround* ground, const PathExtent& theirs) {
  if (ground == nullptr || theirs.rails == 0 || theirs.pairs == 0) return {};
  PathExtent both;
  both.rails = std::min(static_cast<std::uint32_t>(ground->nics.size()), theirs.rails);
  both.pairs =
      std::min({ground->settings.qpsPerPeer, theirs.pairs, Immediate::kMostPieces / both.rails});
  return both;
}

PathExtent whole(const VerbsGround* ground) {
  if (ground == nullptr) return {};
  return {static_cast<std::uint32_t>(ground->nics.size()), ground->settings.qpsPerPeer};
}

Status unreached(const Status& status) {
  return Status::error(
      status.code(),
      status.message() +
          ". Do these NICs reach each other (HOCCL_IB_HCA and HOCCL_IB_GID_INDEX choose them and "
          "their addresses)? HOCCL_TRANSPORT=tcp goes without them");
}

}  // namespace

// --- Accepting -----------------------------------------------------------------------------------

/// Answers a hello; an error only where this side is what fails.
Status Listener::welcome(Coming& coming) const {
  BundleSetup& setup = *coming.setup;
  if (const Status status = checkHello(setup.hello()); !status) {
    setup.refuse(kOtherProtocol, status.message());
    return {};
  }
  const PathExtent extent = common(ground_.get(), extentOf(setup.hello()));
  coming.end = std::make_unique<ReceiveEnd>(describe(setup.hello(), setup.peerText()),
                                            extent.rails > 0 ? ground_ : nullptr);
  if (extent.rails > 0) {
    if (Status status = coming.end->makeLink(extent); !status) {
      setup.refuse(kNoQueuePairs, status.message());
      return status;
    }
  }
  setup.accept(makeHello(extent));
  return {};
}

Status Listener::advance(Coming& coming, bool* stands) {
  *stands = false;
  if (!coming.attached) {
    const BundleSetup::State state = coming.setup->advance();
    if (state == BundleSetup::State::Pending) return {};
    // It knew the nonce, so it was the one that is waited for; no other will come.
    if (state == BundleSetup::State::Failed) return coming.setup->status();
    std::unique_ptr<Bundle> bundle;
    if (Status s = coming.setup->take(&coming.end->dataSink(), &bundle); !s) return s;
    coming.end->attach(std::move(bundle));
    coming.end->startLink();
    coming.attached = true;
  }
  const Status status = coming.end->advanceSetUp(stands);
  return status.ok() ? status : unreached(status);
}

Status Listener::accept(std::unique_ptr<ReceiveEnd>* out) {
  while (std::unique_ptr<BundleSetup> setup = listener_->accept()) {
    coming_.push_back({std::move(setup), nullptr, false});
    if (Status status = welcome(coming_.back()); !status) {
      const std::string peer = describe(coming_.back().setup->hello(), "its address");
      coming_.pop_back();
      return status.inContext(fmt::format("connection from {}", peer));
    }
  }
  for (std::size_t i = 0; i < coming_.size(); ++i) {
    bool stands = false;
    const Status status = advance(coming_[i], &stands);
    if (status.ok() && !stands) continue;
    Coming done = std::exchange(coming_[i], Coming());
    coming_.erase(coming_.begin() + static_cast<std::ptrdiff_t>(i));
    if (!status) {
      return status.inContext(
          fmt::format("connection from {}", describe(done.setup->hello(), done.setup->peerText())));
    }
    *out = std::move(done.end);
    return {};
  }
  return {};
}

// --- Connecting ----------------------------------------------------------------------------------

Status Connecting::begin(const Device& device, const void* handle, const BundleOptions& options,
                         std::uint64_t inlineBytes, int trafficClass,
                         std::unique_ptr<Connecting>* out) {
  ListenerAddress to;
  if (Status status = unpackHandle(handle, &to); !status) return status;
  auto connecting = std::make_unique<Connecting>();
  connecting->inlineBytes_ = inlineBytes;
  connecting->ground_ = device.ground;
  if (device.ground) {
    connecting->settings_ = device.ground->settings;
    if (Status s = connecting->settings_.takeTrafficClass(trafficClass, isInfiniBand(device)); !s) {
      return s;
    }
  }
  const Status status =
      connectBundle(to.address, to.nonce, device.interface.address,
                    makeHello(whole(device.ground.get())), options, &connecting->setup_);
  if (!status) {
    return status.inContext(fmt::format("to {} by {}", to.address.text(), device.interface.name));
  }
  *out = std::move(connecting);
  return {};
}

/// The sockets stand.
Status Connecting::attach() {
  if (Status status = checkHello(setup_->hello()); !status) return status;
  const PathExtent extent = extentOf(setup_->hello()), most = whole(ground_.get());
  if (extent.rails > most.rails || extent.pairs > most.pairs ||
      (extent.rails == 0) != (extent.pairs == 0)) {
    return Status::error(Code::Remote, fmt::format("its answer of {} NICs and {} queue pairs makes "
                                                   "no sense",
                                                   extent.rails, extent.pairs));
  }
  end_ = std::make_unique<SendEnd>(describe(setup_->hello(), setup_->peerText()), inlineBytes_,
                                   extent.rails > 0 ? ground_ : nullptr);
  if (extent.rails > 0) {
    if (Status status = end_->makeLink(settings_, extent); !status) return status;
  }
  std::unique_ptr<Bundle> bundle;
  if (Status status = setup_->take(&end_->dataSink(), &bundle); !status) return status;
  end_->attach(std::move(bundle));
  end_->startLink();
  return {};
}

Status Connecting::advance(std::unique_ptr<SendEnd>* out) {
  const auto at = [this] { return fmt::format("to {}", setup_->peerText()); };
  if (!end_) {
    const BundleSetup::State state = setup_->advance();
    if (state == BundleSetup::State::Pending) return {};
    if (state == BundleSetup::State::Failed) return setup_->status().inContext(at());
    if (Status status = attach(); !status) return status.inContext(at());
  }
  bool stands = false;
  if (Status status = end_->advanceSetUp(&stands); !status) return unreached(status);
  if (stands) *out = std::move(end_);
  return {};
}

}  // namespace hoccl::net_plugin
