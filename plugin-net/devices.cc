#include "plugin-net/devices.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "common/base/host_identity.h"
#include "common/base/log.h"
#include "common/net/verbs/verbs_library.h"
#include "plugin-net/rail_memory.h"

namespace hoccl::net_plugin {
namespace {

/// What NCCL's sockets tell where the system does not know: the choice of algorithms stays the
/// same.
constexpr int kDefaultSpeedMbps = 10000;
constexpr std::size_t kDevicesNamed = 8;

// The same on no other interface or host: FNV-1a, 64 bits (Fowler, Noll, Vo).
std::uint64_t guidOf(const std::string& host, const std::string& interface) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const unsigned char byte : host + '/' + interface) hash = (hash ^ byte) * 0x100000001b3ull;
  return hash;
}

int speedOf(std::uint32_t mbps) { return mbps > 0 ? static_cast<int>(mbps) : kDefaultSpeedMbps; }

Status openRails(const Config& config, VerbsGround* out) {
  if (const char* disable = std::getenv("NCCL_IB_DISABLE");
      disable && std::string_view(disable) == "1") {
    return Status::error(Code::Unsupported, "NCCL_IB_DISABLE=1");
  }
  if (Status s = VerbsSettings::fromEnvironment(config, &out->settings); !s) return s;
  const VerbsLibrary* library = nullptr;
  if (Status status = VerbsLibrary::load(&library); !status) return status;
  return openNics(*library, out->settings, &out->nics);
}

/// A device for each port, so that NCCL picks the one near its GPU, as it does over its own verbs.
void addPorts(const VerbsGround& all, const Interface& interface, bool staging, DeviceList* out) {
  const std::string host = nodeKey();
  for (const std::shared_ptr<const Nic>& nic : all.nics) {
    auto ground = std::make_shared<VerbsGround>();
    ground->settings = all.settings;
    ground->nics = {nic};
    ground->gpu = decideGpuDirect(gatherGpuDirectFacts(ground->nics, staging));
    Device device;
    // NCCL finds devices by their names.
    const bool known = std::any_of(
        out->begin(), out->end(), [&](const Device& other) { return other.name == nic->device(); });
    device.name =
        known ? fmt::format("{}:{}", nic->device(), unsigned{nic->port()}) : nic->device();
    device.pciPath = nic->pciPath();
    device.guid = nic->guid() != 0 ? nic->guid() : guidOf(host, nic->device());
    device.speedMbps = speedOf(nic->speedMbps());
    device.port = nic->port();
    device.interface = interface;
    device.ground = std::move(ground);
    out->push_back(std::move(device));
  }
}

}  // namespace

Status findDevices(const Config& config, DeviceList* out, std::string* remark) {
  InterfaceChoice choice;
  if (Status status = InterfaceChoice::fromEnvironment(config, &choice); !status) return status;
  std::vector<Interface> interfaces;
  if (Status status = chooseInterfaces(choice, &interfaces); !status) return status;
  if (config.transport == "auto" || config.transport == "verbs") {
    VerbsGround all;
    const Status status = openRails(config, &all);
    if (status) {
      addPorts(all, interfaces.front(), config.netStaging != 0, out);
      *remark = out->front().ground->gpu.text;
      return {};
    }
    if (config.transport == "verbs") return status.inContext("HOCCL_TRANSPORT=verbs");
    if (status.code() == Code::InvalidConfig) {
      logWarn("{}; tcp is used", status.message());
    } else {
      *remark = "no verbs: " + status.message();
    }
  }
  const std::string host = nodeKey();
  for (Interface& interface : interfaces) {
    Device device;
    device.name = interface.name;
    device.pciPath = interface.pciPath;
    device.guid = guidOf(host, interface.name);
    device.speedMbps = speedOf(interface.speedMbps);
    device.interface = std::move(interface);
    out->push_back(std::move(device));
  }
  return {};
}

std::string textOf(const DeviceList& devices) {
  std::string text;
  for (std::size_t i = 0; i < std::min(devices.size(), kDevicesNamed); ++i) {
    const Device& device = devices[i];
    std::string address = device.interface.address.text();
    address.resize(address.rfind(':'));  // the port, which is 0
    text += i == 0 ? "" : ", ";
    if (!device.ground) {
      text += fmt::format("{} ({})", device.name, address);
      continue;
    }
    for (std::size_t n = 0; n < device.ground->nics.size(); ++n) {
      text += (n == 0 ? "" : "+") + device.ground->nics[n]->text();
    }
  }
  if (devices.size() > kDevicesNamed) {
    text += fmt::format(" and {} more", devices.size() - kDevicesNamed);
  }
  return text;
}

bool isInfiniBand(const Device& device) {
  return device.ground != nullptr &&
         device.ground->nics[0]->address().linkLayer == IBV_LINK_LAYER_INFINIBAND;
}

bool sameDevices(const DeviceList& a, const DeviceList& b) {
  const auto own = [](const DeviceList& list) {
    return std::find_if(list.begin(), list.end(),
                        [](const Device& device) { return !device.members.empty(); });
  };
  const auto sameNics = [](const VerbsGround& x, const VerbsGround& y) {
    return std::equal(x.nics.begin(), x.nics.end(), y.nics.begin(), y.nics.end(),
                      [](const auto& m, const auto& n) { return m->text() == n->text(); });
  };
  return std::equal(a.begin(), own(a), b.begin(), own(b), [&](const Device& x, const Device& y) {
    return x.name == y.name && x.port == y.port && x.guid == y.guid &&
           x.interface.address == y.interface.address && !x.ground == !y.ground &&
           (!x.ground || sameNics(*x.ground, *y.ground));
  });
}

Status mergeDevices(const DeviceList& all, std::span<const int> members, Device* out) {
  if (members.empty()) return Status::error(Code::InvalidArgument, "one device of none");
  auto ground = std::make_shared<VerbsGround>();
  Device merged;
  for (const int member : members) {
    if (member < 0 || static_cast<std::size_t>(member) >= all.size()) {
      return Status::error(Code::InvalidArgument,
                           fmt::format("device {}, and there are {}", member, all.size()));
    }
    const Device& device = all[static_cast<std::size_t>(member)];
    const bool again =
        std::find(merged.members.begin(), merged.members.end(), member) != merged.members.end();
    if (!device.ground || !device.members.empty() || again || ground->nics.size() >= kMostRails) {
      return Status::error(Code::InvalidArgument,
                           fmt::format("{} cannot be made part of one device", device.name));
    }
    if (merged.members.empty()) {
      merged = device;
      ground->settings = device.ground->settings;
      ground->gpu = device.ground->gpu;
    } else {
      if (device.ground->nics[0]->address().linkLayer != ground->nics[0]->address().linkLayer) {
        return Status::error(Code::InvalidArgument,
                             fmt::format("{} and {}: one is InfiniBand and the other Ethernet",
                                         merged.name, device.name));
      }
      merged.name += "+" + device.name;
      merged.speedMbps += device.speedMbps;
    }
    ground->nics.push_back(device.ground->nics[0]);
    ground->gpu.dmaBuf = ground->gpu.dmaBuf && device.ground->gpu.dmaBuf;
    ground->gpu.peerMemory = ground->gpu.peerMemory && device.ground->gpu.peerMemory;
    merged.members.push_back(member);
  }
  merged.ground = std::move(ground);
  *out = std::move(merged);
  return {};
}

}  // namespace hoccl::net_plugin
