#include "plugin-net/rendezvous.h"

#include <fmt/format.h>

#include "plugin-net/handle.h"

namespace hoccl::net_plugin {
namespace {

/// Codes of a refusal.
constexpr std::uint32_t kOtherProtocol = 1;

}  // namespace

Status Listener::accept(std::unique_ptr<ReceiveEnd>* out) {
  while (std::unique_ptr<BundleSetup> setup = listener_->accept()) {
    if (const Status status = checkHello(setup->hello()); !status) {
      setup->refuse(kOtherProtocol, status.message());
    } else {
      setup->accept(makeHello());
    }
    coming_.push_back(std::move(setup));
  }
  for (std::size_t i = 0; i < coming_.size(); ++i) {
    const BundleSetup::State state = coming_[i]->advance();
    if (state == BundleSetup::State::Pending) continue;
    const std::unique_ptr<BundleSetup> setup = std::move(coming_[i]);
    coming_.erase(coming_.begin() + static_cast<std::ptrdiff_t>(i));
    const std::string peer = describe(setup->hello(), setup->peerText());
    if (state == BundleSetup::State::Failed) {
      // It knew the nonce, so it was the one that is waited for; no other will come.
      return setup->status().inContext(fmt::format("connection from {}", peer));
    }
    auto end = std::make_unique<ReceiveEnd>(peer);
    std::unique_ptr<Bundle> bundle;
    if (Status status = setup->take(&end->dataSink(), &bundle); !status) {
      return status.inContext(fmt::format("connection from {}", peer));
    }
    end->attach(std::move(bundle));
    *out = std::move(end);
    return {};
  }
  return {};
}

Status Connecting::begin(const Device& device, const void* handle, const BundleOptions& options,
                         std::uint64_t inlineBytes, std::unique_ptr<Connecting>* out) {
  ListenerAddress to;
  if (Status status = unpackHandle(handle, &to); !status) return status;
  auto connecting = std::make_unique<Connecting>();
  connecting->inlineBytes_ = inlineBytes;
  const Status status = connectBundle(to.address, to.nonce, device.interface.address, makeHello(),
                                      options, &connecting->setup_);
  if (!status) {
    return status.inContext(fmt::format("to {} by {}", to.address.text(), device.interface.name));
  }
  *out = std::move(connecting);
  return {};
}

Status Connecting::advance(std::unique_ptr<SendEnd>* out) {
  const BundleSetup::State state = setup_->advance();
  if (state == BundleSetup::State::Pending) return {};
  if (state == BundleSetup::State::Failed) {
    return setup_->status().inContext(fmt::format("to {}", setup_->peerText()));
  }
  if (Status status = checkHello(setup_->hello()); !status) {
    return status.inContext(fmt::format("to {}", setup_->peerText()));
  }
  auto end = std::make_unique<SendEnd>(describe(setup_->hello(), setup_->peerText()), inlineBytes_);
  std::unique_ptr<Bundle> bundle;
  if (Status status = setup_->take(&end->dataSink(), &bundle); !status) {
    return status.inContext(fmt::format("to {}", setup_->peerText()));
  }
  end->attach(std::move(bundle));
  *out = std::move(end);
  return {};
}

}  // namespace hoccl::net_plugin
