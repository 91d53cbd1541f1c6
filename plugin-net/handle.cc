#include "plugin-net/handle.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>

#include "common/base/host_identity.h"
#include "plugin-net/wire.h"

namespace hoccl::net_plugin {
namespace {

constexpr std::uint32_t kHandleMagic = 0x4e434f48;  // "HOCN"
constexpr std::uint32_t kHelloMagic = 0x48434f48;   // "HOCH"

struct RawHandle {
  std::uint32_t magic = kHandleMagic;
  std::uint32_t protocol = kProtocolVersion;
  BundleNonce nonce{};
  SocketAddress::Packed address{};
  std::uint8_t padding = 0;
  std::uint64_t digest = 0;  ///< of all before: a handle that was cut or mixed up is told apart
  std::array<std::uint8_t, 72> unused{};
};
static_assert(sizeof(RawHandle) == nccl_abi::kHandleBytes);

struct RawHello {
  std::uint32_t magic = kHelloMagic;
  std::uint32_t protocol = kProtocolVersion;
  std::int32_t process = 0;
  std::uint16_t rails = 0, pairs = 0;
  std::array<char, 48> host{};
};
static_assert(sizeof(RawHello) == sizeof(BundleHello));

// FNV-1a, 64 bits (Fowler, Noll, Vo).
std::uint64_t digestOf(const RawHandle& handle) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(&handle);
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (std::size_t i = 0; i < offsetof(RawHandle, digest); ++i) {
    hash = (hash ^ bytes[i]) * 0x100000001b3ull;
  }
  return hash;
}

}  // namespace

void packHandle(const ListenerAddress& address, void* handle) {
  RawHandle raw;
  raw.nonce = address.nonce;
  raw.address = address.address.pack();
  raw.digest = digestOf(raw);
  std::memcpy(handle, &raw, sizeof raw);
}

Status unpackHandle(const void* handle, ListenerAddress* out) {
  RawHandle raw;
  std::memcpy(&raw, handle, sizeof raw);
  if (raw.magic != kHandleMagic) {
    return Status::error(Code::Remote,
                         "the peer's handle is not HOCCL's: its rank uses another net plugin; set "
                         "NCCL_NET_PLUGIN alike on all ranks");
  }
  if (raw.protocol != kProtocolVersion) {
    return Status::error(Code::Remote,
                         fmt::format("the peer's handle is of protocol {}, this is {}; install the "
                                     "same version of HOCCL on all hosts",
                                     raw.protocol, kProtocolVersion));
  }
  ListenerAddress address;
  address.nonce = raw.nonce;
  if (raw.digest != digestOf(raw) ||
      !SocketAddress::unpack(std::span(raw.address), &address.address)) {
    return Status::error(Code::Remote, "the peer's handle is damaged");
  }
  *out = address;
  return {};
}

BundleHello makeHello(const PathExtent& extent) {
  RawHello hello;
  hello.rails = static_cast<std::uint16_t>(extent.rails);
  hello.pairs = static_cast<std::uint16_t>(extent.pairs);
  hello.process = ::getpid();
  const std::string host = shortHostName();
  std::copy_n(host.begin(), std::min(host.size(), hello.host.size() - 1), hello.host.begin());
  return std::bit_cast<BundleHello>(hello);
}

PathExtent extentOf(const BundleHello& hello) {
  const auto raw = std::bit_cast<RawHello>(hello);
  return {raw.rails, raw.pairs};
}

std::string describe(const BundleHello& hello, const std::string& address) {
  auto raw = std::bit_cast<RawHello>(hello);
  raw.host.back() = '\0';
  for (char& c : raw.host) {
    if (c != '\0' && (c <= ' ' || c > '~')) c = '?';
  }
  return fmt::format("{}, process {}, at {}", raw.host.data(), raw.process, address);
}

Status checkHello(const BundleHello& hello) {
  const auto raw = std::bit_cast<RawHello>(hello);
  if (raw.magic == kHelloMagic && raw.protocol == kProtocolVersion) return {};
  return Status::error(
      Code::Remote, raw.magic == kHelloMagic
                        ? fmt::format("the peer speaks protocol {}, this is {}; install the same "
                                      "version of HOCCL on all hosts",
                                      raw.protocol, kProtocolVersion)
                        : std::string("the peer is not HOCCL's net plugin"));
}

}  // namespace hoccl::net_plugin
