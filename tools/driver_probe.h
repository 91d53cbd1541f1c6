#pragma once

#include <string>
#include <vector>

namespace hoccl {

/// A library that would be loaded by its bare name, or why it would not.
struct LibraryFacts {
  bool loads = false;
  std::string file;
  std::string problem;
  int version =
      0;  ///< libcuda: 13000 is CUDA 13.0; libnccl: 22809 is 2.28.9; 0 where it does not tell
};

/// The NVIDIA driver as this environment finds it.
struct DriverFacts {
  LibraryFacts library;
  std::vector<std::string> gpus;  ///< names, in the driver's order
  std::string gpuProblem;         ///< why no GPU was found
};

/// Loads libcuda.so.1 in a child and asks it for its version, and for the GPUs where `withGpus`
/// (which initialises the driver: seconds on a large machine).
DriverFacts probeDriver(bool withGpus);
/// The same for NCCL: HOCCL_NCCL_LIB where set, else libnccl.so.2.
LibraryFacts probeNccl();

/// 13000 to "13.0".
std::string cudaVersionText(int version);
/// 22809 to "2.28.9", 2708 to "2.7.8".
std::string ncclVersionText(int version);

}  // namespace hoccl
