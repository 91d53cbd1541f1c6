#include "tools/net_plugin_trial.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdarg>
#include <cstdio>

#include "plugin-net/nccl_net_abi.h"

namespace hoccl {
namespace {

// Of this process, which makes one trial.
std::string firstLine, firstWarning;

void keepLine(int level, unsigned long, const char*, int, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::string& kept = level == nccl_abi::kLogWarn ? firstWarning : firstLine;
  if (kept.empty()) kept = text;
}

}  // namespace

NetPluginTrial tryNetPlugin(void* library) {
  NetPluginTrial trial;
  const auto* const net =
      static_cast<const nccl_abi::NetV11*>(::dlsym(library, "ncclNetPlugin_v11"));
  if (net == nullptr) return trial;
  trial.tried = true;
  void* context = nullptr;
  nccl_abi::CommConfig config{-1};
  const ncclResult_t result = net->init(&context, 0, &config, keepLine, nullptr);
  if (result == ncclSuccess) {
    if (net->devices(&trial.devices) != ncclSuccess) trial.devices = 0;
    (void)net->finalize(context);
  }
  trial.line = firstLine;
  if (result != ncclSuccess || trial.devices < 1) {
    trial.problem = firstWarning.empty() ? fmt::format("its init gives {}, and it has {} devices",
                                                       static_cast<int>(result), trial.devices)
                                         : firstWarning;
  }
  return trial;
}

}  // namespace hoccl
