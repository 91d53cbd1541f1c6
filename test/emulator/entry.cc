#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "test/emulator/context.h"
#include "test/emulator/engine.h"
#include "test/emulator/hoccl_emu.h"
#include "test/emulator/session.h"
#include "test/emulator/settings.h"

namespace hoccl::emu {
namespace {

struct ErrorText {
  CUresult code;
  const char* name;
  const char* text;
};

#define E(name, text) \
  { name, #name, text }
constexpr ErrorText kErrors[] = {
    E(CUDA_SUCCESS, "no error"),
    E(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    E(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    E(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    E(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    E(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    E(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    E(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    E(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
    E(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS"),
    E(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    E(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
    E(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    E(CUDA_ERROR_NOT_READY, "device not ready"),
    E(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    E(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    E(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    E(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
      "part or all of the requested memory range is already mapped"),
    E(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
      "pointer does not correspond to a registered memory region"),
    E(CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable"),
    E(CUDA_ERROR_INVALID_PTX, "a PTX JIT compilation failed"),
    E(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    E(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    E(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
    E(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
      "operation failed due to a previous error during capture"),
    E(CUDA_ERROR_STREAM_CAPTURE_MERGE,
      "operation would result in a merge of separate capture sequences"),
    E(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not ended in the same stream as it began"),
    E(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
      "dependency created on uncaptured work in another stream"),
    E(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
      "operation would make the legacy stream depend on a capturing blocking stream"),
    E(CUDA_ERROR_CAPTURED_EVENT,
      "operation not permitted on an event last recorded in a capturing stream"),
    E(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
      "attempt to terminate a thread-local capture sequence from another thread"),
    E(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef E

const ErrorText* find(CUresult code) {
  for (const ErrorText& error : kErrors)
    if (error.code == code) return &error;
  return nullptr;
}

/// This library, so that look-ups find its symbols and nobody else's.
void* self() {
  static void* handle = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(&cuInit), &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  return handle;
}

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuGetErrorString(CUresult code, const char** out) {
  const ErrorText* error = find(code);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = error == nullptr ? nullptr : error->text;
  return error == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult code, const char** out) {
  const ErrorText* error = find(code);
  if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = error == nullptr ? nullptr : error->name;
  return error == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

namespace {
/// Variants that a caller of an older CUDA must not get, since their arguments differ.
struct Since {
  const char* symbol;
  int version;
};
constexpr Since kSince[] = {{"cuGetProcAddress_v2", 12000}, {"cuStreamGetCaptureInfo_v3", 12030}};

bool fits(const std::string& symbol, int version) {
  for (const Since& entry : kSince)
    if (symbol == entry.symbol) return version >= entry.version;
  return true;
}
}  // namespace

/// The newest variant that the caller's version knows of a function under its plain name
/// ("cuMemAlloc" finds cuMemAlloc_v2).
CUresult cuGetProcAddress_v2(const char* symbol, void** out, int version, cuuint64_t,
                             CUdriverProcAddressQueryResult* status) {
  if (symbol == nullptr || out == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = nullptr;
  int mine = 0;
  cuDriverGetVersion(&mine);
  for (const char* suffix : {"_v3", "_v2", ""}) {
    if (std::strncmp(symbol, "cu", 2) != 0) break;
    const std::string name = std::string(symbol) + suffix;
    if (fits(name, version)) *out = dlsym(self(), name.c_str());
    if (*out != nullptr) break;
  }
  if (version > mine) *out = nullptr;
  if (status != nullptr)
    *status = *out != nullptr  ? CU_GET_PROC_ADDRESS_SUCCESS
              : version > mine ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                               : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *out != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char* symbol, void** out, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(symbol, out, version, flags, nullptr);
}

CUresult hocclEmuGetCounters(CUdevice device, HocclEmuCounters* out) {
  return driverCall([&]() -> CUresult {
    Context* context = contextOf(device);
    if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    session::readProcess(context->physical, out);
    return CUDA_SUCCESS;
  });
}

CUresult hocclEmuGetSessionCounters(CUdevice device, HocclEmuCounters* out) {
  return driverCall([&]() -> CUresult {
    Context* context = contextOf(device);
    if (context == nullptr) return CUDA_ERROR_INVALID_DEVICE;
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    session::readAll(context->physical, out);
    return CUDA_SUCCESS;
  });
}

double hocclEmuDilation(void) { return settings().dilation; }

uint64_t hocclEmuNow(void) {
  return static_cast<uint64_t>(static_cast<double>(realNow()) / settings().dilation);
}

size_t hocclEmuDescribePending(char* out, size_t capacity) {
  const std::string text = Scheduler::get().pending();
  if (capacity > 0) {
    const std::size_t length = std::min(text.size(), capacity - 1);
    std::memcpy(out, text.data(), length);
    out[length] = 0;
  }
  return text.size();
}

}  // extern "C"
