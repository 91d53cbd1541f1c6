#include "test/conformance/net_driver.h"

#include <dlfcn.h>

#include <cstring>

namespace conformance {
namespace {

namespace abi = hoccl::nccl_abi;

template <int kVersion>
struct TableOf;
template <>
struct TableOf<8> {
  using Net = abi::NetV8;
  using Properties = abi::PropertiesV8;
};
template <>
struct TableOf<9> {
  using Net = abi::NetV9;
  using Properties = abi::PropertiesV9;
};
template <>
struct TableOf<10> {
  using Net = abi::NetV10;
  using Properties = abi::PropertiesV10;
};
template <>
struct TableOf<11> {
  using Net = abi::NetV11;
  using Properties = abi::PropertiesV11;
};
template <>
struct TableOf<12> {
  using Net = abi::NetV12;
  using Properties = abi::PropertiesV12;
};

ncclResult_t noProfiler(void**, int, void*, std::int64_t, void*) { return ncclSuccess; }

template <int kVersion>
class Table final : public Net {
  using Raw = typename TableOf<kVersion>::Net;
  static constexpr bool kContext = kVersion >= 11;

 public:
  explicit Table(const Raw* raw) : raw_(*raw) {}
  [[nodiscard]] int version() const override { return kVersion; }
  [[nodiscard]] const char* name() const override { return raw_.name; }

  ncclResult_t init(void** context, abi::Logger logger) override {
    *context = nullptr;
    if constexpr (kContext) {
      abi::CommConfig config{trafficClass};
      return raw_.init(context, 0x1234, &config, logger, noProfiler);
    } else if constexpr (kVersion == 10) {
      return raw_.init(logger, noProfiler);
    } else {
      return raw_.init(logger);
    }
  }
  ncclResult_t devices(int* count) override { return raw_.devices(count); }
  ncclResult_t properties(int device, Properties* out) override {
    // Not zeroed by NCCL either.
    typename TableOf<kVersion>::Properties raw;
    std::memset(static_cast<void*>(&raw), 0xa5, sizeof raw);
    if (const ncclResult_t result = raw_.getProperties(device, &raw); result != ncclSuccess) {
      return result;
    }
    out->name = raw.name;
    out->pciPath = raw.pciPath != nullptr ? raw.pciPath : "";
    out->guid = raw.guid;
    out->pointerSupport = raw.pointerSupport;
    out->speedMbps = raw.speedMbps;
    out->maxComms = raw.maxComms;
    out->maxReceives = raw.maxReceives;
    out->deviceType = raw.deviceType;
    out->latencyUs = raw.latencyUs;
    if constexpr (kVersion >= 9) {
      out->maxPointToPointBytes = raw.maxPointToPointBytes;
      out->maxCollectiveBytes = raw.maxCollectiveBytes;
      out->virtualDevices = raw.virtualDevice.count;
      out->virtualDevice = raw.virtualDevice.devices[0];
    }
    if constexpr (kVersion >= 12) {
      out->rail = raw.rail;
      out->plane = raw.plane;
    }
    return ncclSuccess;
  }
  ncclResult_t makeVirtual(int count, const int* devices, int* out) override {
    if constexpr (kVersion >= 9) {
      if (raw_.makeVDevice == nullptr) return ncclInvalidUsage;
      abi::VirtualDevice<kVersion >= 12 ? 8 : 4> merged{};
      merged.count = count;
      for (int i = 0; i < count; ++i) merged.devices[i] = devices[i];
      return raw_.makeVDevice(out, &merged);
    } else {
      return ncclInvalidUsage;
    }
  }
  ncclResult_t listen(void* context, int device, void* handle, void** out) override {
    if constexpr (kContext) return raw_.listen(context, device, handle, out);
    if constexpr (!kContext) return raw_.listen(device, handle, out);
  }
  ncclResult_t connect(void* context, int device, void* handle, void** out) override {
    abi::DeviceHandle* none = nullptr;
    if constexpr (kContext) {
      // NCCL's probe of GPUDirect passes no place for a device handle.
      return raw_.connect(context, device, handle, out, nullptr);
    } else if constexpr (kVersion == 10) {
      abi::CommConfig config{trafficClass};
      return raw_.connect(device, &config, handle, out, &none);
    } else {
      return raw_.connect(device, handle, out, &none);
    }
  }
  ncclResult_t accept(void* listener, void** out) override {
    abi::DeviceHandle* none = nullptr;
    return raw_.accept(listener, out, &none);
  }
  ncclResult_t registerMemory(void* comm, void* data, std::size_t bytes, int type,
                              void** handle) override {
    return raw_.regMr(comm, data, bytes, type, handle);
  }
  ncclResult_t deregisterMemory(void* comm, void* handle) override {
    return raw_.deregMr(comm, handle);
  }
  ncclResult_t send(void* comm, const void* data, std::size_t bytes, int tag, void** request,
                    void* handle) override {
    void* from = const_cast<void*>(data);
    if constexpr (kVersion == 8) {
      return raw_.isend(comm, from, static_cast<int>(bytes), tag, handle, request);
    } else if constexpr (kVersion == 9) {
      return raw_.isend(comm, from, bytes, tag, handle, request);
    } else {
      return raw_.isend(comm, from, bytes, tag, handle, nullptr, request);
    }
  }
  ncclResult_t receive(void* comm, int count, void** data, const std::size_t* bytes,
                       const int* tags, void** request, void* const* given) override {
    void* handles[abi::kMaxGroupedReceives] = {};
    for (int i = 0; given != nullptr && i < count && i < abi::kMaxGroupedReceives; ++i) {
      handles[i] = given[i];
    }
    int* ownTags = const_cast<int*>(tags);
    if constexpr (kVersion == 8) {
      int sizes[abi::kMaxGroupedReceives] = {};
      for (int i = 0; i < count && i < abi::kMaxGroupedReceives; ++i) {
        sizes[i] = static_cast<int>(bytes[i]);
      }
      return raw_.irecv(comm, count, data, sizes, ownTags, handles, request);
    } else if constexpr (kVersion == 9) {
      return raw_.irecv(comm, count, data, const_cast<std::size_t*>(bytes), ownTags, handles,
                        request);
    } else {
      return raw_.irecv(comm, count, data, const_cast<std::size_t*>(bytes), ownTags, handles,
                        nullptr, request);
    }
  }
  ncclResult_t flush(void* comm, void* data, int bytes, void** request, void* handle) override {
    return raw_.iflush(comm, 1, &data, &bytes, &handle, request);
  }
  ncclResult_t test(void* request, int* done, int* sizes) override {
    return raw_.test(request, done, sizes);
  }
  ncclResult_t closeSend(void* comm) override { return raw_.closeSend(comm); }
  ncclResult_t closeReceive(void* comm) override { return raw_.closeRecv(comm); }
  ncclResult_t closeListen(void* comm) override { return raw_.closeListen(comm); }

