#include "common/net/tcp/socket_address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>

namespace hoccl {
namespace {

constexpr std::uint8_t kPackedV4 = 4, kPackedV6 = 6;

Status notAnAddress(std::string_view text) {
  return Status::error(Code::InvalidArgument,
                       fmt::format("'{}' is not an IPv4 or IPv6 address", text));
}

template <typename Number>
bool parseNumber(std::string_view text, Number* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return !text.empty() && error == std::errc() && end == text.data() + text.size();
}

}  // namespace

Status SocketAddress::fromSockaddr(const sockaddr* address, socklen_t length, SocketAddress* out) {
  SocketAddress result;
  if (address != nullptr && address->sa_family == AF_INET && length >= sizeof(sockaddr_in)) {
    sockaddr_in v4;
    std::memcpy(&v4, address, sizeof v4);
    result.family_ = AF_INET;
    result.port_ = ntohs(v4.sin_port);
    std::memcpy(result.address_.data(), &v4.sin_addr, 4);
  } else if (address != nullptr && address->sa_family == AF_INET6 &&
             length >= sizeof(sockaddr_in6)) {
    sockaddr_in6 v6;
    std::memcpy(&v6, address, sizeof v6);
    result.port_ = ntohs(v6.sin6_port);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&v6.sin6_addr);
    if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) {
      result.family_ = AF_INET;
      std::copy(bytes + 12, bytes + 16, result.address_.begin());
    } else {
      result.family_ = AF_INET6;
      std::copy(bytes, bytes + 16, result.address_.begin());
      if (IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr)) result.scope_ = v6.sin6_scope_id;
    }
  } else {
    return Status::error(Code::InvalidArgument, "a socket address that is neither IPv4 nor IPv6");
  }
  *out = result;
  return {};
}

Status SocketAddress::parse(std::string_view text, SocketAddress* out) {
  std::string_view host = text, port;
  if (!text.empty() && text.front() == '[') {
    const std::size_t close = text.find(']');
    if (close == std::string_view::npos) return notAnAddress(text);
    host = text.substr(1, close - 1);
    const std::string_view rest = text.substr(close + 1);
    if (!rest.empty() && rest.front() != ':') return notAnAddress(text);
    if (!rest.empty()) port = rest.substr(1);
    if (!rest.empty() && port.empty()) return notAnAddress(text);
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    host = text.substr(0, text.find(':'));
    port = text.substr(text.find(':') + 1);
    if (port.empty()) return notAnAddress(text);
  }
  SocketAddress result;
  if (!port.empty() && !parseNumber(port, &result.port_)) return notAnAddress(text);
  const std::size_t percent = host.find('%');
  const std::string address(host.substr(0, percent));
  in6_addr v6;
  if (::inet_pton(AF_INET, address.c_str(), result.address_.data()) == 1 &&
      percent == std::string_view::npos) {
    result.family_ = AF_INET;
  } else if (::inet_pton(AF_INET6, address.c_str(), &v6) == 1) {
    result.family_ = AF_INET6;
    std::memcpy(result.address_.data(), &v6, 16);
    if (percent != std::string_view::npos) {
      const std::string zone(host.substr(percent + 1));
      if (!parseNumber(zone, &result.scope_)) result.scope_ = ::if_nametoindex(zone.c_str());
      if (result.scope_ == 0) {
        return Status::error(Code::InvalidArgument,
                             fmt::format("'{}': there is no interface '{}'", text, zone));
      }
      if (!result.linkLocal()) result.scope_ = 0;
    }
  } else {
    return notAnAddress(text);
  }
  *out = result;
  return {};
}

bool SocketAddress::loopback() const {
  if (family_ == AF_INET) return address_[0] == 127;
  return family_ == AF_INET6 && address_[15] == 1 &&
         std::all_of(address_.begin(), address_.end() - 1, [](std::uint8_t b) { return b == 0; });
}

bool SocketAddress::linkLocal() const {
  return family_ == AF_INET6 && address_[0] == 0xfe && (address_[1] & 0xc0) == 0x80;
}

socklen_t SocketAddress::toSockaddr(sockaddr_storage* out) const {
  *out = {};
  if (family_ == AF_INET6) {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port_);
    v6.sin6_scope_id = scope_;
    std::memcpy(&v6.sin6_addr, address_.data(), 16);
    std::memcpy(out, &v6, sizeof v6);
    return sizeof v6;
  }
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port_);
  std::memcpy(&v4.sin_addr, address_.data(), 4);
  std::memcpy(out, &v4, sizeof v4);
  return sizeof v4;
}

std::string SocketAddress::text() const {
  if (!valid()) return "(no address)";
  char host[INET6_ADDRSTRLEN] = {};
  ::inet_ntop(family_, address_.data(), host, sizeof host);
  if (family_ == AF_INET) return fmt::format("{}:{}", host, port_);
  if (scope_ == 0) return fmt::format("[{}]:{}", host, port_);
  return fmt::format("[{}%{}]:{}", host, scope_, port_);
}

SocketAddress::Packed SocketAddress::pack() const {
  Packed packed{};
  if (!valid()) return packed;
  packed[0] = family_ == AF_INET ? kPackedV4 : kPackedV6;
  packed[1] = static_cast<std::uint8_t>(port_ >> 8);
  packed[2] = static_cast<std::uint8_t>(port_);
  for (int i = 0; i < 4; ++i) packed[3 + i] = static_cast<std::uint8_t>(scope_ >> (24 - 8 * i));
  std::copy(address_.begin(), address_.end(), packed.begin() + 7);
  return packed;
}

Status SocketAddress::unpack(std::span<const std::uint8_t> bytes, SocketAddress* out) {
  if (bytes.size() < kPackedBytes || (bytes[0] != kPackedV4 && bytes[0] != kPackedV6)) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("{} bytes that hold no socket address", bytes.size()));
  }
  SocketAddress result;
  result.family_ = bytes[0] == kPackedV4 ? AF_INET : AF_INET6;
  result.port_ = static_cast<std::uint16_t>(bytes[1] << 8 | bytes[2]);
  for (int i = 0; i < 4; ++i) result.scope_ = result.scope_ << 8 | bytes[3 + i];
  const std::size_t used = result.family_ == AF_INET ? 4 : 16;
  std::copy(bytes.begin() + 7, bytes.begin() + 7 + static_cast<std::ptrdiff_t>(used),
            result.address_.begin());
  if (!result.linkLocal()) result.scope_ = 0;
  *out = result;
  return {};
}

SocketAddress SocketAddress::withScopeOf(const SocketAddress& local) const {
  SocketAddress result = *this;
  if (linkLocal() && local.scope_ != 0) result.scope_ = local.scope_;
  return result;
}

}  // namespace hoccl
