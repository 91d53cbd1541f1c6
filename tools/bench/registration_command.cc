#include "tools/bench/registration_command.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <vector>

#include "common/base/config.h"
#include "common/base/host_identity.h"
#include "common/base/log.h"
#include "common/base/time.h"
#include "common/base/version.h"
#include "common/gpu/driver.h"
#include "plugin-net/nccl_net_abi.h"
#include "tools/bench/host_facts.h"
#include "tools/bench/locate.h"
#include "tools/bench/report.h"
#include "tools/bench/statistics.h"

namespace hoccl::bench {
namespace {

constexpr int kUsage = 2, kFailed = 1;
constexpr int kDevicePointer = 2;  // NCCL_PTR_CUDA
constexpr long long kMostAllocations = 1024;
constexpr std::uint64_t kConnectWithinNs = 10'000'000'000;

struct Settings {
  std::uint64_t bytes = 1ull << 30;
  long long count = 16;
};

/// Microseconds of each call.
struct Times {
  std::vector<double> fresh, known;
};

void logWarnings(int level, unsigned long, const char*, int, const char* format, ...) {
  if (level != nccl_abi::kLogWarn) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "%s\n", text);
}

Status complete(const RegistrationCommandLine& line, Settings* out) {
  if (!line.bytes.empty()) {
    if (Status status = parseBytes(line.bytes, &out->bytes); !status) {
      return status.inContext("--bytes");
    }
  }
  out->count = line.count.value_or(out->count);
  if (out->bytes == 0 || out->count < 1 || out->count > kMostAllocations) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("--bytes {}, --count {}: at least one byte, and 1 to {} "
                                     "allocations",
                                     out->bytes, out->count, kMostAllocations));
  }
  return {};
}

/// The plugin with a connection of this process to itself.
class Plugin {
 public:
  ~Plugin() {
    if (net_ == nullptr) return;
    if (receives_ != nullptr) (void)net_->closeRecv(receives_);
    if (sends_ != nullptr) (void)net_->closeSend(sends_);
    if (listener_ != nullptr) (void)net_->closeListen(listener_);
    if (context_ != nullptr) (void)net_->finalize(context_);
  }

  Status open(const std::string& path) {
    void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return Status::error(Code::System, ::dlerror());
    const auto* const net =
        static_cast<const nccl_abi::NetV11*>(::dlsym(library, "ncclNetPlugin_v11"));
    if (net == nullptr) return Status::error(Code::System, path + " is no net plugin");
    nccl_abi::CommConfig config{-1};
    HOCCL_RETURN_IF_ERROR(said("init", net->init(&context_, 0, &config, logWarnings, nullptr)));
    net_ = net;
    nccl_abi::PropertiesV11 properties{};
    HOCCL_RETURN_IF_ERROR(said("getProperties", net_->getProperties(0, &properties)));
    if ((properties.pointerSupport & kDevicePointer) == 0) {
      return Status::error(Code::Unsupported, "the plugin does not take device memory");
    }
    return connect();
  }

  Status add(void* data, std::uint64_t bytes, void** handle, double* microseconds) {
    const std::uint64_t begin = monotonicNs();
    const auto result = net_->regMr(sends_, data, bytes, kDevicePointer, handle);
    *microseconds = static_cast<double>(monotonicNs() - begin) / 1000;
    return said("regMr", result);
  }
  Status remove(void* handle) { return said("deregMr", net_->deregMr(sends_, handle)); }

 private:
  static Status said(const char* call, nccl_abi::Result result) {
    if (static_cast<int>(result) == 0) return {};
    return Status::error(Code::System,
                         fmt::format("the plugin's {} gives {}", call, static_cast<int>(result)));
  }

  Status connect() {
    alignas(8) std::array<std::byte, nccl_abi::kHandleBytes> handle{};
    HOCCL_RETURN_IF_ERROR(said("listen", net_->listen(context_, 0, handle.data(), &listener_)));
    nccl_abi::DeviceHandle* none = nullptr;
    const std::uint64_t end = monotonicNs() + kConnectWithinNs;
    while (sends_ == nullptr || receives_ == nullptr) {
      if (sends_ == nullptr) {
        HOCCL_RETURN_IF_ERROR(
            said("connect", net_->connect(context_, 0, handle.data(), &sends_, &none)));
      }
      if (receives_ == nullptr) {
        HOCCL_RETURN_IF_ERROR(said("accept", net_->accept(listener_, &receives_, &none)));
      }
      if (monotonicNs() > end) {
        return Status::error(Code::System, "the plugin does not connect to itself within 10 s");
      }
      ::usleep(50);
    }
    return {};
  }

