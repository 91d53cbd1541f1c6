#include "test/emulator/session.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace hoccl::emu::session {
namespace {

struct DeviceState {
  std::atomic<std::int64_t> busyUntil[static_cast<int>(Link::Count)];
  std::atomic<std::uint64_t> counters[kCounters];
};

struct Shared {
  std::atomic<double> dilation;
  DeviceState devices[kMaxDevices];
};
static_assert(std::atomic<double>::is_always_lock_free);

Shared* gShared = nullptr;
int gFd = -1;
pid_t gOpenedBy = 0;
std::string gPath;
std::atomic<std::uint64_t> gProcess[kMaxDevices][kCounters];

std::string errnoText(const std::string& what) { return what + ": " + std::strerror(errno); }

/// The last process of the session to end removes its file: whoever gets the lock alone.
void removeIfLast() {
  // A forked child shares our lock, so it must not be the one to judge.
  if (gOpenedBy == getpid() && flock(gFd, LOCK_EX | LOCK_NB) == 0) unlink(gPath.c_str());
}

/// Busy-until times are of this boot's clock, so the boot is part of the name; so is the layout.
std::string sessionPath() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const char* folder = std::getenv("TMPDIR");
  if (folder == nullptr || *folder == '\0') folder = "/tmp";
  return std::string(folder) + "/emucuda2-" + std::to_string(getuid()) + "-" + settings().session +
         "-" + boot.substr(0, 8);
}

bool openFile(std::string* error) {
  gPath = sessionPath();
  // A file that its last user removed between our open and our lock is tried again.
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int fd = ::open(gPath.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) {
      *error = errnoText("EMUCUDA_SESSION: cannot open " + gPath);
      return false;
    }
    struct stat byFd {
    }, byName{};
    if (flock(fd, LOCK_SH) == 0 && fstat(fd, &byFd) == 0 && stat(gPath.c_str(), &byName) == 0 &&
        byFd.st_ino == byName.st_ino) {
      gFd = fd;
      gOpenedBy = getpid();
      return true;
    }
    close(fd);
  }
  *error = "EMUCUDA_SESSION: " + gPath + " is removed again and again";
  return false;
}

}  // namespace

bool open(std::string* error) {
  if (gShared != nullptr) return true;
  const bool isPrivate = settings().session.empty();
  if (!isPrivate) {
    if (!openFile(error)) return false;
    if (ftruncate(gFd, sizeof(Shared)) != 0) {
      *error = errnoText("EMUCUDA_SESSION: cannot size " + gPath);
      return false;
    }
  }
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                      isPrivate ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, gFd, 0);
  if (memory == MAP_FAILED) {
    *error = errnoText("EMUCUDA_SESSION: cannot map the session");
    return false;
  }
  // All-zero bytes are valid values of these lock-free atomics, and other processes may already use
  // them: nothing is constructed over the mapping.
  gShared = static_cast<Shared*>(memory);
  double unset = 0;
  gShared->dilation.compare_exchange_strong(unset, settings().dilation);
  if (gShared->dilation.load() != settings().dilation) {
    char line[200];
    std::snprintf(
        line, sizeof line,
        "EMUCUDA_DILATION=%g, but EMUCUDA_SESSION=%s runs with %g: give all its processes "
        "the same",
        settings().dilation, settings().session.c_str(), gShared->dilation.load());
    *error = line;
    gShared = nullptr;
    return false;
  }
  if (!isPrivate) std::atexit(removeIfLast);
  return true;
}

std::int64_t reserve(int physical, Link link, std::int64_t from, std::int64_t duration) {
  auto& busy = gShared->devices[physical].busyUntil[static_cast<int>(link)];
  std::int64_t until = busy.load(std::memory_order_relaxed);
  for (;;) {
    const std::int64_t start = until > from ? until : from;
    if (busy.compare_exchange_weak(until, start + duration, std::memory_order_relaxed))
      return start;
  }
}

namespace {
bool lockDevice(int physical, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = physical;
  lock.l_len = 1;
  return gFd < 0 || fcntl(gFd, F_OFD_SETLK, &lock) == 0;
}
}  // namespace

bool takeDevice(int physical) { return lockDevice(physical, F_WRLCK); }
void leaveDevice(int physical) { lockDevice(physical, F_UNLCK); }

void count(int physical, Counter counter, std::uint64_t amount) {
  gProcess[physical][static_cast<int>(counter)].fetch_add(amount, std::memory_order_relaxed);
  gShared->devices[physical].counters[static_cast<int>(counter)].fetch_add(
      amount, std::memory_order_relaxed);
}

namespace {
void read(const std::atomic<std::uint64_t>* from, HocclEmuCounters* out) {
  std::uint64_t values[kCounters];
  for (int i = 0; i < kCounters; ++i) values[i] = from[i].load(std::memory_order_relaxed);
  std::memcpy(out, values, sizeof values);
}
}  // namespace

void readProcess(int physical, HocclEmuCounters* out) { read(gProcess[physical], out); }
void readAll(int physical, HocclEmuCounters* out) {
  read(gShared->devices[physical].counters, out);
}

}  // namespace hoccl::emu::session
