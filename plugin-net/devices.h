#pragma once

// What NCCL finds: the network interfaces, or the ports of RDMA NICs.

#include <string>
#include <vector>

#include "common/base/config.h"
#include "common/base/status.h"
#include "plugin-net/net_plugin.h"

namespace hoccl::net_plugin {

using DeviceList = std::vector<Device>;

/// The devices that HOCCL_TRANSPORT, HOCCL_SOCKET_IFNAME and HOCCL_IB_HCA (or NCCL's variables of
/// these names) choose. `remark`: why `auto` takes no NIC, for the log; may be empty.
Status findDevices(const Config& config, DeviceList* out, std::string* remark);

/// "eth0 (10.0.0.1), ib0 (10.1.0.1)".
std::string textOf(const DeviceList& devices);
/// Whether NCCL sees the same in both, at the same addresses.
[[nodiscard]] bool sameDevices(const DeviceList& a, const DeviceList& b);

}  // namespace hoccl::net_plugin
