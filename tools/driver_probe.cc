#include "tools/driver_probe.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "tools/child_probe.h"

namespace hoccl {
namespace {

using Json = nlohmann::json;

std::string fileOf(void* handle) {
  link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return {};
  return map->l_name;
}

template <typename Function>
Function* symbol(void* handle, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(handle, name));
}

// Opens `name`; null, with the reason in `answer`, where that fails.
void* openInto(const std::string& name, Json* answer) {
  void* handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    (*answer)["problem"] = ::dlerror();
  } else {
    (*answer)["file"] = fileOf(handle);
  }
  return handle;
}

// Runs in the child. The driver's functions are declared here, not included: all return 0 for
// success.
std::string askDriver(bool withGpus) {
  Json answer;
  void* driver = openInto("libcuda.so.1", &answer);
  if (driver == nullptr) return answer.dump();
  int version = 0;
  if (auto* get = symbol<int(int*)>(driver, "cuDriverGetVersion")) get(&version);
  answer["version"] = version;
  if (!withGpus) return answer.dump();
  auto* init = symbol<int(unsigned)>(driver, "cuInit");
  auto* count = symbol<int(int*)>(driver, "cuDeviceGetCount");
  auto* nameOf = symbol<int(char*, int, int)>(driver, "cuDeviceGetName");
  if (init == nullptr || count == nullptr || nameOf == nullptr) {
    answer["gpu_problem"] = "this libcuda.so.1 lacks cuInit, cuDeviceGetCount or cuDeviceGetName";
    return answer.dump();
  }
  int gpus = 0;
  if (const int error = init(0)) {
    answer["gpu_problem"] = fmt::format("cuInit failed with error {}", error);
  } else if (const int countError = count(&gpus)) {
    answer["gpu_problem"] = fmt::format("cuDeviceGetCount failed with error {}", countError);
  } else if (gpus == 0) {
    answer["gpu_problem"] = "the driver shows no GPU (see CUDA_VISIBLE_DEVICES)";
  }
  for (int i = 0; i < gpus; ++i) {
    char name[256] = "unknown";
    nameOf(name, sizeof name, i);
    answer["gpus"].push_back(name);
  }
  return answer.dump();
}

std::string askNccl(const std::string& name) {
  Json answer;
  void* nccl = openInto(name, &answer);
  if (nccl == nullptr) return answer.dump();
  int version = 0;
  if (auto* get = symbol<int(int*)>(nccl, "ncclGetVersion")) {
    get(&version);
  } else {
    answer["problem"] = name + " has no ncclGetVersion: it is not NCCL";
  }
  answer["version"] = version;
  return answer.dump();
}

// The common part of an answer; a child that ended early is a library that does not load.
LibraryFacts libraryFacts(const ChildResult& child, Json* answer) {
  LibraryFacts facts;
  *answer = Json::parse(child.output, nullptr, false);
  if (!child.ok || !answer->is_object()) {
    *answer = Json::object();
    facts.problem = "loading it: " +
                    (child.problem.empty() ? "it ended the process" : child.problem);
    return facts;
  }
  facts.file = answer->value("file", "");
  facts.problem = answer->value("problem", "");
  facts.version = answer->value("version", 0);
  facts.loads = facts.problem.empty();
  return facts;
}

}  // namespace

DriverFacts probeDriver(bool withGpus) {
  DriverFacts facts;
  Json answer;
  facts.library =
      libraryFacts(runInChild([&] { return askDriver(withGpus); }, kProbeTimeoutMs), &answer);
  facts.gpus = answer.value("gpus", std::vector<std::string>());
  facts.gpuProblem = facts.library.loads ? answer.value("gpu_problem", "")
                                         : "the driver's libcuda.so.1 does not load";
  return facts;
}

LibraryFacts probeNccl() {
  const char* configured = std::getenv("HOCCL_NCCL_LIB");
  const std::string name =
      configured != nullptr && *configured != '\0' ? configured : "libnccl.so.2";
  Json answer;
  return libraryFacts(runInChild([&] { return askNccl(name); }, kProbeTimeoutMs), &answer);
}

std::string cudaVersionText(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string ncclVersionText(int version) {
  // NCCL changed the weights with 2.9.
  const int major = version < 10000 ? 1000 : 10000;
  return fmt::format("{}.{}.{}", version / major, version % major / 100, version % 100);
}

}  // namespace hoccl
