#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/config.h"
#include "common/base/status.h"
#include "common/net/tcp/socket_address.h"

namespace hoccl {

/// A network interface that is up, with the first of its addresses that fits.
struct Interface {
  std::string name;
  SocketAddress address;        ///< port 0
  std::uint32_t speedMbps = 0;  ///< as sysfs tells; 0 where it does not (loopback, veth)
  std::string pciPath;  ///< the device's folder in sysfs, links resolved; empty for virtual ones
  bool loopback = false;
};

/// Which interfaces somebody asked for, by the rules of NCCL_SOCKET_IFNAME: names or prefixes
/// separated by commas; `=` in front: exact names; `^`: all but these; `^=` both.
struct InterfaceChoice {
  std::string list;                             ///< empty: the default order
  std::string variable = "NCCL_SOCKET_IFNAME";  ///< where `list` comes from, for messages
  int family = 0;                               ///< AF_INET, AF_INET6, or 0 for either

  /// HOCCL_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME; NCCL_SOCKET_FAMILY.
  static Status fromEnvironment(const Config& config, InterfaceChoice* out);
};

/// The interfaces to use, best first. By default the first kind that exists: ib*, then any that is
/// not lo, docker* or virbr*, then docker*, then virbr*, then lo. With a list: those it allows, in
/// the order in which the kernel names them. None: one line that names the variable and what there
/// is.
Status chooseInterfaces(const InterfaceChoice& choice, std::vector<Interface>* out);

/// Every interface that is up and has an address of the family.
Status allInterfaces(int family, std::vector<Interface>* out);

/// The choice over a given list; what chooseInterfaces does after asking the kernel.
Status selectInterfaces(const InterfaceChoice& choice, const std::vector<Interface>& all,
                        std::vector<Interface>* out);

/// Whether `list` allows an interface of that name.
[[nodiscard]] bool interfaceAllowed(std::string_view list, std::string_view name);

}  // namespace hoccl
