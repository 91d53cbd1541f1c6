#include "tools/bench/host_facts.h"

#include <sys/utsname.h>
#include <time.h>

#include <fstream>
#include <regex>
#include <sstream>

#include "build_info.h"

namespace hoccl::bench {

std::string kernelText() {
  utsname names{};
  if (::uname(&names) != 0) return "";
  return std::string(names.sysname) + " " + names.release;
}

std::string nvidiaDriverVersion() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::stringstream text;
  text << file.rdbuf();
  const std::string content = text.str();
  std::smatch found;
  return std::regex_search(content, found, std::regex(R"(\b\d{3,}\.\d+(\.\d+)?\b)")) ? found.str()
                                                                                     : "";
}

std::string timestampText() {
  const time_t now = ::time(nullptr);
  tm parts{};
  ::gmtime_r(&now, &parts);
  char text[32];
  return ::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts) > 0 ? text : "";
}

std::string commitText() { return HOCCL_GIT_COMMIT; }

}  // namespace hoccl::bench
