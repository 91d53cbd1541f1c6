#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hoccl::emu {

inline constexpr int kMaxDevices = 64;

/// The EMUCUDA_* environment, read once at cuInit. (Not HOCCL_*: those are the product's table.)
struct Settings {
  int devices = 1;            ///< EMUCUDA_DEVICES: GPUs of the machine
  double dilation = 20;       ///< EMUCUDA_DILATION: real time per model time
  std::uint64_t seed = 1;     ///< EMUCUDA_SEED: of the random delays
  std::uint32_t delayUs = 0;  ///< EMUCUDA_DELAY_US: longest random real delay before each operation
  std::uint64_t memoryBytes = std::uint64_t{139} << 30;  ///< EMUCUDA_MEM_GIB: memory of each GPU
  int connections = 0;           ///< CUDA_DEVICE_MAX_CONNECTIONS; 0: not set
  bool fabric = false;           ///< EMUCUDA_FABRIC: 1 = memory has fabric handles where asked for
  bool peerAccess = true;        ///< EMUCUDA_P2P: 0 = no GPU reaches another
  bool nvlink = true;  ///< EMUCUDA_NVLINK: 0 = they do so over PCIe
  /// EMUCUDA_P2P_REFUSE: pairs of GPUs (physical) that do not reach each other.
  std::vector<std::pair<int, int>> apart;
  long refuseImportsAfter = -1;  ///< EMUCUDA_REFUSE_IPC_OPEN: imports that succeed before all
                                 ///< others of the process are refused; -1: none is
  std::string refuseImportsIn;   ///< EMUCUDA_REFUSE_IPC_IN: only in processes of this name
  int computeMode = 0;           ///< EMUCUDA_COMPUTE_MODE: a CUcomputemode
  std::string session;           ///< EMUCUDA_SESSION: processes that share the devices' engines
  std::vector<int> visible;      ///< physical number of each ordinal (CUDA_VISIBLE_DEVICES)
};

/// Reads the environment. On a bad value returns false and one line that names it.
bool loadSettings(Settings* out, std::string* error);
/// Whether the two GPUs (physical) reach each other's memory.
bool reachEachOther(int a, int b);
/// The settings in force; valid after a successful cuInit.
const Settings& settings();
void setSettings(const Settings& values);

/// Real nanoseconds, CLOCK_MONOTONIC: the same in every process of the machine.
std::int64_t realNow();
/// A model duration as real nanoseconds.
std::int64_t toReal(double modelNanoseconds);

/// "GPU-…" and the 16 bytes behind it for a physical device.
void uuidOf(int physical, unsigned char out[16]);
std::string uuidText(int physical);

}  // namespace hoccl::emu
