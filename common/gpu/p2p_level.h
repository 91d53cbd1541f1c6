#pragma once

#include <string>
#include <string_view>

namespace hoccl {

/// How far two GPUs of a node are from each other, as NCCL and nvidia-smi name it, nearest first.
/// As a level: the greatest distance at which their memory is copied directly.
enum class P2pLevel {
  Loc,  ///< as a level: never
  Nvl,  ///< NVLink
  Pix,  ///< one PCIe switch between them
  Pxb,  ///< several PCIe switches
  Phb,  ///< a host bridge, so the CPU
  Sys,  ///< a link between CPUs; or it cannot be found out
};

/// "PXB".
const char* p2pLevelName(P2pLevel level);
/// One of those names, another of NCCL's, or one of its old numbers, 0 (LOC) to 5; false: neither.
bool parseP2pLevel(std::string_view text, P2pLevel* out);

struct P2pLimit {
  P2pLevel level = P2pLevel::Pxb;
  std::string from;  ///< the variable that says so; empty: none
};
/// NCCL_P2P_DISABLE=1 (never), NCCL_P2P_LEVEL, else as NCCL decides: not through a CPU, where PCIe
/// copies between GPUs are slow or, behind an IOMMU, may not work at all; but at any distance on a
/// machine with an AMD CPU and two GPUs at most. With HOCCL_P2P set to something other than 0,
/// which is ahead of both, neither can mean never. What NCCL_P2P_LEVEL says in vain is logged.
P2pLimit p2pLimit(int gpus, const std::string& cpuinfo = "/proc/cpuinfo");

/// Between two devices by their PCI addresses ("0000:3b:00.0"); Pix or farther.
P2pLevel pciDistance(const std::string& a, const std::string& b, const std::string& sysfs = "/sys");

}  // namespace hoccl
