#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/base/config.h"
#include "common/base/status.h"

namespace hoccl {

/// How queue pairs are made and used: what the HOCCL_IB_* variables say, else NCCL's NCCL_IB_* of
/// the same names, else the defaults here.
struct VerbsSettings {
  enum class Choice { Auto, Off, On };

  std::string hcaList;  ///< NCCL_IB_HCA's syntax (hca_list.h); empty: all devices
  std::string hcaVariable = "NCCL_IB_HCA";  ///< where it comes from, for messages
  std::string gidIndex;  ///< "3" or "mlx5_0:3,mlx5_1:1"; empty: chosen (gid_choice.h)
  std::string gidVariable = "NCCL_IB_GID_INDEX";
  unsigned qpsPerPeer = 4;  ///< queue pairs per NIC and peer
  std::uint8_t trafficClass = 0;
  std::uint8_t serviceLevel = 0;
  bool trafficClassSaid = false, serviceLevelSaid = false;  ///< by a variable
  std::uint16_t pkeyIndex = 0;
  /// 4.096 us * 2^timeout until a packet is sent again. With `retryCount` 7 a dead path shows
  /// within about 1 to 4 s, inside rule 9's bound (NCCL's default, 20, takes half a minute).
  std::uint8_t timeout = 15;
  std::uint8_t retryCount = 7;
  /// HOCCL_TIMEOUT_MS: with no working queue pair left, new ones are tried for so long.
  std::uint64_t lastChanceMs = 5000;
  /// What a stopped queue pair had is given back within microseconds; a device that is gone never
  /// does. Behind this time it counts no more. No variable: tests shorten these three.
  std::uint64_t drainMs = 1000;
  /// A failed queue pair is followed by a new one after so long, and after twice as long with each
  /// try that fails, up to the last.
  std::uint64_t firstBackoffMs = 250, lastBackoffMs = 30'000;
  /// Auto: on InfiniBand, off on RoCE, as NCCL has it.
  Choice adaptiveRouting = Choice::Auto;
  std::uint64_t adaptiveThreshold = 8192;  ///< bytes; smaller writes are one packet or two
  /// Auto: asked for where the library knows it; a device that does not ignores it.
  Choice relaxedOrdering = Choice::Auto;

  static constexpr unsigned kMostQps = 16;
  /// All variables; one that makes no sense is an error that names it and what is allowed.
  static Status fromEnvironment(const Config& config, VerbsSettings* out);
  /// A communicator's traffic class (ncclConfig.trafficClass; -1 or the smallest integer: none).
  /// What variables say is ahead of it. On InfiniBand, whose packets have no traffic class inside a
  /// subnet, it is the service level, too, as NCCL has it. An error says what is allowed.
  Status takeTrafficClass(int value, bool infiniBand);
};

}  // namespace hoccl
