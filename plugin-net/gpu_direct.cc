#include "plugin-net/gpu_direct.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace hoccl::net_plugin {
namespace {

/// From this major version on writes of a NIC over PCIe are seen in order.
constexpr int kOrderedCapability = 9;

/// These say that driver or kernel have no DMA-BUF; others (EBADF) that they looked at the
/// descriptor.
bool saysUnknown(int error) {
  return error == EOPNOTSUPP || error == EPROTONOSUPPORT || error == ENOSYS;
}

}  // namespace

GpuDirect decideGpuDirect(const GpuDirectFacts& facts) {
  GpuDirect way;
  if (facts.staging) {
    way.text = "device memory goes through staging (HOCCL_NET_STAGING=1), not to the NICs";
    return way;
  }
  std::string why;
  if (!facts.library) why = "libibverbs does not know DMA-BUF (rdma-core before 34)";
  for (const GpuDirectFacts::Trial& trial : facts.trials) {
    if (!saysUnknown(trial.error) || !why.empty()) continue;
    why = fmt::format("{} does not take DMA-BUF ({})", trial.nic, ::strerror(trial.error));
  }
  way.dmaBuf = why.empty() && !facts.trials.empty();
  if (why.empty() && facts.trials.empty()) why = "no NIC";
  way.peerMemory = facts.peerMemory;
  if (way.dmaBuf) {
    way.text = way.peerMemory ? "NICs reach device memory by DMA-BUF or nvidia_peermem"
                              : "NICs reach device memory by DMA-BUF, where the GPU has it";
  } else if (way.peerMemory) {
    way.text = fmt::format("NICs reach device memory by nvidia_peermem; {}", why);
  } else {
    way.text = fmt::format(
        "NICs do not reach device memory: {}, and neither nvidia_peermem nor nv_peer_mem is "
        "loaded; "
        "NCCL keeps its buffers in host memory (HOCCL_NET_STAGING=1 has another way)",
        why);
  }
  return way;
}

GpuDirectFacts gatherGpuDirectFacts(const Nics& nics, bool staging) {
  GpuDirectFacts facts;
  facts.staging = staging;
  for (const char* module : {"/sys/module/nvidia_peermem", "/sys/module/nv_peer_mem"}) {
    facts.peerMemory = facts.peerMemory || ::access(module, F_OK) == 0;
  }
  for (const auto& nic : nics) {
    const VerbsLibrary& library = nic->library();
    facts.library = library.regDmaBufMr != nullptr;
    if (!facts.library) break;
    errno = 0;
    constexpr int kNoDescriptor = -1;
    ibv_mr* const made = library.regDmaBufMr(nic->pd(), 0, 0, 0, kNoDescriptor, 0);
    facts.trials.push_back({nic->text(), made != nullptr ? 0 : errno});
    if (made != nullptr) library.deregMr(made);
  }
  return facts;
}

bool needsFlush(const FlushFacts& facts) {
  if (!facts.deviceMemory || facts.bytes == 0 || facts.disabled) return false;
  if (facts.computeCapability < kOrderedCapability) return true;  // also where it is not known
  return facts.coherentLink;
}

}  // namespace hoccl::net_plugin
