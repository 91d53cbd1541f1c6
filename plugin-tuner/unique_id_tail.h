#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>

#include "common/base/status.h"

namespace hoccl {

/// An ncclUniqueId: NCCL fills the front (a u64, then a socket address), the rest reaches every
/// rank unchanged. Bytes from kTailOffset on are ours.
inline constexpr std::size_t kUniqueIdBytes = 128;
inline constexpr std::size_t kTailOffset = 64;

/// What a process with HOCCL writes into the unique ids it makes: where the service that decides
/// for the communicator listens, and the nonce that lets a rank talk to it.
struct Tail {
  std::uint16_t version = 1;
  std::uint16_t flags = 0;
  std::uint8_t family = 0;                 ///< 4 or 6
  std::uint16_t port = 0;                  ///< host byte order
  std::array<std::uint8_t, 16> address{};  ///< network byte order; IPv4 uses the first four bytes
  std::uint32_t scopeId = 0;               ///< interface of a link-local IPv6 address
  std::uint64_t nonce = 0;
  /// Not 0 in the id of a communicator that grows out of another: AgreementKey::splitSequence.
  std::uint64_t sequence = 0;

  bool operator==(const Tail&) const = default;
};

/// Writes bytes 64..127 of the id; bytes 0..63 stay as they are.
void writeTail(char id[kUniqueIdBytes], const Tail& tail);
/// False where the tail is not ours (the id comes from a process without HOCCL) or is damaged;
/// `tail` is then untouched. A tail of a later version is read too: it keeps these fields.
[[nodiscard]] bool readTail(const char id[kUniqueIdBytes], Tail* tail);

/// The address NCCL itself listens at, read from the front of an id it filled: family, address and
/// scope of `tail` are set. False where the front holds no IPv4 or IPv6 address.
[[nodiscard]] bool readBootstrapAddress(const char id[kUniqueIdBytes], Tail* tail);
/// The first IPv4, else IPv6, address of an interface that is up and not loopback; else 127.0.0.1.
void readInterfaceAddress(Tail* tail);

/// The tail's address and port for connect(); the length of what was written.
[[nodiscard]] socklen_t toSocketAddress(const Tail& tail, sockaddr_storage* out);
/// "10.0.0.1:4242" or "[fe80::1%2]:4242".
[[nodiscard]] std::string addressText(const Tail& tail);

}  // namespace hoccl
