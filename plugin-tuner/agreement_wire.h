#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hoccl {

/// Which communicator an agreement is about: the nonce of the unique id it descends from, and, for
/// a split, the how-maniest of its parent and the color. All ranks compute the same key.
struct AgreementKey {
  std::uint64_t nonce = 0;
  std::uint64_t splitSequence = 0;
  std::int64_t color = 0;
  auto operator<=>(const AgreementKey&) const = default;
};

/// The messages between ranks and the agreement root. Numbers are little-endian; a string is a u32
/// length and bytes. Every message begins with a header of kHeaderBytes: u32 magic, u16 type, u16
/// version, u32 bytes that follow. The header, Hello up to `host`, Welcome and a Verdict that says
/// no keep their layout in every version, so that a version that does not fit can be named to all.
namespace wire {

inline constexpr std::uint16_t kVersion = 1;
inline constexpr std::size_t kHeaderBytes = 12;
inline constexpr std::uint32_t kMaxRanks = 1u << 20;
inline constexpr std::size_t kMaxPayload = 4096;
inline constexpr std::size_t kMaxHost = 255;
inline constexpr std::size_t kMaxPolicy = 4096;
inline constexpr std::size_t kMaxVeto = 1024;
inline constexpr std::size_t kMaxReason = 16384;
/// No Hello of any version is longer.
inline constexpr std::size_t kMaxHelloBody = 16384;
static_assert(kMaxPayload + kMaxHost + kMaxPolicy + kMaxVeto + 256 <= kMaxHelloBody);

enum class Type : std::uint16_t { Hello = 1, Welcome = 2, Verdict = 3 };

struct Header {
  Type type = Type::Hello;
  std::uint16_t version = kVersion;
  std::uint32_t bodyBytes = 0;
};

struct Hello {
  std::uint64_t rootNonce = 0;  ///< proves that the sender has the unique id
  AgreementKey key;
  std::uint32_t rank = 0;
  std::uint32_t nranks = 0;
  std::uint32_t phase = 0;  ///< 1, 2, …
  std::string host;
  std::uint64_t policyDigest = 0;
  std::string policyText;
  std::string veto;  ///< why this rank cannot steer; empty where it can
  std::string payload;
};

struct Welcome {
  std::uint32_t agreeTimeoutMs = 0;  ///< how long the root waits for the others
};

struct Verdict {
  bool steer = false;
  std::string reason;                 ///< why not; empty where steer is true
  std::vector<std::string> payloads;  ///< by rank; empty where steer is false
};

/// Complete messages, header included. Strings beyond their bound are cut.
[[nodiscard]] std::string encode(const Hello& hello, std::uint16_t version = kVersion);
[[nodiscard]] std::string encode(const Welcome& welcome);
[[nodiscard]] std::string encode(const Verdict& verdict);

/// The header at the front of `bytes` (at least kHeaderBytes of them).
Status decodeHeader(std::string_view bytes, Header* out);
/// A Hello's body. Of another version than ours only the part up to `host` is read.
Status decode(std::string_view body, std::uint16_t version, Hello* out);
Status decode(std::string_view body, Welcome* out);
/// `nranks` bounds the number of payloads.
Status decode(std::string_view body, std::uint32_t nranks, Verdict* out);
/// The longest Verdict a communicator of this size can have.
[[nodiscard]] std::size_t maxVerdictBody(std::uint32_t nranks);

}  // namespace wire

}  // namespace hoccl
