#include "common/net/verbs/nic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "common/base/log.h"
#include "common/net/verbs/hca_list.h"

namespace hoccl {
namespace {

/// Entries of a GID table looked at: an index has 8 bits in a queue pair.
constexpr std::uint32_t kMostGids = 256;

struct DeviceList {
  explicit DeviceList(const VerbsLibrary& l) : library(l), list(l.getDeviceList(&count)) {}
  ~DeviceList() {
    if (list) library.freeDeviceList(list);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  const VerbsLibrary& library;
  int count = 0;
  ibv_device** list;
};

/// The entries of a port's GID table that are in use.
std::vector<GidEntry> gidTable(const VerbsLibrary& library, ibv_context* context, std::uint8_t port,
                               int length) {
  std::vector<GidEntry> table;
  const std::uint32_t most = std::min<std::uint32_t>(kMostGids, static_cast<std::uint32_t>(length));
  for (std::uint32_t i = 0; i < most; ++i) {
    ibv_gid_entry entry{};
    if (library.queryGid(context, port, i, &entry) != 0) continue;
    if (entry.gid.global.subnet_prefix == 0 && entry.gid.global.interface_id == 0) continue;
    table.push_back({i, entry.gid, entry.gid_type});
  }
  return table;
}

std::string realPath(const std::string& path) {
  char* const resolved = ::realpath(path.c_str(), nullptr);
  if (resolved == nullptr) return {};
  std::string text = resolved;
  std::free(resolved);
  return text;
}

void append(std::string* list, const std::string& text) {
  if (!list->empty()) *list += "; ";
  *list += text;
}

}  // namespace

Nic::~Nic() {
  if (pd_) library_->deallocPd(pd_);
  if (context_) library_->closeDevice(context_);
}

std::uint32_t portSpeedMbps(std::uint8_t width, std::uint8_t speed) {
  struct Code {
    std::uint8_t code;
    std::uint32_t value;
  };
  constexpr Code kLanes[] = {{1, 1}, {2, 4}, {4, 8}, {8, 12}, {16, 2}};
  constexpr Code kLaneMbps[] = {{1, 2500},   {2, 5000},   {4, 10000},  {8, 10000},
                                {16, 14000}, {32, 25000}, {64, 50000}, {128, 100000}};
  std::uint32_t lanes = 0, each = 0;
  for (const Code& known : kLanes) lanes = known.code == width ? known.value : lanes;
  for (const Code& known : kLaneMbps) each = known.code == speed ? known.value : each;
  return lanes * each;
}

std::string addressText(const PortAddress& address) {
  return address.linkLayer == IBV_LINK_LAYER_INFINIBAND ? fmt::format("LID {}", address.lid)
                                                        : "GID " + gidText(address.gid);
}

std::string Nic::text() const {
  return fmt::format("{}:{} ({})", device_, unsigned{port_}, addressText(address_));
}

/// Goes through the devices and keeps what it finds.
class NicOpener {
 public:
  NicOpener(const VerbsLibrary& library, const VerbsSettings& settings)
      : library_(library), settings_(settings) {}

  Status open(Nics* out) {
    const DeviceList devices(library_);
    if (!devices.list || devices.count == 0) {
      return Status::error(
          Code::Unsupported,
          "there is no RDMA device (ibv_devices lists none): is the driver loaded?");
    }
    Devices sorted;
    for (int i = 0; i < devices.count; ++i) {
      sorted.emplace_back(library_.getDeviceName(devices.list[i]), devices.list[i]);
    }
    std::sort(sorted.begin(), sorted.end());
    for (const auto& [name, device] : sorted) {
      append(&names_, name);
      if (Status status = lookAt(name, device); !status) return status;
    }
    warnOfUnknown(sorted);
    if (!matched_ && !settings_.hcaList.empty()) {
      return Status::error(Code::InvalidConfig,
                           fmt::format("{}='{}' fits no port of an RDMA device; there are: {}",
                                       settings_.hcaVariable, settings_.hcaList, names_));
    }
    if (nics_.empty()) {
      return Status::error(Code::Unsupported,
                           fmt::format("no RDMA device can be used: {}", problems_));
    }
    if (!problems_.empty()) logInfo("verbs: not used: {}", problems_);
    if (nics_.size() > kMostRails) {
      logInfo("verbs: {} ports, of which the first {} are used ({} names others)", nics_.size(),
              kMostRails, settings_.hcaVariable);
      nics_.resize(kMostRails);
    }
    *out = std::move(nics_);
    return {};
  }