  const nccl_abi::NetV11* net_ = nullptr;
  void *context_ = nullptr, *listener_ = nullptr, *sends_ = nullptr, *receives_ = nullptr;
};

Status measure(const Settings& settings, Times* times) {
  // What the plugin asks for before it takes device memory, unless the caller has a say.
  ::setenv("HOCCL_NET_STAGING", "1", 1);
  ::setenv("NCCL_PROTO", "^LL128", 0);
  Locations locations{""};
  HOCCL_RETURN_IF_ERROR(Locations::ofThisProgram(&locations));
  std::string path;
  HOCCL_RETURN_IF_ERROR(locations.netPlugin(&path));
  const Driver* driver = nullptr;
  HOCCL_RETURN_IF_ERROR(Driver::load(&driver));
  CUcontext context = nullptr;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuDevicePrimaryCtxRetain(&context, 0)));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuCtxSetCurrent(context)));
  Plugin plugin;
  HOCCL_RETURN_IF_ERROR(plugin.open(path));
  std::vector<CUdeviceptr> memory;
  std::vector<void*> handles;
  Status status;
  // One more than is counted: the first call of all brings code and driver into the caches.
  for (long long i = -1; i < settings.count && status; ++i) {
    CUdeviceptr pointer = 0;
    status = HOCCL_CU(driver, cuMemAlloc(&pointer, settings.bytes));
    if (!status) break;
    memory.push_back(pointer);
    for (std::vector<double>* row : {&times->fresh, &times->known}) {
      void* handle = nullptr;
      double took = 0;
      status = plugin.add(reinterpret_cast<void*>(pointer), settings.bytes, &handle, &took);
      if (!status) break;
      handles.push_back(handle);
      if (i >= 0) row->push_back(took);
    }
  }
  for (void* handle : handles) {
    if (Status removed = plugin.remove(handle); status) status = removed;
  }
  for (const CUdeviceptr pointer : memory) (void)driver->cuMemFree(pointer);
  return status;
}

void print(const char* what, const Settings& settings, const std::vector<double>& values) {
  std::printf("%-8s %12llu %8zu %10.2f %10.2f %10.2f\n", what,
              static_cast<unsigned long long>(settings.bytes), values.size(), median(values),
              *std::min_element(values.begin(), values.end()),
              *std::max_element(values.begin(), values.end()));
}

nlohmann::ordered_json jsonOf(const Settings& settings, const Times& times,
                              const std::string& command) {
  RunHeader header;
  header.op = "regmr";
  header.version = versionText();
  header.commit = commitText();
  header.host = shortHostName();
  header.kernel = kernelText();
  header.device = "gpu";
  header.timestamp = timestampText();
  header.command = command;
  nlohmann::ordered_json report = reportJson(header, {});
  for (const auto& [name, values] : {std::pair{"fresh", &times.fresh}, {"known", &times.known}}) {
    report["rows"].push_back({{"schema", report["header"]["schema"]},
                              {"impl", "hoccl"},
                              {"op", "regmr"},
                              {"allocation", name},
                              {"bytes", settings.bytes},
                              {"time_us", median(*values)},
                              {"times_us", *values}});
  }
  return report;
}

}  // namespace

CLI::App* addRegistrationCommand(CLI::App& bench,
                                 const std::shared_ptr<RegistrationCommandLine>& line) {
  CLI::App* command = bench.add_subcommand(
      "regmr", "how long the net plugin takes to register device memory (HOCCL_NET_STAGING)");
  command->add_option("--bytes", line->bytes, "size of an allocation (default 1GiB)");
  command->add_option("--count", line->count, "allocations (default 16)");
  command->add_option("--json", line->jsonFile, "write the rows to this file");
  return command;
}

int runRegistrationBench(const RegistrationCommandLine& line, const std::string& command) {
  setLogRole("bench");
  auto fail = [](int code, const Status& status) {
    std::fprintf(stderr, "hoccl bench regmr: %s\n", status.message().c_str());
    return code;
  };
  Settings settings;
  if (Status status = complete(line, &settings); !status) return fail(kUsage, status);
  Times times;
  if (Status status = measure(settings, &times); !status) return fail(kFailed, status);
  std::printf("# hoccl bench regmr: us a call, allocations that are new to the plugin and known\n");
  std::printf("# %-6s %12s %8s %10s %10s %10s\n", "memory", "bytes", "calls", "median", "least",
              "most");
  print("fresh", settings, times.fresh);
  print("known", settings, times.known);
  if (line.jsonFile.empty()) return 0;
  const Status written = writeJson(line.jsonFile, jsonOf(settings, times, command));
  return written ? 0 : fail(kFailed, written);
}

}  // namespace hoccl::bench
