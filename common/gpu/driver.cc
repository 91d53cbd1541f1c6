#include "common/gpu/driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <mutex>

namespace hoccl {
namespace {

Status loadTable(Driver* table) {
  // Never dlclosed: the driver keeps threads and exit handlers of its own.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    const char* why = dlerror();
    return Status::error(Code::Unsupported,
                         fmt::format("no CUDA driver: {}", why ? why : "libcuda.so.1 not found"));
  }
#define X(member, symbol)                                                                   \
  table->member = reinterpret_cast<decltype(table->member)>(dlsym(library, #symbol));       \
  if (!table->member)                                                                       \
    return Status::error(Code::Unsupported, "libcuda.so.1 lacks " #symbol                   \
                                            ": a driver for CUDA 12.0 or newer is needed");
  HOCCL_DRIVER_FUNCTIONS(X)
#undef X
  CUresult result = table->cuInit(0);
  return result == CUDA_SUCCESS ? Status() : table->error("cuInit(0)", result);
}

}  // namespace

Status Driver::load(const Driver** out) {
  static Driver table;
  static Status status;
  static std::once_flag once;
  std::call_once(once, [] { status = loadTable(&table); });
  if (status) *out = &table;
  return status;
}

Status Driver::error(const char* call, CUresult result, std::source_location where) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS) name = "unknown error";
  if (cuGetErrorString(result, &text) != CUDA_SUCCESS) text = "";
  return Status::error(
      Code::Cuda,
      fmt::format("{} failed: {} ({}) {}", call, name, static_cast<int>(result), text ? text : ""),
      where);
}

ContextGuard::ContextGuard(const Driver* driver, CUcontext context) : driver_(driver) {
  CUcontext current = nullptr;
  driver->cuCtxGetCurrent(&current);
  if (current != context) pushed_ = driver->cuCtxPushCurrent(context) == CUDA_SUCCESS;
}

ContextGuard::~ContextGuard() {
  CUcontext ignored = nullptr;
  if (pushed_) driver_->cuCtxPopCurrent(&ignored);
}

Status deviceUuid(const Driver* driver, CUdevice device, std::string* out) {
  CUuuid uuid{};
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuDeviceGetUuid(&uuid, device)));
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  *out = std::move(text);
  return {};
}

Status deviceByUuid(const Driver* driver, const std::string& uuid, CUdevice* out) {
  int count = 0;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuDeviceGetCount(&count)));
  for (int i = 0; i < count; ++i) {
    CUdevice device = 0;
    std::string candidate;
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuDeviceGet(&device, i)));
    HOCCL_RETURN_IF_ERROR(deviceUuid(driver, device, &candidate));
    if (candidate == uuid) {
      *out = device;
      return {};
    }
  }
  return Status::error(Code::Unsupported,
                       fmt::format("no device {} among the {} visible here", uuid, count));
}

}  // namespace hoccl
