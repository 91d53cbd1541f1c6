#include "common/runtime/mover_spawn.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/runtime/mover_protocol.h"

extern char** environ;

namespace hoccl {
namespace {

std::string folderOfThisLibrary() {
  Dl_info info{};
  if (!::dladdr(reinterpret_cast<void*>(&folderOfThisLibrary), &info) || !info.dli_fname)
    return ".";
  const std::string path = info.dli_fname;
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

/// The mover's environment: without what is meant for the application's CUDA or loader alone.
std::vector<char*> moverEnvironment() {
  std::vector<char*> result;
  // A mover has to see the GPUs of its peers, and finds its own by its UUID. An instance of MIG is to
  // be found by that variable alone.
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const bool allVisible = visible && !std::strstr(visible, "MIG");
  for (char** entry = environ; *entry; ++entry) {
    const bool skip = std::strncmp(*entry, "LD_PRELOAD=", 11) == 0 ||
                      std::strncmp(*entry, "CUDA_DEVICE_MAX_CONNECTIONS=", 28) == 0 ||
                      (allVisible && std::strncmp(*entry, "CUDA_VISIBLE_DEVICES=", 21) == 0);
    if (!skip) result.push_back(*entry);
  }
  result.push_back(nullptr);
  return result;
}

}  // namespace

Status findMover(const Config& config, std::string* out) {
  if (!config.mover.empty()) {
    if (::access(config.mover.c_str(), X_OK) == 0) {
      *out = config.mover;
      return {};
    }
    return Status::fromErrno(fmt::format("HOCCL_MOVER_PATH={} cannot be executed", config.mover),
                             errno);
  }
  const std::string folder = folderOfThisLibrary();
  std::string tried;
  for (const char* place : {"/", "/../bin/", "/../libexec/", "/../mover/"}) {
    std::string path = folder + place + "hoccl-mover";
    if (::access(path.c_str(), X_OK) == 0) {
      *out = std::move(path);
      return {};
    }
    tried += (tried.empty() ? "" : ", ") + path;
  }
  return Status::error(Code::System,
                       fmt::format("no hoccl-mover found (tried {}): reinstall HOCCL or set "
                                   "HOCCL_MOVER_PATH",
                                   tried));
}

Status spawnMover(const std::string& executable, const char* mode, int socket, pid_t* pid,
                  UniqueFd* pidfd) {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, socket, kMoverSocketFd);
  posix_spawn_file_actions_addclosefrom_np(&actions, kMoverSocketFd + 1);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  std::string name = "hoccl-mover", argument = mode;
  char* arguments[] = {name.data(), argument.data(), nullptr};
  std::vector<char*> environment = moverEnvironment();
  const int failed =
      ::posix_spawn(pid, executable.c_str(), &actions, &attributes, arguments, environment.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (failed) {
    *pid = -1;
    return Status::fromErrno("cannot start " + executable, failed);
  }
  pidfd->reset(static_cast<int>(::syscall(SYS_pidfd_open, *pid, 0)));
  return *pidfd ? Status() : Status::fromErrno("pidfd_open of the mover", errno);
}

}  // namespace hoccl
