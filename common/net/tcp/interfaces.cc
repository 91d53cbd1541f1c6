#include "common/net/tcp/interfaces.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <memory>

namespace hoccl {
namespace {

bool startsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

/// What interfaces are called that carry traffic, from the likeliest kind down.
enum class Kind { Infiniband, Other, Docker, Virtual, Loopback };
constexpr Kind kKinds[] = {Kind::Infiniband, Kind::Other, Kind::Docker, Kind::Virtual,
                           Kind::Loopback};

Kind kindOf(const Interface& interface) {
  if (interface.loopback || interface.name == "lo") return Kind::Loopback;
  if (startsWith(interface.name, "ib")) return Kind::Infiniband;
  if (startsWith(interface.name, "docker")) return Kind::Docker;
  if (startsWith(interface.name, "virbr")) return Kind::Virtual;
  return Kind::Other;
}

void readSysfs(Interface* interface) {
  const std::string folder = "/sys/class/net/" + interface->name;
  std::ifstream speed(folder + "/speed");
  long long mbps = -1;  // -1 or an unreadable file where the driver knows none
  if (speed >> mbps && mbps > 0 && mbps < UINT32_MAX) {
    interface->speedMbps = static_cast<std::uint32_t>(mbps);
  }
  char resolved[PATH_MAX];
  if (::realpath((folder + "/device").c_str(), resolved)) interface->pciPath = resolved;
}

std::string namesOf(const std::vector<Interface>& interfaces) {
  std::string names;
  for (const Interface& each : interfaces) {
    if (!names.empty()) names += ", ";
    names += each.name;
  }
  return names.empty() ? "none" : names;
}

const char* familyText(int family) {
  return family == AF_INET    ? " with an IPv4 address"
         : family == AF_INET6 ? " with an IPv6 address"
                              : "";
}

}  // namespace

Status InterfaceChoice::fromEnvironment(const Config& config, InterfaceChoice* out) {
  InterfaceChoice choice;
  if (!config.socketIfname.empty()) {
    choice.list = config.socketIfname;
    choice.variable = "HOCCL_SOCKET_IFNAME";
  } else if (const char* nccl = std::getenv("NCCL_SOCKET_IFNAME")) {
    choice.list = nccl;
  }
  if (const char* family = std::getenv("NCCL_SOCKET_FAMILY"); family && *family) {
    const std::string_view text(family);
    if (text == "AF_INET") {
      choice.family = AF_INET;
    } else if (text == "AF_INET6") {
      choice.family = AF_INET6;
    } else {
      return Status::error(Code::InvalidConfig,
                           fmt::format("NCCL_SOCKET_FAMILY='{}' is not AF_INET or AF_INET6", text));
    }
  }
  *out = std::move(choice);
  return {};
}

bool interfaceAllowed(std::string_view list, std::string_view name) {
  const bool all = list.empty();
  const bool exclude = startsWith(list, "^");
  if (exclude) list.remove_prefix(1);
  const bool exact = startsWith(list, "=");
  if (exact) list.remove_prefix(1);
  bool named = false;
  while (!list.empty() && !named) {
    const std::size_t comma = list.find(',');
    std::string_view entry = list.substr(0, comma);
    // NCCL's lists may name a port behind a colon, as for HCAs.
    entry = entry.substr(0, entry.find(':'));
    if (!entry.empty()) named = exact ? name == entry : startsWith(name, entry);
    if (comma == std::string_view::npos) break;
    list.remove_prefix(comma + 1);
  }
  return all || named != exclude;
}

Status allInterfaces(int family, std::vector<Interface>* out) {
  ifaddrs* head = nullptr;
  if (::getifaddrs(&head) != 0)
    return Status::fromErrno("cannot list the network interfaces", errno);
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> list(head, ::freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* each = list.get(); each != nullptr; each = each->ifa_next) {
    if (!each->ifa_addr || !(each->ifa_flags & IFF_UP) || !(each->ifa_flags & IFF_RUNNING))
      continue;
    const int its = each->ifa_addr->sa_family;
    if (its != AF_INET && its != AF_INET6) continue;
    if (family != 0 && its != family) continue;
    const socklen_t length = its == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    SocketAddress address;
    if (!SocketAddress::fromSockaddr(each->ifa_addr, length, &address)) continue;
    auto known = std::find_if(found.begin(), found.end(), [each](const Interface& other) {
      return other.name == each->ifa_name;
    });
    if (known != found.end()) {
      // One address each; one that is good beyond the link is better than one that is not.
      if (known->address.linkLocal() && !address.linkLocal()) known->address = address;
      continue;
    }
    Interface interface;
    interface.name = each->ifa_name;
    interface.address = address;
    interface.loopback = (each->ifa_flags & IFF_LOOPBACK) != 0;
    readSysfs(&interface);
    found.push_back(std::move(interface));
  }
  *out = std::move(found);
  return {};
}

Status selectInterfaces(const InterfaceChoice& choice, const std::vector<Interface>& all,
                        std::vector<Interface>* out) {
  std::vector<Interface> chosen;
  if (!choice.list.empty()) {
    std::copy_if(all.begin(), all.end(), std::back_inserter(chosen),
                 [&](const Interface& each) { return interfaceAllowed(choice.list, each.name); });
  } else {
    for (const Kind kind : kKinds) {
      std::copy_if(all.begin(), all.end(), std::back_inserter(chosen),
                   [kind](const Interface& each) { return kindOf(each) == kind; });
      if (!chosen.empty()) break;
    }
  }
  if (chosen.empty() && choice.list.empty()) {
    return Status::error(Code::InvalidConfig,
                         fmt::format("no network interface{} is up", familyText(choice.family)));
  }
  if (chosen.empty()) {
    return Status::error(
        Code::InvalidConfig,
        fmt::format("{}='{}' fits no network interface{}; up are: {}", choice.variable, choice.list,
                    familyText(choice.family), namesOf(all)));
  }
  *out = std::move(chosen);
  return {};
}

Status chooseInterfaces(const InterfaceChoice& choice, std::vector<Interface>* out) {
  std::vector<Interface> all;
  if (Status status = allInterfaces(choice.family, &all); !status) return status;
  return selectInterfaces(choice, all, out);
}

}  // namespace hoccl
