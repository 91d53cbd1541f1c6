#include "plugin-tuner/unique_id_tail.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <cstring>
#include <memory>

namespace hoccl {
namespace {

constexpr std::uint32_t kMagic = 0x4c434f48;  // "HOCL" in memory
constexpr std::size_t kAddressField = 8;      // NCCL's socket address follows a u64

// Offsets inside the tail. Every number is little-endian, whatever the machine.
constexpr std::size_t kAtMagic = 0;
constexpr std::size_t kAtVersion = 4;
constexpr std::size_t kAtFlags = 6;
constexpr std::size_t kAtFamily = 8;
constexpr std::size_t kAtPort = 9;
constexpr std::size_t kAtAddress = 11;
constexpr std::size_t kAtScope = 27;
constexpr std::size_t kAtNonce = 31;
constexpr std::size_t kAtSequence = 39;
constexpr std::size_t kAtChecksum = 47;
constexpr std::size_t kTailBytes = kUniqueIdBytes - kTailOffset;
static_assert(kAtChecksum + 4 <= kTailBytes);

template <typename T>
void put(unsigned char* at, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<unsigned char>(value >> (8 * i));
}

template <typename T>
T get(const unsigned char* at) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value |= std::uint64_t{at[i]} << (8 * i);
  return static_cast<T>(value);
}

/// FNV-1a over everything in front of the checksum.
std::uint32_t checksum(const unsigned char* tail) {
  std::uint32_t hash = 2166136261u;
  for (std::size_t i = 0; i < kAtChecksum; ++i) hash = (hash ^ tail[i]) * 16777619u;
  return hash;
}

bool setAddress(const sockaddr* address, Tail* tail) {
  if (address->sa_family == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, address, sizeof v4);
    if (v4.sin_addr.s_addr == INADDR_ANY) return false;
    tail->family = 4;
    tail->address = {};
    std::memcpy(tail->address.data(), &v4.sin_addr, 4);
    tail->scopeId = 0;
    return true;
  }
  if (address->sa_family == AF_INET6) {
    sockaddr_in6 v6;
    std::memcpy(&v6, address, sizeof v6);
    if (IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr)) return false;
    tail->family = 6;
    std::memcpy(tail->address.data(), &v6.sin6_addr, 16);
    tail->scopeId = v6.sin6_scope_id;
    return true;
  }
  return false;
}

}  // namespace

void writeTail(char id[kUniqueIdBytes], const Tail& tail) {
  unsigned char bytes[kTailBytes] = {};
  put(bytes + kAtMagic, kMagic);
  put(bytes + kAtVersion, tail.version);
  put(bytes + kAtFlags, tail.flags);
  put(bytes + kAtFamily, tail.family);
  put(bytes + kAtPort, tail.port);
  std::memcpy(bytes + kAtAddress, tail.address.data(), tail.address.size());
  put(bytes + kAtScope, tail.scopeId);
  put(bytes + kAtNonce, tail.nonce);
  put(bytes + kAtSequence, tail.sequence);
  put(bytes + kAtChecksum, checksum(bytes));
  std::memcpy(id + kTailOffset, bytes, sizeof bytes);
}

bool readTail(const char id[kUniqueIdBytes], Tail* tail) {
  unsigned char bytes[kTailBytes];
  std::memcpy(bytes, id + kTailOffset, sizeof bytes);
  if (get<std::uint32_t>(bytes + kAtMagic) != kMagic) return false;
  if (get<std::uint32_t>(bytes + kAtChecksum) != checksum(bytes)) return false;
  const auto family = get<std::uint8_t>(bytes + kAtFamily);
  if (family != 4 && family != 6) return false;
  tail->version = get<std::uint16_t>(bytes + kAtVersion);
  tail->flags = get<std::uint16_t>(bytes + kAtFlags);
  tail->family = family;
  tail->port = get<std::uint16_t>(bytes + kAtPort);
  std::memcpy(tail->address.data(), bytes + kAtAddress, tail->address.size());
  tail->scopeId = get<std::uint32_t>(bytes + kAtScope);
  tail->nonce = get<std::uint64_t>(bytes + kAtNonce);
  tail->sequence = get<std::uint64_t>(bytes + kAtSequence);
  return true;
}

bool readBootstrapAddress(const char id[kUniqueIdBytes], Tail* tail) {
  sockaddr_storage address{};
  static_assert(kAddressField + sizeof(sockaddr_in6) <= kTailOffset);
  std::memcpy(&address, id + kAddressField, sizeof(sockaddr_in6));
  return setAddress(reinterpret_cast<const sockaddr*>(&address), tail);
}

void readInterfaceAddress(Tail* tail) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) == 0) {
    const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> guard(list, &freeifaddrs);
    for (const int family : {AF_INET, AF_INET6}) {
      for (const ifaddrs* each = list; each; each = each->ifa_next) {
        if (!each->ifa_addr || each->ifa_addr->sa_family != family) continue;
        if (!(each->ifa_flags & IFF_UP) || (each->ifa_flags & IFF_LOOPBACK)) continue;
        if (setAddress(each->ifa_addr, tail)) return;
      }
    }
  }
  tail->family = 4;
  tail->address = {127, 0, 0, 1};
  tail->scopeId = 0;
}

socklen_t toSocketAddress(const Tail& tail, sockaddr_storage* out) {
  *out = {};
  if (tail.family == 4) {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(tail.port);
    std::memcpy(&v4.sin_addr, tail.address.data(), 4);
    std::memcpy(out, &v4, sizeof v4);
    return sizeof v4;
  }
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(tail.port);
  v6.sin6_scope_id = tail.scopeId;
  std::memcpy(&v6.sin6_addr, tail.address.data(), 16);
  std::memcpy(out, &v6, sizeof v6);
  return sizeof v6;
}

std::string addressText(const Tail& tail) {
  char text[INET6_ADDRSTRLEN] = "?";
  inet_ntop(tail.family == 4 ? AF_INET : AF_INET6, tail.address.data(), text, sizeof text);
  if (tail.family == 4) return fmt::format("{}:{}", text, tail.port);
  if (tail.scopeId) return fmt::format("[{}%{}]:{}", text, tail.scopeId, tail.port);
  return fmt::format("[{}]:{}", text, tail.port);
}

}  // namespace hoccl
