#include "tools/bench/rank_environment.h"

#include <unistd.h>

#include <algorithm>
#include <set>

namespace hoccl::bench {
namespace {

constexpr const char* kPluginVariables[] = {"NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN",
                                            "NCCL_NET_PLUGIN"};

std::string valueOf(const std::vector<std::string>& environment, const std::string& name) {
  for (const std::string& entry : environment)
    if (entry.compare(0, name.size() + 1, name + "=") == 0) return entry.substr(name.size() + 1);
  return "";
}

void remove(std::vector<std::string>* environment, const std::string& name) {
  std::erase_if(*environment, [&](const std::string& entry) {
    return entry.compare(0, name.size() + 1, name + "=") == 0;
  });
}

void assign(std::vector<std::string>* environment, const std::string& name,
            const std::string& value) {
  remove(environment, name);
  environment->push_back(name + "=" + value);
}

bool namesHoccl(const std::string& text) { return text.find("hoccl") != std::string::npos; }

/// The LD_PRELOAD list without our own libraries; the loader separates by colons and blanks.
std::string withoutHoccl(const std::string& list) {
  std::string kept;
  for (std::size_t at = 0; at < list.size();) {
    const std::size_t end = std::min(list.find_first_of(": ", at), list.size());
    const std::string item = list.substr(at, end - at);
    const std::string file = item.substr(item.rfind('/') + 1);
    if (!item.empty() && !namesHoccl(file)) kept += (kept.empty() ? "" : ":") + item;
    at = end + 1;
  }
  return kept;
}

}  // namespace

std::vector<std::string> RankEnvironment::applyTo(const std::vector<std::string>& base) const {
  std::vector<std::string> environment = base;
  const std::string others = withoutHoccl(valueOf(base, "LD_PRELOAD"));
  remove(&environment, "LD_PRELOAD");
  if (!preload.empty())
    assign(&environment, "LD_PRELOAD", others.empty() ? preload : preload + ":" + others);
  else if (!others.empty())
    assign(&environment, "LD_PRELOAD", others);
  if (preload.empty())
    for (const char* name : kPluginVariables)
      if (namesHoccl(valueOf(base, name))) remove(&environment, name);
  if (!hostId.empty()) assign(&environment, "NCCL_HOSTID", hostId);
  if (!libraryPath.empty()) {
    const std::string before = valueOf(base, "LD_LIBRARY_PATH");
    assign(&environment, "LD_LIBRARY_PATH",
           before.empty() ? libraryPath : libraryPath + ":" + before);
  }
  for (const std::string& entry : extra) {
    const std::size_t equals = entry.find('=');
    if (equals == std::string::npos)
      remove(&environment, entry);
    else
      assign(&environment, entry.substr(0, equals), entry.substr(equals + 1));
  }
  return environment;
}

std::vector<std::string> ownEnvironment() {
  std::vector<std::string> environment;
  for (char** entry = ::environ; *entry; ++entry) environment.emplace_back(*entry);
  return environment;
}

std::string ncclTransportIn(const std::string& log) {
  std::set<std::string> found;
  for (const char* kind : {"NET/", "P2P/", "SHM/", "COLLNET/"}) {
    const std::string mark = std::string(" via ") + kind;
    for (std::size_t at = log.find(mark); at != std::string::npos; at = log.find(mark, at + 1)) {
      // "NET/Socket/0" and "P2P/CUMEM/read": the first two parts say which transport it is.
      std::size_t end = log.find_first_of("/ \n\r\t(", at + mark.size());
      found.insert(log.substr(at + 5, std::min(end, log.size()) - at - 5));
    }
  }
  std::string joined;
  for (const std::string& name : found) joined += (joined.empty() ? "" : "+") + name;
  return joined;
}

bool ncclCopyEnginesIn(const std::string& log) {
  return log.find("Init CE, rank ") != std::string::npos;
}

}  // namespace hoccl::bench
