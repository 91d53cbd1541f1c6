#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hoccl {

/// An entry of a port's GID table that is in use.
struct GidEntry {
  std::uint32_t index = 0;
  ibv_gid gid{};
  std::uint32_t type = 0;  ///< enum ibv_gid_type
};

/// Which GID a port of a RoCE device sends from, of those in its table: RoCE v2 before v1, there
/// IPv4-mapped ones before other IPv6 and those before link-local, then the lowest index.
/// `override` names an index instead: "3", or by device "mlx5_0:3,mlx5_1:1" (others then choose).
/// Errors name `variable`, the device and what there is.
Status chooseGid(const std::vector<GidEntry>& table, std::string_view device,
                 std::string_view override, std::string_view variable, GidEntry* out);

/// The index `override` gives a device; -1: it leaves the choice open. Anything else than the two
/// forms above is an error.
Status gidOverride(std::string_view override, std::string_view device, std::string_view variable,
                   std::int64_t* index);

/// The devices that `override` names.
std::vector<std::string_view> gidOverrideDevices(std::string_view override);

/// "10.0.0.1" of an IPv4-mapped GID, else as IPv6.
std::string gidText(const ibv_gid& gid);

}  // namespace hoccl
