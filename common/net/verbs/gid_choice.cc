#include "common/net/verbs/gid_choice.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <tuple>

namespace hoccl {
namespace {

constexpr std::uint8_t kMappedPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

bool ipv4Mapped(const ibv_gid& gid) {
  return std::memcmp(gid.raw, kMappedPrefix, sizeof kMappedPrefix) == 0;
}
bool linkLocal(const ibv_gid& gid) { return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80; }

/// Smaller is better.
std::tuple<int, int, std::uint32_t> rank(const GidEntry& entry) {
  const int family = ipv4Mapped(entry.gid) ? 0 : linkLocal(entry.gid) ? 2 : 1;
  // What is good on the link alone comes last, whatever its version.
  return {(family == 2 ? 2 : 0) + (entry.type == IBV_GID_TYPE_ROCE_V2 ? 0 : 1), family,
          entry.index};
}

std::string tableText(const std::vector<GidEntry>& table) {
  std::string text;
  for (const GidEntry& each : table) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", each.index, gidText(each.gid));
  }
  return text.empty() ? "none" : text;
}

}  // namespace

std::string gidText(const ibv_gid& gid) {
  char text[INET6_ADDRSTRLEN] = {};
  if (ipv4Mapped(gid)) {
    ::inet_ntop(AF_INET, gid.raw + sizeof kMappedPrefix, text, sizeof text);
  } else {
    ::inet_ntop(AF_INET6, gid.raw, text, sizeof text);
  }
  return text;
}

Status gidOverride(std::string_view override, std::string_view device, std::string_view variable,
                   std::int64_t* index) {
  *index = -1;
  std::string_view rest = override;
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view entry = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const std::size_t colon = entry.rfind(':');
    const std::string_view name = colon == std::string_view::npos ? "" : entry.substr(0, colon);
    const std::string_view text = colon == std::string_view::npos ? entry : entry.substr(colon + 1);
    std::uint32_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool ofAll = colon == std::string_view::npos;
    if (error != std::errc() || end != text.data() + text.size() || (ofAll && entry != override) ||
        (!ofAll && name.empty())) {
      return Status::error(
          Code::InvalidConfig,
          fmt::format("{}='{}' is neither an index (\"3\") nor a list of indexes by "
                      "device (\"mlx5_0:3,mlx5_1:1\")",
                      variable, override));
    }
    if (ofAll || name == device) *index = value;
  }
  return {};
}

std::vector<std::string_view> gidOverrideDevices(std::string_view override) {
  std::vector<std::string_view> devices;
  while (!override.empty()) {
    const std::size_t comma = override.find(',');
    const std::string_view entry = override.substr(0, comma);
    const std::size_t colon = entry.rfind(':');
    if (colon != std::string_view::npos) devices.push_back(entry.substr(0, colon));
    override.remove_prefix(comma == std::string_view::npos ? override.size() : comma + 1);
  }
  return devices;
}

Status chooseGid(const std::vector<GidEntry>& table, std::string_view device,
                 std::string_view override, std::string_view variable, GidEntry* out) {
  std::int64_t wanted = -1;
  if (Status status = gidOverride(override, device, variable, &wanted); !status) return status;
  if (wanted >= 0) {
    const auto found = std::find_if(table.begin(), table.end(),
                                    [wanted](const GidEntry& e) { return e.index == wanted; });
    if (found == table.end()) {
      return Status::error(Code::InvalidConfig,
                           fmt::format("{}='{}': {} has no GID of index {}; it has: {}", variable,
                                       override, device, wanted, tableText(table)));
    }
    *out = *found;
    return {};
  }
  const auto best = std::min_element(
      table.begin(), table.end(), [](const auto& a, const auto& b) { return rank(a) < rank(b); });
  if (best == table.end()) {
    return Status::error(
        Code::Unsupported,
        fmt::format("{} has no GID: its network interface has no address", device));
  }
  *out = *best;
  return {};
}

}  // namespace hoccl
