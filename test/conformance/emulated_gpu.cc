#include "test/conformance/emulated_gpu.h"

#include <dirent.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "test/conformance/processes.h"

namespace conformance {
namespace {
constexpr std::size_t kSegment = 2 << 20;
}

EmulatedGpu::EmulatedGpu(const char* session) {
  // The mover finds the driver by the path, this process by the name of what it has loaded.
  ::setenv("LD_LIBRARY_PATH", CONFORMANCE_EMULATOR_DIR, 1);
  ::setenv("EMUCUDA_DILATION", "1", 0);
  ::setenv("EMUCUDA_SESSION", session, 1);
  ::setenv("HOCCL_NET_STAGING", "1", 0);
  ::setenv("NCCL_PROTO", "^LL128", 0);
  library_ = ::dlopen(CONFORMANCE_EMULATOR_DIR "/libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  REQUIRE_SAYING(library_ != nullptr, ::dlerror());
  const hoccl::Status loaded = hoccl::Driver::load(&driver_);
  REQUIRE_SAYING(loaded.ok(), loaded.message());
  REQUIRE_OK(driver_->cuDevicePrimaryCtxRetain(&context_, 0));
  REQUIRE_OK(driver_->cuCtxSetCurrent(context_));
}

HocclEmuCounters EmulatedGpu::sessionCounters() const {
  const auto get = reinterpret_cast<decltype(&::hocclEmuGetSessionCounters)>(
      ::dlsym(library_, "hocclEmuGetSessionCounters"));
  HocclEmuCounters counters{};
  REQUIRE_OK(get(0, &counters));
  return counters;
}

HocclEmuCounters EmulatedGpu::counters() const {
  const auto get =
      reinterpret_cast<decltype(&::hocclEmuGetCounters)>(::dlsym(library_, "hocclEmuGetCounters"));
  HocclEmuCounters counters{};
  REQUIRE_OK(get(0, &counters));
  return counters;
}

void EmulatedGpu::launchWait(CUstream stream, CUdeviceptr flag, std::uint64_t value) const {
  const auto launch = reinterpret_cast<decltype(&::hocclEmuLaunchWaitKernel)>(
      ::dlsym(library_, "hocclEmuLaunchWaitKernel"));
  REQUIRE_OK(launch(stream, flag, value, 132));
}

void* EmulatedGpu::alloc(std::size_t bytes) const {
  CUdeviceptr pointer = 0;
  REQUIRE_OK(driver_->cuMemAlloc(&pointer, bytes));
  return reinterpret_cast<void*>(pointer);
}

void EmulatedGpu::free(void* pointer) const {
  REQUIRE_OK(driver_->cuMemFree(reinterpret_cast<CUdeviceptr>(pointer)));
}

void* EmulatedGpu::map(std::size_t bytes) {
  const auto create = reinterpret_cast<decltype(&::cuMemCreate)>(::dlsym(library_, "cuMemCreate"));
  REQUIRE(create != nullptr);
  CUdeviceptr base = 0;
  REQUIRE_OK(driver_->cuMemAddressReserve(&base, bytes, 0, 0, 0));
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  for (std::size_t at = 0; at < bytes; at += kSegment) {
    CUmemGenericAllocationHandle handle = 0;
    REQUIRE_OK(create(&handle, kSegment, &properties, 0));
    REQUIRE_OK(driver_->cuMemMap(base + at, kSegment, 0, handle, 0));
    REQUIRE_OK(driver_->cuMemRelease(handle));
  }
  CUmemAccessDesc access{};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  REQUIRE_OK(driver_->cuMemSetAccess(base, bytes, &access, 1));
  return reinterpret_cast<void*>(base);
}

void EmulatedGpu::unmap(void* pointer, std::size_t bytes) {
  const auto base = reinterpret_cast<CUdeviceptr>(pointer);
  for (std::size_t at = 0; at < bytes; at += kSegment) {
    REQUIRE_OK(driver_->cuMemUnmap(base + at, kSegment));
  }
  REQUIRE_OK(driver_->cuMemAddressFree(base, bytes));
}

void EmulatedGpu::write(void* device, const void* host, std::size_t bytes) const {
  if (bytes == 0) return;
  REQUIRE_OK(driver_->cuCtxSetCurrent(context_));
  REQUIRE_OK(driver_->cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(device), host, bytes));
}

std::vector<unsigned char> EmulatedGpu::read(const void* device, std::size_t bytes) const {
  std::vector<unsigned char> host(bytes);
  if (bytes == 0) return host;
  REQUIRE_OK(driver_->cuCtxSetCurrent(context_));
  REQUIRE_OK(driver_->cuMemcpyDtoH(host.data(), reinterpret_cast<CUdeviceptr>(device), bytes));
  return host;
}

std::vector<pid_t> moversOfThisProcess() {
  std::vector<pid_t> movers;
  DIR* const processes = ::opendir("/proc");
  REQUIRE(processes != nullptr);
  while (const dirent* entry = ::readdir(processes)) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    std::FILE* const file = std::fopen(path, "r");
    if (file == nullptr) continue;
    char name[64] = {}, state = 0;
    int parent = 0;
    if (std::fscanf(file, "%*d (%63[^)]) %c %d", name, &state, &parent) == 3 &&
        std::strcmp(name, "hoccl-mover") == 0 && parent == ::getpid() && state != 'Z') {
      movers.push_back(pid);
    }
    std::fclose(file);
  }
  ::closedir(processes);
  return movers;
}

}  // namespace conformance
