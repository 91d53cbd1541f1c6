#pragma once

// Whether NICs reach GPU memory by themselves (GPUDirect RDMA), by which way, and when what a NIC
// has written there has to be flushed. Decisions only, so that they can be tested without hardware.
//
// Sources: ibv_reg_dmabuf_mr(3) of rdma-core; the kernel's documentation of peer memory (modules
// nvidia_peermem, formerly nv_peer_mem); NCCL's public source, src/transport/net_ib and
// src/graph/paths.cc, for which errors of a trial say that DMA-BUF is not there, and which GPUs
// need a flush.

#include <cstdint>
#include <string>
#include <vector>

#include "common/net/verbs/nic.h"

namespace hoccl::net_plugin {

/// What the system says.
struct GpuDirectFacts {
  struct Trial {
    std::string nic;
    int error = 0;  ///< errno of registering a DMA-BUF descriptor that is none
  };
  bool library = false;       ///< libibverbs knows DMA-BUF
  std::vector<Trial> trials;  ///< of each NIC, where the library does
  bool peerMemory = false;    ///< a module that lets ibv_reg_mr take GPU memory is loaded
  bool staging = false;       ///< HOCCL_NET_STAGING=1: copy engines do it
};

/// Which ways there are. NCCL prefers DMA-BUF where both the NIC and the GPU have it.
struct GpuDirect {
  bool dmaBuf = false, peerMemory = false;
  std::string text;  ///< for the log: the outcome and its cause
  [[nodiscard]] bool any() const { return dmaBuf || peerMemory; }
};

[[nodiscard]] GpuDirect decideGpuDirect(const GpuDirectFacts& facts);
/// Asks the NICs and the kernel.
[[nodiscard]] GpuDirectFacts gatherGpuDirectFacts(const Nics& nics, bool staging);

/// What a receive brought, and where to.
struct FlushFacts {
  bool deviceMemory = false;
  std::uint64_t bytes = 0;    ///< of all receives of the group
  int computeCapability = 0;  ///< major; 0: not known
  bool coherentLink = false;  ///< the GPU hangs on the CPU by C2C, and the NIC on PCIe
  bool disabled = false;      ///< NCCL_GDR_FLUSH_DISABLE=1
};
/// Whether the data may become visible to the GPU behind what tells it that they are there.
[[nodiscard]] bool needsFlush(const FlushFacts& facts);

}  // namespace hoccl::net_plugin
