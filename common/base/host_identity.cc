#include "common/base/host_identity.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "common/base/fd.h"
#include "common/base/random.h"
#include "common/base/time.h"

namespace hoccl {
namespace {

std::string fullHostName() {
  char name[256] = {};
  if (::gethostname(name, sizeof name - 1) != 0) return "unknown";
  return name;
}

// Equal in no two processes, and the same at every call in one.
std::string uniqueKey() {
  static const std::string key = [] {
    std::uint64_t bits = 0;
    if (!random64(&bits)) bits = monotonicNs();
    return fmt::format("alone-{}-{:016x}", ::getpid(), bits);
  }();
  return key;
}

}  // namespace

std::string bootId() {
  UniqueFd fd(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  if (!fd) return {};
  char text[64];
  const ssize_t got = ::read(fd.get(), text, sizeof text);
  if (got <= 0) return {};
  std::string id(text, static_cast<std::size_t>(got));
  while (!id.empty() && (id.back() == '\n' || id.back() == ' ')) id.pop_back();
  return id;
}

std::string hostKey() {
  const std::string boot = bootId();
  // The thread's own namespace is the one its sockets are made in.
  struct stat info;
  if (boot.empty() ||
      (::stat("/proc/thread-self/ns/net", &info) != 0 && ::stat("/proc/self/ns/net", &info) != 0)) {
    return uniqueKey();
  }
  return fmt::format("{}-{:x}-{:x}", boot, static_cast<std::uint64_t>(info.st_dev),
                     static_cast<std::uint64_t>(info.st_ino));
}

std::string nodeKey() {
  // NCCL takes a set but empty NCCL_HOSTID as a value, too.
  if (const char* id = std::getenv("NCCL_HOSTID")) return std::string("id:") + id;
  return "host:" + fullHostName() + ":" + bootId();
}

std::string shortHostName() {
  const std::string name = fullHostName();
  return name.substr(0, name.find('.'));
}

}  // namespace hoccl
