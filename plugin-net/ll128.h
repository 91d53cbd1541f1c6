#pragma once

#include <string>

namespace hoccl::net_plugin {

/// Whether NCCL cannot take its protocol LL128 in this process, and if it can, what would stop it.
struct Ll128 {
  bool off = false;
  std::string why;
};

/// LL128's receiver takes 128 bytes for whole when it has seen their flag, which holds for stores
/// over NVLink and for a NIC that writes in order, not for a copy engine. Two things keep it off:
/// NCCL_PROTO, and our tuner (NCCL_TUNER_PLUGIN), which every interface since `abiVersion` 9
/// consults by the table that can rule out a protocol.
Ll128 ll128KeptOff(int abiVersion);

}  // namespace hoccl::net_plugin
