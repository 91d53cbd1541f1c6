#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "common/base/status.h"

namespace hoccl {

/// An IPv4 or IPv6 address with port. IPv4-mapped IPv6 addresses are kept as IPv4.
class SocketAddress {
 public:
  /// Bytes of the compact form: family (4 or 6), port and scope (big-endian), address.
  static constexpr std::size_t kPackedBytes = 1 + 2 + 4 + 16;
  using Packed = std::array<std::uint8_t, kPackedBytes>;

  SocketAddress() = default;
  /// From what the kernel gives; an error for any family but AF_INET and AF_INET6.
  static Status fromSockaddr(const sockaddr* address, socklen_t length, SocketAddress* out);
  /// "10.0.0.1", "fe80::1%eth0", "::1", with "10.0.0.1:80" or "[::1]:80" a port.
  static Status parse(std::string_view text, SocketAddress* out);

  [[nodiscard]] bool valid() const { return family_ != 0; }
  /// AF_INET or AF_INET6; 0 when empty.
  [[nodiscard]] int family() const { return family_; }
  [[nodiscard]] std::uint16_t port() const { return port_; }
  void setPort(std::uint16_t port) { port_ = port; }
  [[nodiscard]] bool loopback() const;
  /// For bind() and connect(); the length of what was written.
  [[nodiscard]] socklen_t toSockaddr(sockaddr_storage* out) const;
  /// "10.0.0.1:4242", "[fe80::1%2]:4242".
  [[nodiscard]] std::string text() const;

  /// The compact form. A scope is an interface's number on the host that packed it; whoever unpacks
  /// it elsewhere replaces it by that of the own interface (`withScopeOf`).
  [[nodiscard]] Packed pack() const;
  /// Of anything else than 4 or 6 in the first byte, or fewer bytes: an error, `out` untouched.
  static Status unpack(std::span<const std::uint8_t> bytes, SocketAddress* out);
  /// The same address; if it is link-local, reached through the interface of `local`.
  [[nodiscard]] SocketAddress withScopeOf(const SocketAddress& local) const;
  [[nodiscard]] bool linkLocal() const;

  bool operator==(const SocketAddress&) const = default;

 private:
  int family_ = 0;
  std::uint16_t port_ = 0;                  ///< host byte order
  std::uint32_t scope_ = 0;                 ///< of a link-local IPv6 address
  std::array<std::uint8_t, 16> address_{};  ///< network byte order; IPv4 uses the first four
};

}  // namespace hoccl
