#include "common/base/config.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <set>

namespace hoccl {
namespace {

__extension__ using Wide = unsigned __int128;

constexpr std::string_view kPrefix = "HOCCL_";

struct Unit {
  const char* text;
  std::uint64_t bytes;
};
constexpr std::array<Unit, 4> kUnits{
    {{"TiB", 1ull << 40}, {"GiB", 1ull << 30}, {"MiB", 1ull << 20}, {"KiB", 1ull << 10}}};

// "K" or "KiB", in either case; "KB" means 1000 to some and 1024 to others, so it is refused.
std::optional<std::uint64_t> unitBytes(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c; });
  if (lower.empty() || lower == "b") return 1;
  for (const Unit& unit : kUnits) {
    const char letter = static_cast<char>(unit.text[0] - 'A' + 'a');
    if (lower == std::string(1, letter) || lower == std::string(1, letter) + "ib") {
      return unit.bytes;
    }
  }
  return std::nullopt;
}

Status parseCount(std::string_view text, std::uint64_t* out) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) {
    return Status::error(Code::InvalidConfig, "is larger than 64 bits hold");
  }
  if (error != std::errc() || end != text.data() + text.size()) {
    return Status::error(Code::InvalidConfig, "is not a whole number");
  }
  *out = value;
  return {};
}

// A number as a message and the table show it.
std::string numberText(ConfigKind kind, std::uint64_t value) {
  return kind == ConfigKind::Bytes ? formatBytes(value) : std::to_string(value);
}

Status badValue(const ConfigRow& row, std::string_view value, std::string_view why) {
  return Status::error(Code::InvalidConfig, fmt::format("{}='{}' {}; allowed: {}", row.variable,
                                                        value, why, allowedText(row)));
}

bool isChoice(std::string_view choices, std::string_view value) {
  while (!choices.empty()) {
    const std::size_t bar = choices.find('|');
    if (choices.substr(0, bar) == value) return true;
    if (bar == std::string_view::npos) break;
    choices.remove_prefix(bar + 1);
  }
  return false;
}

Status assign(const ConfigRow& row, std::string_view text, std::uint64_t* field) {
  if (text.empty()) return badValue(row, text, "is empty; unset it to get the default");
  std::uint64_t value = 0;
  const Status parsed =
      row.kind == ConfigKind::Bytes ? parseBytes(text, &value) : parseCount(text, &value);
  if (!parsed) return badValue(row, text, parsed.message());
  if (value < row.lowest || value > row.highest) return badValue(row, text, "is out of range");
  *field = value;
  return {};
}

Status assign(const ConfigRow& row, std::string_view text, std::string* field) {
  if (row.kind == ConfigKind::Choice && !isChoice(row.choices, text)) {
    return badValue(
        row, text,
        text.empty() ? "is empty; unset it to get the default" : "is not one of the choices");
  }
  *field = std::string(text);
  return {};
}

std::string fieldText(const ConfigRow& row, std::uint64_t value) {
  return numberText(row.kind, value);
}
std::string fieldText(const ConfigRow&, const std::string& value) { return value; }

std::string policyFieldText(std::uint64_t value) { return std::to_string(value); }
std::string policyFieldText(const std::string& value) { return value; }

std::size_t editDistance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t above = row[j + 1];
      row[j + 1] = a[i] == b[j] ? diagonal : 1 + std::min({diagonal, above, row[j]});
      diagonal = above;
    }
  }
  return row.back();
}

Status unknownVariable(std::string_view variable, std::string_view value) {
  const ConfigRow* nearest = nullptr;
  std::size_t nearestDistance = std::numeric_limits<std::size_t>::max();
  for (const ConfigRow& row : configRows()) {
    const std::size_t distance = editDistance(variable, row.variable);
    if (distance < nearestDistance) {
      nearestDistance = distance;
      nearest = &row;
    }
  }
  return Status::error(Code::InvalidConfig,
                       fmt::format("{}='{}' is not a variable of HOCCL; the nearest is {} "
                                   "(`hoccl config` lists all)",
                                   variable, value, nearest->variable));
}

}  // namespace

const std::vector<ConfigRow>& configRows() {
  // Never destroyed: threads may read it while the process ends.
  static const auto* const rows = new std::vector<ConfigRow>{
#define X(field, kind, variable, defaultText, lowest, highest, choices, policy, help) \
  {ConfigKind::kind, variable, defaultText, lowest, highest, choices, policy != 0, help},
      HOCCL_CONFIG_TABLE(X)
#undef X
  };
  return *rows;
}

std::string allowedText(const ConfigRow& row) {
  switch (row.kind) {
    case ConfigKind::Text:
      return "text";
    case ConfigKind::Choice:
      return row.choices;
    case ConfigKind::Flag:
      return "0 or 1";
    case ConfigKind::Bytes:
      return fmt::format("{} to {}", formatBytes(row.lowest), formatBytes(row.highest));
    case ConfigKind::Count:
      return fmt::format("{} to {}", row.lowest, row.highest);
    case ConfigKind::Micros:
      return fmt::format("{} to {} (us)", row.lowest, row.highest);
    case ConfigKind::Millis:
      return fmt::format("{} to {} (ms)", row.lowest, row.highest);
  }
  return "";
}

