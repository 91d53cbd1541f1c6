#pragma once

// What NCCL finds: the network interfaces, or the ports of RDMA NICs.

#include <deque>
#include <span>
#include <string>

#include "common/base/config.h"
#include "common/base/status.h"
#include "plugin-net/net_plugin.h"

namespace hoccl::net_plugin {

using DeviceList = std::deque<Device>;  ///< NCCL keeps names: nothing in it moves

/// The devices that HOCCL_TRANSPORT, HOCCL_SOCKET_IFNAME and HOCCL_IB_HCA (or NCCL's variables of
/// these names) choose. `remark`: why `auto` takes no NIC, or by which way NICs reach device
/// memory, for the log; may be empty.
Status findDevices(const Config& config, DeviceList* out, std::string* remark);

/// "eth0 (10.0.0.1), ib0 (10.1.0.1)".
std::string textOf(const DeviceList& devices);
/// Of RDMA NICs: whether they are on InfiniBand.
[[nodiscard]] bool isInfiniBand(const Device& device);
/// Whether NCCL sees the same in both, at the same addresses; but for those made of several.
[[nodiscard]] bool sameDevices(const DeviceList& a, const DeviceList& b);

/// One of several of the list (net_plugin.h).
Status mergeDevices(const DeviceList& all, std::span<const int> members, Device* out);

}  // namespace hoccl::net_plugin