  [[nodiscard]] std::string missing() const override {
    std::string text;
    const auto need = [&](const char* name, bool there) {
      if (!there) text += std::string(text.empty() ? "" : ", ") + name;
    };
    need("name", raw_.name != nullptr);
    need("init", raw_.init != nullptr);
    need("devices", raw_.devices != nullptr);
    need("getProperties", raw_.getProperties != nullptr);
    need("listen", raw_.listen != nullptr);
    need("connect", raw_.connect != nullptr);
    need("accept", raw_.accept != nullptr);
    need("regMr", raw_.regMr != nullptr);
    need("regMrDmaBuf", raw_.regMrDmaBuf != nullptr);
    need("deregMr", raw_.deregMr != nullptr);
    need("isend", raw_.isend != nullptr);
    need("irecv", raw_.irecv != nullptr);
    need("iflush", raw_.iflush != nullptr);
    need("test", raw_.test != nullptr);
    need("closeSend", raw_.closeSend != nullptr);
    need("closeRecv", raw_.closeRecv != nullptr);
    need("closeListen", raw_.closeListen != nullptr);
    if constexpr (kContext) need("finalize", raw_.finalize != nullptr);
    return text;
  }
  ncclResult_t finalize(void* context) override {
    if constexpr (kContext) return raw_.finalize(context);
    return ncclSuccess;
  }

 private:
  const Raw raw_;
};

template <int kVersion>
std::unique_ptr<Net> tableIn(void* library) {
  const std::string symbol = "ncclNetPlugin_v" + std::to_string(kVersion);
  const void* raw = ::dlsym(library, symbol.c_str());
  if (raw == nullptr) return nullptr;
  return std::make_unique<Table<kVersion>>(
      static_cast<const typename TableOf<kVersion>::Net*>(raw));
}

}  // namespace

std::unique_ptr<Net> netOf(void* library, int version) {
  switch (version) {
    case 8:
      return tableIn<8>(library);
    case 9:
      return tableIn<9>(library);
    case 10:
      return tableIn<10>(library);
    case 11:
      return tableIn<11>(library);
    case 12:
      return tableIn<12>(library);
    default:
      return nullptr;
  }
}

}  // namespace conformance
