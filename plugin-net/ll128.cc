#include "plugin-net/ll128.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <strings.h>

#include <cstdlib>
#include <string_view>

namespace hoccl::net_plugin {
namespace {

/// From this version of the net interface on (NCCL 2.24) every NCCL has a tuner interface with a
/// table.
constexpr int kTableSince = 9;
constexpr char kRemedy[] =
    "set NCCL_PROTO=^LL128, or NCCL_TUNER_PLUGIN to libnccl-tuner-hoccl.so, alike on all ranks";

/// NCCL_PROTO's rules: a list without regard to case, `^` in front for all but those.
struct Protocols {
  bool byFunction = false;  ///< "allreduce:LL128;…": not looked into
  bool ll128 = false, others = false;
};

Protocols protocolsOf(std::string_view text) {
  Protocols allowed;
  allowed.byFunction = text.find_first_of(":;") != std::string_view::npos;
  const bool except = !text.empty() && text.front() == '^';
  if (except) text.remove_prefix(1);
  bool named[3] = {};
  const char* const names[] = {"LL", "LL128", "Simple"};
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    const std::string name(text.substr(0, comma));
    for (int i = 0; i < 3; ++i) named[i] = named[i] || ::strcasecmp(name.c_str(), names[i]) == 0;
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  allowed.ll128 = named[1] != except;
  allowed.others = (named[0] != except) || (named[2] != except);
  return allowed;
}

/// As NCCL looks for it.
bool isOurTuner(const std::string& name) {
  void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr && name.find('/') == std::string::npos) {
    library = ::dlopen(fmt::format("libnccl-tuner-{}.so", name).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) return false;
  const bool ours = ::dlsym(library, "hocclTunerRulesOutLl128") != nullptr;
  ::dlclose(library);
  return ours;
}

}  // namespace

Ll128 ll128KeptOff(int abiVersion) {
  const char* const protocols = std::getenv("NCCL_PROTO");
  if (protocols != nullptr && protocols[0] != '\0') {
    const Protocols allowed = protocolsOf(protocols);
    if (!allowed.byFunction && !allowed.ll128) return {true, {}};
    if (allowed.byFunction || !allowed.others) {
      return {false, fmt::format("NCCL_PROTO={} lets NCCL use LL128, which does not go through "
                                 "staging: {}",
                                 protocols, kRemedy)};
    }
  }
  const char* const tuner = std::getenv("NCCL_TUNER_PLUGIN");
  if (tuner == nullptr || tuner[0] == '\0') {
    return {false,
            fmt::format("NCCL could use LL128, which does not go through staging: {}", kRemedy)};
  }
  if (abiVersion < kTableSince) {
    return {false,
            fmt::format("with an NCCL before 2.24 the tuner cannot be relied on to keep LL128 "
                        "off, which does not go through staging: set NCCL_PROTO=^LL128 on all "
                        "ranks")};
  }
  if (!isOurTuner(tuner)) {
    return {false,
            fmt::format("NCCL_TUNER_PLUGIN={} is not HOCCL's tuner of this version, and NCCL could "
                        "use LL128, which does not go through staging: {}",
                        tuner, kRemedy)};
  }
  return {true, {}};
}

}  // namespace hoccl::net_plugin