 private:
  using Devices = std::vector<std::pair<std::string, ibv_device*>>;
  /// GID indexes by device, of ones that are not here: a slip, or the same variable on hosts that
  /// differ.
  void warnOfUnknown(const Devices& devices) const {
    for (const std::string_view named : gidOverrideDevices(settings_.gidIndex)) {
      if (std::any_of(devices.begin(), devices.end(),
                      [named](const auto& device) { return device.first == named; })) {
        continue;
      }
      logWarn("{}='{}' names {}, which is no RDMA device here; there are: {}",
              settings_.gidVariable, settings_.gidIndex, named, names_);
    }
  }
  /// An error only for what the user has to change; what is merely not usable goes into problems_.
  Status lookAt(const std::string& name, ibv_device* device) {
    if (!anyPortAllowed(name)) return {};
    if (device->transport_type != IBV_TRANSPORT_IB) {
      // iWARP connects by a protocol of its own, and others have no reliable connections.
      matched_ = true;
      append(&problems_, name + " is neither InfiniBand nor RoCE");
      return {};
    }
    std::uint8_t ports = 1;
    for (std::uint8_t port = 1; port <= ports; ++port) {
      std::shared_ptr<Nic> nic(new Nic);
      nic->library_ = &library_;
      nic->device_ = name;
      nic->port_ = port;
      nic->context_ = library_.openDevice(device);
      if (!nic->context_) {
        append(
            &problems_,
            fmt::format("{} cannot be opened: {}", name,
                        Status::fromErrno("ibv_open_device", errno != 0 ? errno : EIO).message()));
        return {};
      }
      ibv_device_attr attributes{};
      if (library_.queryDevice(nic->context_, &attributes) != 0) {
        append(&problems_, fmt::format("{} does not say what it can do", name));
        return {};
      }
      ports = std::max<std::uint8_t>(1, attributes.phys_port_cnt);
      if (!hcaAllowed(settings_.hcaList, name, port)) continue;
      matched_ = true;
      nic->mostRequests_ = static_cast<std::uint32_t>(std::max(attributes.max_qp_wr, 1));
      nic->mostCompletions_ = static_cast<std::uint32_t>(std::max(attributes.max_cqe, 1));
      nic->guid_ = attributes.sys_image_guid;
      nic->pciPath_ = realPath(fmt::format("/sys/class/infiniband/{}/device", name));
      if (Status status = lookAtPort(*nic); !status) return status;
      if (nic->pd_) nics_.push_back(std::move(nic));
    }
    return {};
  }

  Status lookAtPort(Nic& nic) {
    const std::string where = fmt::format("{}:{}", nic.device_, unsigned{nic.port_});
    ibv_port_attr port{};
    if (library_.queryPort(nic.context_, nic.port_, &port) != 0) {
      append(&problems_, where + " does not tell its state");
      return {};
    }
    if (port.state != IBV_PORT_ACTIVE) {
      append(&problems_, where + " is not active (is the link up?)");
      return {};
    }
    nic.address_.lid = port.lid;
    nic.address_.linkLayer = port.link_layer == IBV_LINK_LAYER_INFINIBAND
                                 ? IBV_LINK_LAYER_INFINIBAND
                                 : IBV_LINK_LAYER_ETHERNET;
    nic.speedMbps_ = portSpeedMbps(port.active_width, port.active_speed);
    nic.address_.mtu = static_cast<std::uint8_t>(port.active_mtu);
    const auto table = gidTable(library_, nic.context_, nic.port_, port.gid_tbl_len);
    GidEntry gid;
    if (nic.address_.linkLayer == IBV_LINK_LAYER_INFINIBAND && settings_.gidIndex.empty()) {
      // The port's own; it only matters between subnets.
      if (!table.empty()) gid = table.front();
    } else if (Status status =
                   chooseGid(table, nic.device_, settings_.gidIndex, settings_.gidVariable, &gid);
               !status) {
      if (status.code() == Code::InvalidConfig) return status;
      append(&problems_, status.message());
      return {};
    }
    nic.address_.gid = gid.gid;
    nic.gidIndex_ = static_cast<std::uint8_t>(gid.index);
    nic.pd_ = library_.allocPd(nic.context_);
    if (!nic.pd_) {
      append(&problems_,
             where + ": " +
                 Status::fromErrno("no protection domain", errno != 0 ? errno : ENOMEM).message());
    }
    return {};
  }

  /// Without opening the device: a port number beyond those there are fits nothing.
  [[nodiscard]] bool anyPortAllowed(const std::string& name) const {
    for (unsigned port = 1; port <= 255; ++port) {
      if (hcaAllowed(settings_.hcaList, name, port)) return true;
    }
    return false;
  }

  const VerbsLibrary& library_;
  const VerbsSettings& settings_;
  Nics nics_;
  bool matched_ = false;
  std::string names_, problems_;
};

Status openNics(const VerbsLibrary& library, const VerbsSettings& settings, Nics* out) {
  return NicOpener(library, settings).open(out);
}

}  // namespace hoccl