Config Config::defaults() {
  Config config;
  for (const ConfigRow& row : configRows()) {
    // The table's own defaults are right (a test goes through them).
    (void)config.set(row.variable, row.defaultText);
  }
  return config;
}

Status Config::set(std::string_view variable, std::string_view value) {
  std::size_t index = 0;
#define X(field, kind, name, ...)                                          \
  if (variable == name) return assign(configRows()[index], value, &field); \
  ++index;
  HOCCL_CONFIG_TABLE(X)
#undef X
  return unknownVariable(variable, value);
}

std::string Config::get(std::string_view variable) const {
  std::size_t index = 0;
#define X(field, kind, name, ...)                                     \
  if (variable == name) return fieldText(configRows()[index], field); \
  ++index;
  HOCCL_CONFIG_TABLE(X)
#undef X
  return {};
}

std::vector<std::string> Config::problemsOfEnvironment(Config* out) {
  Config config = defaults();
  std::vector<std::string> problems;
  std::set<std::string_view> seen;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (text.substr(0, kPrefix.size()) != kPrefix || equals == std::string_view::npos) continue;
    const std::string_view variable = text.substr(0, equals);
    if (!seen.insert(variable).second) continue;  // getenv() takes the first one, too
    if (const Status status = config.set(variable, text.substr(equals + 1)); !status) {
      problems.push_back(status.message());
    }
  }
  if (problems.empty()) *out = std::move(config);
  return problems;
}

Status Config::fromEnvironment(Config* out) {
  const std::vector<std::string> problems = problemsOfEnvironment(out);
  if (problems.empty()) return {};
  std::string message;
  for (const std::string& problem : problems) {
    if (!message.empty()) message += " | ";
    message += problem;
  }
  return Status::error(Code::InvalidConfig, std::move(message));
}

std::string Config::policyText() const {
  std::string text;
  std::size_t index = 0;
#define X(field, kind, name, ...)                           \
  if (configRows()[index++].policy) {                       \
    if (!text.empty()) text += ' ';                         \
    text += std::string(name "=") + policyFieldText(field); \
  }
  HOCCL_CONFIG_TABLE(X)
#undef X
  return text;
}

std::uint64_t Config::policyDigest() const {
  // FNV-1a, 64 bits (Fowler, Noll, Vo): offset basis and prime.
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const unsigned char byte : policyText()) {
    hash = (hash ^ byte) * 0x100000001b3ull;
  }
  return hash;
}

Status parseBytes(std::string_view text, std::uint64_t* out) {
  // 18 digits after the point times 2^40 fit the 128 bits of the product below.
  constexpr std::size_t kMaxFractionDigits = 18;
  const std::size_t numberEnd = text.find_first_not_of("0123456789.");
  const std::string_view number = text.substr(0, numberEnd);
  const std::string_view suffix =
      numberEnd == std::string_view::npos ? std::string_view() : text.substr(numberEnd);
  const std::size_t point = number.find('.');
  const std::string_view whole = number.substr(0, point);
  std::string_view fraction =
      point == std::string_view::npos ? std::string_view() : number.substr(point + 1);
  const bool wellFormed = !whole.empty() && fraction.find('.') == std::string_view::npos &&
                          (point == std::string_view::npos || !fraction.empty());
  const std::optional<std::uint64_t> unit = unitBytes(suffix);
  if (!wellFormed || !unit) {
    return Status::error(
        Code::InvalidConfig,
        "is not a size (write bytes, or a number with K, M, G, T or KiB, MiB, GiB, "
        "TiB, powers of 1024)");
  }
  while (!fraction.empty() && fraction.back() == '0') fraction.remove_suffix(1);
  if (fraction.size() > kMaxFractionDigits) {
    return Status::error(Code::InvalidConfig, "has too many digits after the point");
  }
  std::uint64_t wholeUnits = 0;
  if (Status status = parseCount(whole, &wholeUnits); !status) return status;
  Wide total = Wide{wholeUnits} * *unit;
  if (!fraction.empty()) {
    std::uint64_t digits = 0;
    if (Status status = parseCount(fraction, &digits); !status) return status;
    Wide scale = 1;
    for (std::size_t i = 0; i < fraction.size(); ++i) scale *= 10;
    const Wide part = Wide{digits} * *unit;
    if (part % scale != 0) {
      return Status::error(Code::InvalidConfig, "is not a whole number of bytes");
    }
    total += part / scale;
  }
  if (total > std::numeric_limits<std::uint64_t>::max()) {
    return Status::error(Code::InvalidConfig, "is larger than 64 bits hold");
  }
  *out = static_cast<std::uint64_t>(total);
  return {};
}

std::string formatBytes(std::uint64_t bytes) {
  for (const Unit& unit : kUnits) {
    if (bytes != 0 && bytes % unit.bytes == 0) {
      return std::to_string(bytes / unit.bytes) + unit.text;
    }
  }
  return std::to_string(bytes);
}

}  // namespace hoccl
