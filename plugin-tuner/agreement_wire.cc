#include "plugin-tuner/agreement_wire.h"

#include <fmt/format.h>

#include <type_traits>

namespace hoccl {
namespace wire {
namespace {

constexpr std::uint32_t kMagic = 0x47414f48;  // "HOAG" in memory

class Writer {
 public:
  template <typename T>
  Writer& number(T value) {
    const auto bits = static_cast<std::make_unsigned_t<T>>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<char>((bits >> (8 * i)) & 0xff));
    }
    return *this;
  }
  Writer& text(std::string_view value, std::size_t bound) {
    value = value.substr(0, bound);
    number(static_cast<std::uint32_t>(value.size()));
    bytes_.append(value);
    return *this;
  }
  std::string message(Type type, std::uint16_t version) {
    Writer header;
    header.number(kMagic).number(static_cast<std::uint16_t>(type)).number(version);
    header.number(static_cast<std::uint32_t>(bytes_.size()));
    return header.bytes_ + bytes_;
  }

 private:
  std::string bytes_;
};

/// Reads from the front; once something is missing or too long, everything after fails too.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}
  template <typename T>
  Reader& number(T* out) {
    std::uint64_t value = 0;
    if (!good_ || rest_.size() < sizeof(T)) {
      good_ = false;
      return *this;
    }
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value |= std::uint64_t{static_cast<unsigned char>(rest_[i])} << (8 * i);
    }
    rest_.remove_prefix(sizeof(T));
    *out = static_cast<T>(value);
    return *this;
  }
  Reader& text(std::string* out, std::size_t bound) {
    std::uint32_t length = 0;
    number(&length);
    if (!good_ || length > bound || length > rest_.size()) {
      good_ = false;
      return *this;
    }
    out->assign(rest_.substr(0, length));
    rest_.remove_prefix(length);
    return *this;
  }
  [[nodiscard]] bool good() const { return good_; }
  [[nodiscard]] bool atEnd() const { return good_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool good_ = true;
};

Status malformed(const char* what) {
  return Status::error(Code::Remote, fmt::format("malformed {} message", what));
}

}  // namespace

std::string encode(const Hello& hello, std::uint16_t version) {
  Writer writer;
  writer.number(hello.rootNonce).number(hello.key.nonce).number(hello.key.splitSequence);
  writer.number(hello.key.color).number(hello.rank).number(hello.nranks).number(hello.phase);
  writer.text(hello.host, kMaxHost);
  writer.number(hello.policyDigest).text(hello.policyText, kMaxPolicy);
  writer.text(hello.veto, kMaxVeto).text(hello.payload, kMaxPayload);
  return writer.message(Type::Hello, version);
}

std::string encode(const Welcome& welcome) {
  return Writer().number(welcome.agreeTimeoutMs).message(Type::Welcome, kVersion);
}

std::string encode(const Verdict& verdict) {
  Writer writer;
  writer.number(static_cast<std::uint8_t>(verdict.steer)).text(verdict.reason, kMaxReason);
  writer.number(static_cast<std::uint32_t>(verdict.payloads.size()));
  for (const std::string& payload : verdict.payloads) writer.text(payload, kMaxPayload);
  return writer.message(Type::Verdict, kVersion);
}

Status decodeHeader(std::string_view bytes, Header* out) {
  std::uint32_t magic = 0, length = 0;
  std::uint16_t type = 0, version = 0;
  Reader reader(bytes.substr(0, kHeaderBytes));
  reader.number(&magic).number(&type).number(&version).number(&length);
  if (!reader.good() || magic != kMagic) {
    return Status::error(Code::Remote, "does not speak HOCCL's agreement protocol");
  }
  if (type < 1 || type > 3) {
    return Status::error(Code::Remote, fmt::format("message of unknown type {}", type));
  }
  *out = {static_cast<Type>(type), version, length};
  return {};
}

Status decode(std::string_view body, std::uint16_t version, Hello* out) {
  Reader reader(body);
  reader.number(&out->rootNonce).number(&out->key.nonce).number(&out->key.splitSequence);
  reader.number(&out->key.color).number(&out->rank).number(&out->nranks).number(&out->phase);
  reader.text(&out->host, kMaxHost);
  if (!reader.good()) return malformed("hello");
  if (version == kVersion) {
    reader.number(&out->policyDigest).text(&out->policyText, kMaxPolicy);
    reader.text(&out->veto, kMaxVeto).text(&out->payload, kMaxPayload);
    if (!reader.atEnd()) return malformed("hello");
  }
  if (out->nranks == 0 || out->nranks > kMaxRanks || out->rank >= out->nranks || out->phase == 0) {
    return Status::error(Code::Remote, fmt::format("hello of rank {} of {} in phase {}", out->rank,
                                                   out->nranks, out->phase));
  }
  return {};
}

Status decode(std::string_view body, Welcome* out) {
  return Reader(body).number(&out->agreeTimeoutMs).atEnd() ? Status() : malformed("welcome");
}

Status decode(std::string_view body, std::uint32_t nranks, Verdict* out) {
  std::uint8_t steer = 0;
  std::uint32_t count = 0;
  Reader reader(body);
  reader.number(&steer).text(&out->reason, kMaxReason).number(&count);
  if (!reader.good() || steer > 1 || count != (steer ? nranks : 0)) return malformed("verdict");
  out->steer = steer != 0;
  out->payloads.resize(count);
  for (std::string& payload : out->payloads) reader.text(&payload, kMaxPayload);
  return reader.atEnd() ? Status() : malformed("verdict");
}

std::size_t maxVerdictBody(std::uint32_t nranks) {
  return kMaxReason + 64 + std::size_t{nranks} * (4 + kMaxPayload);
}

}  // namespace wire

}  // namespace hoccl
