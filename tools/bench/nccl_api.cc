#include "tools/bench/nccl_api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <type_traits>
#include <vector>

#include "tools/bench/locate.h"

namespace hoccl::bench {
namespace {

std::string fileOf(const void* address) {
  Dl_info info{};
  return ::dladdr(address, &info) != 0 && info.dli_fname ? info.dli_fname : "unknown";
}

/// Adds the reasons of one communicator, whatever they are grouped by, by name.
void addReasons(const nlohmann::json& node, std::map<std::string, unsigned long long>* sums) {
  if (!node.is_object()) return;
  for (const auto& [name, value] : node.items()) {
    if (value.is_number_unsigned()) {
      if (value.get<unsigned long long>() > 0) (*sums)[name] += value.get<unsigned long long>();
    } else if (value.is_object() && value.contains("ops") && value["ops"].is_number_unsigned()) {
      (*sums)[name] += value["ops"].get<unsigned long long>();
    }
  }
}

}  // namespace

Status NcclApi::load(const std::string& configuredLibrary, NcclApi* out) {
  std::string places, errors;
  void* handle = nullptr;
  for (const std::string& candidate : ncclCandidates(configuredLibrary, &places)) {
    handle = ::dlopen(candidate.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (handle) break;
    const char* why = ::dlerror();
    errors += fmt::format("{}{}", errors.empty() ? "" : "; ", why ? why : candidate);
  }
  if (!handle)
    return Status::error(
        Code::Unsupported,
        fmt::format("no NCCL could be loaded ({}); looked in {}. Set HOCCL_NCCL_LIB "
                    "to its libnccl.so.2",
                    errors, places));
  NcclApi api;
#define X(name)                                                                  \
  api.name = reinterpret_cast<decltype(api.name)>(::dlsym(RTLD_DEFAULT, #name)); \
  if (!api.name) return Status::error(Code::Unsupported, "the NCCL that was loaded lacks " #name);
  HOCCL_BENCH_NCCL_FUNCTIONS(X)
#undef X
  // A preloaded library may have a function that the NCCL behind it lacks: both must have it.
  const auto newer = [&](const char* name) {
    return ::dlsym(handle, name) ? ::dlsym(RTLD_DEFAULT, name) : nullptr;
  };
  const auto find = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(newer(name));
  };
  find(&api.alltoAll, "ncclAlltoAll");
  find(&api.gather, "ncclGather");
  find(&api.scatter, "ncclScatter");
  find(&api.memAlloc, "ncclMemAlloc");
  find(&api.memFree, "ncclMemFree");
  find(&api.windowRegister, "ncclCommWindowRegister");
  find(&api.windowDeregister, "ncclCommWindowDeregister");
  api.library = fileOf(::dlsym(handle, "ncclSend"));
  api.sendFrom = fileOf(reinterpret_cast<void*>(api.ncclSend));
  *out = std::move(api);
  return {};
}

bool NcclApi::steered() const {
  return sendFrom != library && sendFrom.find("hoccl") != std::string::npos;
}

Status NcclApi::error(const char* call, ncclResult_t result, ncclComm_t communicator) const {
  const char* last = ncclGetLastError(communicator);
  const std::string name(call, std::strcspn(call, "("));
  return Status::error(Code::Remote,
                       fmt::format("{} failed: {}{}{}", name, ncclGetErrorString(result),
                                   last && *last ? ": " : "", last ? last : ""));
}

Status parseSteeringCounts(const std::string& text, SteeringCounts* out) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("communicators") || !json["communicators"].is_array())
    return Status::error(Code::Remote,
                         fmt::format("hocclStatsJson gave no statistics: {:.80}", text));
  SteeringCounts counts;
  counts.known = true;
  std::map<std::string, unsigned long long> reasons;
  std::string why;
  for (const auto& communicator : json["communicators"]) {
    if (!communicator.is_object()) continue;
    // A communicator that is plain NCCL altogether says why; one text stands for all.
    if (const auto text = communicator.find("why");
        why.empty() && text != communicator.end() && text->is_string())
      why = *text;
    if (const auto text = communicator.find("transport");
        text != communicator.end() && text->is_string())
      counts.transport = *text;
    if (communicator.contains("reasons")) addReasons(communicator["reasons"], &reasons);
    if (!communicator.contains("paths") || !communicator["paths"].is_object()) continue;
    for (const auto& [name, path] : communicator["paths"].items()) {
      const auto ops = path.is_object() ? path.value("ops", 0ull) : 0ull;
      // What a rank's stream copies for the rank itself goes beside whatever is between ranks.
      if (name == "own-block") continue;
      (name == "nccl"         ? counts.nccl
       : name == "app-copies" ? counts.appCopies
       : name == "direct"     ? counts.direct
                              : counts.staged) += ops;
    }
  }
  counts.reasons = why;
  for (const auto& [name, count] : reasons)
    counts.reasons += fmt::format("{}{}: {}", counts.reasons.empty() ? "" : ", ", name, count);
  *out = std::move(counts);
  return {};
}

Status readSteeringCounts(SteeringCounts* out) {
  using StatsJson = std::size_t (*)(char*, std::size_t);
  const auto statsJson = reinterpret_cast<StatsJson>(::dlsym(RTLD_DEFAULT, "hocclStatsJson"));
  if (!statsJson) {
    *out = {};
    return {};
  }
  // Returns the length it needs, so a second try always fits unless communicators came in between.
  std::vector<char> text(64 << 10);
  for (int attempt = 0; attempt < 4; ++attempt) {
    const std::size_t length = statsJson(text.data(), text.size());
    if (length < text.size()) return parseSteeringCounts(std::string(text.data(), length), out);
    text.resize(length + 4096);
  }
  return Status::error(Code::Internal, "hocclStatsJson keeps asking for more room");
}

}  // namespace hoccl::bench
