#include "common/net/transport_set.h"

#include <fmt/format.h>
#include <sys/epoll.h>

#include <cerrno>
#include <utility>

namespace hoccl {

Status TransportSet::create(std::unique_ptr<TransportSet>* out) {
  auto set = std::make_unique<TransportSet>();
  set->epoll_.reset(::epoll_create1(EPOLL_CLOEXEC));
  if (!set->epoll_) return Status::fromErrno("epoll of the transports", errno);
  *out = std::move(set);
  return {};
}

Status TransportSet::add(std::unique_ptr<Transport> transport) {
  epoll_event event{};
  event.events = EPOLLIN;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, transport->listenFd(), &event) != 0) {
    return Status::fromErrno("epoll_ctl of the transports", errno);
  }
  if (transports_.empty()) address_ = prefixed(transport->name(), transport->address());
  transports_.push_back(std::move(transport));
  return {};
}

std::string TransportSet::prefixed(std::string_view transport, std::string_view address) {
  return fmt::format("{}:{}", transport, address);
}

std::string TransportSet::addressOf(std::string_view transport) const {
  for (const auto& each : transports_) {
    if (each->name() == transport) return each->address();
  }
  return {};
}

std::unique_ptr<Handshake> TransportSet::accept() {
  for (const auto& each : transports_) {
    if (std::unique_ptr<Handshake> handshake = each->accept()) return handshake;
  }
  return nullptr;
}

Status TransportSet::connect(const PeerId& peer, const std::string& address,
                             std::unique_ptr<Handshake>* out) {
  const std::size_t colon = address.find(':');
  const std::string_view wanted = std::string_view(address).substr(0, colon);
  for (const auto& each : transports_) {
    if (colon == std::string::npos || each->name() != wanted) continue;
    return each->connect(peer, address.substr(colon + 1), out);
  }
  return Status::error(Code::InvalidArgument,
                       fmt::format("'{}' is no address of a transport this mover has", address));
}

}  // namespace hoccl
