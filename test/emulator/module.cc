// Modules, libraries and launches. The emulator runs no machine code: a kernel is known by its
// name.

#include <cuda.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "test/emulator/capture.h"
#include "test/emulator/context.h"
#include "test/emulator/engine.h"
#include "test/emulator/kernel.h"

namespace hoccl::emu {
namespace {

// A kernel of this name and two 64-bit parameters, address and value, ends when the word there is
// >= the value. All others do nothing for the time of a small kernel.
constexpr char kWaitKernel[] = "hoccl_wait_geq_u64";
constexpr double kSmallKernelNs = 2500;  // not measured, and nothing may depend on it
// What a context sets aside for each thread before any kernel asks for more (CU_LIMIT_STACK_SIZE).
constexpr std::size_t kDefaultStack = 1024;
constexpr int kDefaultSharedMemory = 48 << 10, kMaxSharedMemory = 227 << 10;

struct Function {
  std::string name;
  std::size_t localBytes = 0;  ///< of local memory for each thread
  // Guarded by the table's lock.
  bool loaded = false;
  int sharedBytes = kDefaultSharedMemory;
};

/// A CUmodule or CUlibrary.
struct Module {
  bool ofText = false;  ///< PTX: the functions are those it names; else any name is one
  std::vector<std::unique_ptr<Function>> functions;
};

std::mutex gMutex;
// Never destroyed: other threads may still launch while the process ends.
auto& modules() {
  static auto* list = new std::vector<std::unique_ptr<Module>>;
  return *list;
}
std::size_t gStack[kMaxDevices];  // by physical device; guarded by the lock

bool lazyLoading() {
  const char* text = std::getenv("CUDA_MODULE_LOADING");
  return text == nullptr || std::strcmp(text, "EAGER") != 0;
}

std::string wordAfter(const std::string& text, std::size_t at) {
  const std::size_t from = text.find_first_not_of(" \t\r\n", at);
  if (from == std::string::npos) return "";
  return text.substr(from, text.find_first_of(" \t\r\n({[;", from) - from);
}

/// Functions and their local memory (".local … name[bytes];") in PTX.
void parse(const std::string& ptx, Module* module) {
  std::size_t at = 0;
  while ((at = ptx.find(".entry", at)) != std::string::npos) {
    at += std::strlen(".entry");
    auto function = std::make_unique<Function>();
    function->name = wordAfter(ptx, at);
    const std::size_t end = ptx.find(".entry", at);
    for (std::size_t local = ptx.find(".local ", at); local < end && local != std::string::npos;
         local = ptx.find(".local ", local + 1)) {
      const std::size_t bracket = ptx.find('[', local);
      if (bracket < end) function->localBytes += std::strtoull(&ptx[bracket + 1], nullptr, 10);
    }
    module->functions.push_back(std::move(function));
  }
}

CUresult load(const void* image, Module** out) {
  return contextCall([&](Context&) -> CUresult {
    if (out == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (const CUresult allowed = checkUnsafeCall(); allowed != CUDA_SUCCESS) return allowed;
    auto module = std::make_unique<Module>();
    const auto* bytes = static_cast<const char*>(image);
    // PTX is text that begins with a comment or ".version"; an ELF or fat binary begins otherwise.
    module->ofText = bytes[0] == '.' || bytes[0] == '/' || bytes[0] == '\n';
    if (module->ofText) parse(bytes, module.get());
    if (module->ofText && module->functions.empty()) return CUDA_ERROR_INVALID_PTX;
    std::lock_guard lock(gMutex);
    for (auto& function : module->functions) function->loaded = !lazyLoading();
    *out = modules().emplace_back(std::move(module)).get();
    return CUDA_SUCCESS;
  });
}

CUresult unload(const void* handle) {
  return driverCall([&]() -> CUresult {
    std::lock_guard lock(gMutex);
    const auto erased =
        std::erase_if(modules(), [&](const auto& module) { return module.get() == handle; });
    return erased != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}

CUresult functionOf(const void* handle, const char* name, Function** out) {
  return driverCall([&]() -> CUresult {
    if (out == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(gMutex);
    for (auto& module : modules()) {
      if (module.get() != handle) continue;
      for (auto& function : module->functions) {
        if (function->name != name) continue;
        *out = function.get();
        return CUDA_SUCCESS;
      }
      if (module->ofText) return CUDA_ERROR_NOT_FOUND;
      auto function = std::make_unique<Function>();
      function->name = name;
      function->loaded = !lazyLoading();
      *out = module->functions.emplace_back(std::move(function)).get();
      return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_HANDLE;
  });
}

/// Null if the handle is no function of a loaded module; call with the lock held.
Function* functionFrom(const void* handle) {
  for (auto& module : modules())
    for (auto& function : module->functions)
      if (function.get() == handle) return function.get();
  return nullptr;
}

/// What the driver does before the launch of a kernel it has not launched like this before: both
/// ways hold up the process until the context's pending work is done (FACTS 3).
CUresult prepare(const StreamPtr& stream, CUfunction handle, bool toLaunch) {
  Context* context = stream->context;
  bool load = false, growStack = false;
  std::size_t localBytes = 0;
  {
    std::lock_guard lock(gMutex);
    Function* function = functionFrom(handle);
    if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    load = !function->loaded;
    localBytes = function->localBytes;
    growStack = toLaunch && localBytes > std::max(gStack[context->physical], kDefaultStack);
  }
  if (load)
    Scheduler::get().whileStarved(context, [&] {
      std::lock_guard lock(gMutex);
      if (Function* function = functionFrom(handle)) function->loaded = true;
    });
  if (growStack)
    Scheduler::get().whileQuiet(context, [&] {
      std::lock_guard lock(gMutex);
      gStack[context->physical] = std::max(gStack[context->physical], localBytes);
    });
  return CUDA_SUCCESS;
}

CUresult launch(CUfunction handle, std::uint64_t blocks, CUstream streamHandle, unsigned shared,
                void** parameters) {
  return streamCall(streamHandle, [&](Context&, const StreamPtr& stream) -> CUresult {
    std::string name;
    {
      std::lock_guard lock(gMutex);
      const Function* function = functionFrom(handle);
      if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
      if (blocks == 0 || shared > static_cast<unsigned>(function->sharedBytes))
        return CUDA_ERROR_INVALID_VALUE;
      name = function->name;
    }
    auto work = std::make_unique<Work>();
    if (name == kWaitKernel) {
      CUdeviceptr flag = 0;
      std::uint64_t value = 0;
      if (parameters == nullptr) return CUDA_ERROR_INVALID_VALUE;
      std::memcpy(&flag, parameters[0], sizeof flag);
      std::memcpy(&value, parameters[1], sizeof value);
      work = waitWork(flag, value, *stream->context);
      // The real kernel would end the context with an illegal address here.
      if (work == nullptr) return CUDA_ERROR_INVALID_VALUE;
    } else {
      work->latencyNs = kSmallKernelNs;
    }
    if (const CUresult ready = prepare(stream, handle, true); ready != CUDA_SUCCESS) return ready;
    const int sms = static_cast<int>(std::min<std::uint64_t>(blocks, kSms));
    return launchKernel(stream, sms, std::move(work));
  });
}

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  return load(image, reinterpret_cast<Module**>(out));
}
CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned int, CUjit_option*, void**) {
  return load(image, reinterpret_cast<Module**>(out));
}
CUresult cuModuleUnload(CUmodule module) { return unload(module); }
CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  return functionOf(module, name, reinterpret_cast<Function**>(out));
}

CUresult cuLibraryLoadData(CUlibrary* out, const void* image, CUjit_option*, void**, unsigned int,
                           CUlibraryOption*, void**, unsigned int) {
  return load(image, reinterpret_cast<Module**>(out));
}
CUresult cuLibraryUnload(CUlibrary library) { return unload(library); }
CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary library, const char* name) {
  return functionOf(library, name, reinterpret_cast<Function**>(out));
}
CUresult cuKernelGetFunction(CUfunction* out, CUkernel kernel) {
  if (out == nullptr || kernel == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *out = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

/// Loads the kernel as its first launch would, without launching it.
CUresult cuFuncLoad(CUfunction function) {
  return streamCall(nullptr, [&](Context&, const StreamPtr& stream) -> CUresult {
    return prepare(stream, function, false);
  });
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState* state, CUfunction handle) {
  return driverCall([&]() -> CUresult {
    std::lock_guard lock(gMutex);
    const Function* function = functionFrom(handle);
    if (state == nullptr || function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *state =
        function->loaded ? CU_FUNCTION_LOADING_STATE_LOADED : CU_FUNCTION_LOADING_STATE_UNLOADED;
    return CUDA_SUCCESS;
  });
}

/// A raised limit of shared memory takes effect at the next launch, which is like a first one.
CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  return driverCall([&]() -> CUresult {
    std::lock_guard lock(gMutex);
    Function* function = functionFrom(handle);
    if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
        value > kMaxSharedMemory)
      return CUDA_ERROR_INVALID_VALUE;
    if (value > function->sharedBytes) function->loaded = false;
    function->sharedBytes = std::max(value, kDefaultSharedMemory);
    return CUDA_SUCCESS;
  });
}

CUresult cuFuncGetAttribute(int* out, CUfunction_attribute attribute, CUfunction handle) {
  return driverCall([&]() -> CUresult {
    std::lock_guard lock(gMutex);
    const Function* function = functionFrom(handle);
    if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (out == nullptr) return CUDA_ERROR_INVALID_VALUE;
    switch (static_cast<int>(attribute)) {
      case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *out = 1024;
        return CUDA_SUCCESS;
      case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *out = static_cast<int>(function->localBytes);
        return CUDA_SUCCESS;
      case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *out = function->sharedBytes;
        return CUDA_SUCCESS;
      default:
        *out = 0;
        return CUDA_SUCCESS;
    }
  });
}

CUresult cuLaunchKernel(CUfunction function, unsigned int gridX, unsigned int gridY,
                        unsigned int gridZ, unsigned int blockX, unsigned int blockY,
                        unsigned int blockZ, unsigned int sharedBytes, CUstream stream,
                        void** parameters, void**) {
  const std::uint64_t threads = std::uint64_t{blockX} * blockY * blockZ;
  if (threads == 0 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
  return launch(function, std::uint64_t{gridX} * gridY * gridZ, stream, sharedBytes, parameters);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra) {
  if (config == nullptr) return CUDA_ERROR_INVALID_VALUE;
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ,
                        config->blockDimX, config->blockDimY, config->blockDimZ,
                        config->sharedMemBytes, config->hStream, parameters, extra);
}

}  // extern "C"
