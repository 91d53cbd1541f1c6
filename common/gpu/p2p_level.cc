#include "common/gpu/p2p_level.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "common/base/log.h"

namespace hoccl {
namespace {

struct Name {
  const char* text;
  P2pLevel level;
};
/// The first of each level is its own; the others are NCCL's for paths that here are one kind.
constexpr std::array<Name, 10> kNames{{{"LOC", P2pLevel::Loc},
                                       {"NVL", P2pLevel::Nvl},
                                       {"PIX", P2pLevel::Pix},
                                       {"PXB", P2pLevel::Pxb},
                                       {"PHB", P2pLevel::Phb},
                                       {"SYS", P2pLevel::Sys},
                                       {"NVB", P2pLevel::Nvl},
                                       {"C2C", P2pLevel::Nvl},
                                       {"P2C", P2pLevel::Pxb},
                                       {"PXN", P2pLevel::Pxb}}};
constexpr std::array<P2pLevel, 6> kOldNumbers{P2pLevel::Loc, P2pLevel::Pix, P2pLevel::Pxb,
                                              P2pLevel::Phb, P2pLevel::Sys, P2pLevel::Sys};

bool isAmd(const std::string& cpuinfo) {
  std::ifstream file(cpuinfo);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("vendor_id", 0) == 0) return line.find("AuthenticAMD") != std::string::npos;
  }
  return false;
}

bool isSet(const char* variable) {
  const char* text = std::getenv(variable);
  return text && *text;
}

/// The bridges above a device, the root ("pci0000:3a") first, and the device; empty: not known.
std::vector<std::string> pathOf(const std::string& address, const std::string& sysfs) {
  std::string lower = address;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::error_code error;
  const auto real = std::filesystem::canonical(sysfs + "/bus/pci/devices/" + lower, error);
  if (error) return {};
  std::vector<std::string> path;
  for (const auto& part : real) {
    const std::string text = part.string();
    if (!path.empty() || text.rfind("pci", 0) == 0) path.push_back(text);
  }
  // "pci" is also the name of a folder on the way where there is none of a root.
  return path.size() >= 2 && path[0].find(':') != std::string::npos ? path
                                                                    : std::vector<std::string>{};
}

std::string numaNodeOf(const std::string& address, const std::string& sysfs) {
  std::string lower = address, node;
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::ifstream(sysfs + "/bus/pci/devices/" + lower + "/numa_node") >> node;
  return node;
}

}  // namespace

const char* p2pLevelName(P2pLevel level) {
  for (const Name& name : kNames) {
    if (name.level == level) return name.text;
  }
  return "?";
}

bool parseP2pLevel(std::string_view text, P2pLevel* out) {
  for (const Name& name : kNames) {
    if (text != name.text) continue;
    *out = name.level;
    return true;
  }
  const bool number = !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isdigit(c) != 0;
  });
  if (!number) return false;
  const std::size_t old =
      text.size() > 1 ? kOldNumbers.size() - 1 : static_cast<std::size_t>(text[0] - '0');
  *out = kOldNumbers[std::min(old, kOldNumbers.size() - 1)];
  return true;
}

P2pLimit p2pLimit(int gpus, const std::string& cpuinfo) {
  P2pLimit limit;
  if (gpus <= 2 && isAmd(cpuinfo)) limit.level = P2pLevel::Sys;
  const char* disable = std::getenv("NCCL_P2P_DISABLE");
  const char* level = std::getenv("NCCL_P2P_LEVEL");
  P2pLimit said = limit;
  if (disable && std::strtol(disable, nullptr, 0) == 1) {
    said = {P2pLevel::Loc, "NCCL_P2P_DISABLE"};
  } else if (level && *level) {
    if (!parseP2pLevel(level, &said.level)) {
      logWarn("NCCL_P2P_LEVEL={} is none of LOC, NVL, PIX, PXB, PHB, SYS: {} holds", level,
              p2pLevelName(limit.level));
      return limit;
    }
    said.from = "NCCL_P2P_LEVEL";
  }
  return said.level == P2pLevel::Loc && isSet("HOCCL_P2P") ? limit : said;
}

P2pLevel pciDistance(const std::string& a, const std::string& b, const std::string& sysfs) {
  const std::vector<std::string> ofA = pathOf(a, sysfs), ofB = pathOf(b, sysfs);
  if (ofA.empty() || ofB.empty()) return P2pLevel::Sys;
  const auto common = static_cast<std::size_t>(
      std::mismatch(ofA.begin(), ofA.end(), ofB.begin(), ofB.end()).first - ofA.begin());
  if (common >= 2) {
    // Behind a bridge that they share, of which each has a port of its own.
    const std::size_t beyond = std::max(ofA.size(), ofB.size()) - common;
    return beyond <= 2 ? P2pLevel::Pix : P2pLevel::Pxb;
  }
  const std::string node = numaNodeOf(a, sysfs);
  const bool near = common == 1 || (!node.empty() && node != "-1" && node == numaNodeOf(b, sysfs));
  return near ? P2pLevel::Phb : P2pLevel::Sys;
}

}  // namespace hoccl
