// The files behind device memory, and who else has them mapped.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "test/emulator/memory.h"
#include "test/emulator/session.h"
#include "test/emulator/settings.h"

namespace hoccl::emu {
namespace {

std::atomic<std::uint64_t> gUsed[kMaxDevices];  // bytes this process allocated on each device

// The file's name says which device it is on; /proc shows it to whoever has a descriptor.
constexpr char kName[] = "emucuda.gpu";

/// Memory that this process has freed and another one still has: the device's until that lets go.
struct Left {
  int fd;
  int physical;
  std::size_t size;
};
std::mutex gLeftMutex;
auto& left() {
  static auto* all = new std::vector<Left>;
  return *all;
}

void returnLeft() {
  std::lock_guard lock(gLeftMutex);
  std::erase_if(left(), [](const Left& each) {
    if (mappedElsewhere(each.fd)) return false;
    gUsed[each.physical] -= each.size;
    close(each.fd);
    return true;
  });
}

struct flock wholeFile(short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;
}

}  // namespace

std::shared_ptr<Backing> makeBacking(int physical, std::size_t bytes) {
  returnLeft();
  auto& used = gUsed[physical];
  const std::uint64_t limit = settings().memoryBytes;
  if (bytes > limit) return nullptr;
  if (used.fetch_add(bytes) + bytes > limit) {
    used -= bytes;
    return nullptr;
  }
  auto backing = std::make_shared<Backing>();
  backing->size = bytes;
  backing->physical = physical;
  char name[32];
  std::snprintf(name, sizeof name, "%s%d", kName, physical);
  backing->fd = memfd_create(name, MFD_CLOEXEC);
  if (backing->fd < 0 || ftruncate(backing->fd, static_cast<off_t>(bytes)) != 0) return nullptr;
  return backing;
}

std::shared_ptr<Backing> importBacking(int fd) {
  char path[64], target[128];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(path, target, sizeof target - 1);
  if (length <= 0) return nullptr;
  target[length] = '\0';
  const char* name = std::strstr(target, kName);
  struct stat file {};
  if (name == nullptr || fstat(fd, &file) != 0) return nullptr;
  auto backing = std::make_shared<Backing>();
  backing->imported = true;
  backing->size = static_cast<std::size_t>(file.st_size);
  backing->physical = std::atoi(name + std::strlen(kName));
  // Opened anew: a description of its own, so that the mark ends with this import.
  backing->fd = open(path, O_RDWR | O_CLOEXEC);
  if (backing->fd < 0) return nullptr;
  markMapped(backing->fd);
  return backing;
}

Backing::~Backing() {
  if (!imported && size > 0) {
    if (fd >= 0 && mappedElsewhere(fd)) {
      session::count(physical, Counter::FreedWhileMapped);
      // Under another number: handles name the descriptor, and lead nowhere from now on.
      const int kept = fcntl(fd, F_DUPFD_CLOEXEC, 0);
      close(fd);
      if (kept < 0) {
        gUsed[physical] -= size;
        return;
      }
      std::lock_guard lock(gLeftMutex);
      left().push_back({kept, physical, size});
      return;
    }
    gUsed[physical] -= size;
  }
  if (fd >= 0) close(fd);
}

int exportBacking(const Backing& backing) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", backing.fd);
  // A description of its own, whose mark goes where the descriptor goes.
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd >= 0) markMapped(fd);
  return fd;
}

std::uint64_t bytesUsed(int physical) {
  returnLeft();
  return gUsed[physical];
}

bool mappedElsewhere(int fd) {
  struct flock lock = wholeFile(F_WRLCK);
  return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

void markMapped(int fd) {
  struct flock lock = wholeFile(F_RDLCK);
  fcntl(fd, F_OFD_SETLK, &lock);
}

}  // namespace hoccl::emu
