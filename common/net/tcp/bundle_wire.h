#pragma once

// The first bytes on the sockets of a bundle. Both layouts are the same in every version, so that a
// version that does not fit can be named.

#include <array>
#include <cstdint>
#include <type_traits>

#include "common/net/tcp/bundle_setup.h"

namespace hoccl::bundle_wire {

inline constexpr std::uint64_t kMagic = 0x7063742d4c434348ull;  // "HCCL-tcp"
inline constexpr std::uint16_t kVersion = 1;

enum class Role : std::uint8_t { Control = 0, Life = 1, Data = 2 };

using BundleId = std::array<std::uint8_t, 16>;

/// Connecting to accepting side, the first on every socket.
struct Greeting {
  std::uint64_t magic = kMagic;
  std::uint16_t version = kVersion;
  Role role = Role::Control;
  std::uint8_t reserved = 0;
  std::uint16_t index = 0;        ///< of a data socket
  std::uint16_t dataSockets = 0;  ///< of the bundle
  BundleNonce nonce{};            ///< the listener's
  BundleId bundle{};              ///< ties the sockets together
  BundleHello hello{};
  std::array<std::uint8_t, 16> padding{};
};
static_assert(sizeof(Greeting) == 128 && std::is_trivially_copyable_v<Greeting>);

/// Accepting to connecting side, once all sockets are there, on the control socket.
struct Answer {
  std::uint64_t magic = kMagic;
  std::uint16_t version = kVersion;
  std::uint16_t reserved = 0;
  std::uint32_t code = 0;  ///< 0: accepted
  BundleHello reply{};
  std::array<char, 176> reason{};
};
static_assert(sizeof(Answer) == 256 && std::is_trivially_copyable_v<Answer>);

/// Refusals of the set-up itself.
inline constexpr std::uint32_t kVersionDiffers = 0xffff0001u;

}  // namespace hoccl::bundle_wire
