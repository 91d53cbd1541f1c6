#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>

#include "test/emulator/capture.h"
#include "test/emulator/context.h"
#include "test/emulator/faults.h"
#include "test/emulator/memory.h"
#include "test/emulator/settings.h"

namespace hoccl::emu {
namespace {

constexpr std::uint64_t kMagic = 0x31637069756d65;  // "emuipc1"

/// What a CUipcMemHandle holds: where the exporter keeps the memfd, and which file it must be. The
/// inode is never used twice, so a descriptor number that means something else by now is noticed.
struct Handle {
  std::uint64_t magic;
  std::int32_t pid;
  std::int32_t fd;
  std::uint64_t size;
  std::uint64_t offset;  ///< of the exported pointer in the allocation; the import maps all of it
  std::uint64_t device;
  std::uint64_t inode;
  std::int32_t physical;
  std::int32_t unused;
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle));

/// The exporter's memfd, or -1 and the reason.
int openExported(const Handle& handle, CUresult* why) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  // The file's identity first: opening something that only has the number may block or worse.
  struct stat found {};
  const auto same = [&] {
    return found.st_dev == handle.device && found.st_ino == handle.inode &&
           static_cast<std::uint64_t>(found.st_size) == handle.size;
  };
  *why = CUDA_ERROR_MAP_FAILED;
  if (stat(path, &found) != 0) return -1;
  *why = CUDA_ERROR_INVALID_HANDLE;
  if (!same()) return -1;
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    *why = CUDA_ERROR_MAP_FAILED;
    return -1;
  }
  if (fstat(fd, &found) == 0 && same()) return fd;
  close(fd);
  return -1;
}

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr pointer) {
  return contextCall([&](Context&) -> CUresult {
    const auto region = regions::find(pointer);
    if (out == nullptr || region == nullptr || region->kind != RegionKind::Device)
      return CUDA_ERROR_INVALID_VALUE;
    struct stat file {};
    if (fstat(region->backing->fd, &file) != 0) return CUDA_ERROR_OPERATING_SYSTEM;
    Handle handle{};
    handle.magic = kMagic;
    handle.pid = getpid();
    handle.fd = region->backing->fd;
    handle.size = region->size;
    handle.offset = pointer - region->base;
    handle.device = file.st_dev;
    handle.inode = file.st_ino;
    handle.physical = region->physical;
    std::memset(out, 0, sizeof *out);
    std::memcpy(out, &handle, sizeof handle);
    return CUDA_SUCCESS;
  });
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* out, CUipcMemHandle bytes, unsigned int flags) {
  return contextCall([&](Context& context) -> CUresult {
    if (out == nullptr || flags > CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
      return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult allowed = checkUnsafeCall(); allowed != CUDA_SUCCESS) return allowed;
    Handle handle{};
    std::memcpy(&handle, &bytes, sizeof handle);
    if (handle.magic != kMagic || handle.physical < 0 || handle.physical >= settings().devices)
      return CUDA_ERROR_INVALID_HANDLE;
    // As the real driver: a process cannot import its own memory.
    if (handle.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    if (handle.physical != context.physical) {
      if (!reachEachOther(handle.physical, context.physical))
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
      if ((flags & CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == 0 &&
          !peerEnabled(context.ordinal, ordinalOf(handle.physical, -1)))
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    }
    if (refuseImport()) return CUDA_ERROR_MAP_FAILED;
    delayCall();
    CUresult why = CUDA_SUCCESS;
    const int fd = openExported(handle, &why);
    if (fd < 0) return why;
    if (const auto open = regions::reopen(handle.inode, &context)) {
      close(fd);
      *out = open->base;
      return CUDA_SUCCESS;
    }
    auto region = std::make_shared<Region>();
    region->kind = RegionKind::Imported;
    region->fd = fd;
    region->context = &context;
    region->physical = handle.physical;
    region->ordinal = ordinalOf(handle.physical, context.ordinal);
    region->opened = 1;
    region->exportedId = handle.inode;
    markMapped(fd);
    if (!mapDeviceMemory(region.get(), fd, handle.size) || !regions::insert(region))
      return CUDA_ERROR_MAP_FAILED;
    *out = region->base;
    return CUDA_SUCCESS;
  });
}

/// Operations still queued on the import keep its mapping until they are done.
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  return contextCall([&](Context&) -> CUresult {
    delayCall();
    return regions::closeImport(pointer) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

}  // extern "C"
