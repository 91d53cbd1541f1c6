#pragma once

#include <string>

namespace hoccl {

/// What HOCCL's net plugin does when NCCL would load it here: NCCL falls back to its own transports
/// without a word that stands out if this fails.
struct NetPluginTrial {
  bool tried = false;   ///< the library has the entry points of version 11
  int devices = 0;      ///< interfaces it offers
  std::string line;     ///< its line at init
  std::string problem;  ///< empty where it is fit
};

/// Calls init and devices of a loaded net plugin of HOCCL's. In a child process only.
NetPluginTrial tryNetPlugin(void* library);

}  // namespace hoccl
