// NCCL's entry points, versions 8 to 12, each a thin call of net_plugin.h. Nothing leaves here as
// an exception, and every refusal is one line in NCCL's log.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <climits>
#include <exception>
#include <new>
#include <span>

#include "common/base/log.h"
#include "common/base/nccl_result.h"
#include "plugin-net/nccl_net_abi.h"
#include "plugin-net/net_plugin.h"
#include "plugin-net/rail_memory.h"

namespace hoccl::net_plugin {
namespace {

using nccl_abi::CommConfig;
using nccl_abi::DeviceHandle;
using nccl_abi::Logger;
using nccl_abi::ProfilerCallback;
using nccl_abi::Result;

constexpr char kName[] = "HOCCL";

// Runs one entry point. Connections say themselves what went wrong, once; everything else does
// here.
template <typename Body>
Result guarded(const char* what, bool saysItself, Body&& body) noexcept {
  try {
    const Status status = body();
    if (!status && !saysItself) logError("{}: {}", what, status.message());
    return toNccl(status.code());
  } catch (const std::bad_alloc&) {
    try {
      logError("{}: out of memory", what);
    } catch (...) {
    }
    return ncclSystemError;
  } catch (const std::exception& problem) {
    try {
      logError("{}: {}", what, problem.what());
    } catch (...) {
    }
    return ncclInternalError;
  } catch (...) {
    return ncclInternalError;
  }
}

Status missing(const char* argument) {
  return Status::error(Code::InvalidArgument, fmt::format("{} is null", argument));
}

Result devices(int* count) {
  return guarded("devices", false, [&]() -> Status {
    if (count == nullptr) return missing("the count");
    *count = static_cast<int>(deviceCount());
    return {};
  });
}

// What all versions have.
template <typename Properties>
void fillCommon(const Device& device, Properties* out) {
  *out = Properties{};
  out->name = const_cast<char*>(device.name.c_str());
  // NCCL hangs a device without a path below the CPU.
  out->pciPath = device.pciPath.empty() ? nullptr : const_cast<char*>(device.pciPath.c_str());
  out->guid = device.guid;
  // Device memory only where it goes through staging: NCCL moves its own buffers to where is
  // claimed.
  out->pointerSupport =
      nccl_abi::kHostPointer | (claimsDeviceMemory() ? nccl_abi::kDevicePointer : 0);
  if (device.ground) {
    out->pointerSupport |= (device.ground->gpu.peerMemory ? nccl_abi::kDevicePointer : 0) |
                           (device.ground->gpu.dmaBuf ? nccl_abi::kDmaBufPointer : 0);
  }
  out->registrationIsGlobal = 1;  // one registration serves all connections
  out->speedMbps = device.speedMbps;
  out->port = device.port;
  out->latencyUs = 0;  // as NCCL's sockets: its own table has that of a network
  out->maxComms = 65536;
  out->maxReceives = nccl_abi::kMaxGroupedReceives;
  out->deviceType = nccl_abi::kDeviceTypeHost;
}

template <typename Properties>
Result getProperties(int index, Properties* out) {
  return guarded("getProperties", false, [&]() -> Status {
    if (out == nullptr) return missing("the properties");
    const Device* device = nullptr;
    if (Status status = deviceAt(index, &device); !status) return status;
    fillCommon(*device, out);
    if constexpr (requires { out->virtualDevice; }) {
      out->virtualDevice.count = 1;
      out->virtualDevice.devices[0] = index;
      if (!device->members.empty()) {
        out->virtualDevice.count = static_cast<int>(device->members.size());
        std::copy(device->members.begin(), device->members.end(), out->virtualDevice.devices);
      }
      out->maxPointToPointBytes = nccl_abi::kMaxMessageBytes;
      out->maxCollectiveBytes = nccl_abi::kMaxMessageBytes;
    }
    if constexpr (requires { out->maxMultiRequests; }) out->maxMultiRequests = 1;
    if constexpr (requires { out->rail; }) out->rail = out->plane = nccl_abi::kNoRail;
    return {};
  });
}

// NCCL asks for what its topology suggests (NCCL_NET_MERGE_LEVEL), and goes on where it is refused.
template <int kDevices>
Result makeVDevice(int* index, nccl_abi::VirtualDevice<kDevices>* of) {
  return guarded("makeVDevice", true, [&]() -> Status {
    if (index == nullptr || of == nullptr) return missing("the number or the devices");
    if (of->count < 1 || of->count > kDevices) {
      return Status::error(Code::InvalidArgument, "number of devices");
    }
    const std::span<const int> members(of->devices, static_cast<std::size_t>(of->count));
    Status status = makeVirtualDevice(members, index);
    if (!status) logDebug("makeVDevice: {}", status.message());
    return status;
  });
}

Result initVersion(int version, Logger log, int trafficClass, Context** context) {
  return guarded("init", false,
                 [&]() -> Status { return initialise(version, log, trafficClass, context); });
}

Result listenIn(Context* context, int device, void* handle, void** listenComm) {
  return guarded("listen", false, [&]() -> Status {
    if (handle == nullptr || listenComm == nullptr) return missing("the handle or the result");
    *listenComm = nullptr;
    Listener* listener = nullptr;
    if (Status status = listen(context, device, handle, &listener); !status) return status;
    *listenComm = listener;
    return {};
  });
}

Result connectIn(Context* context, int device, void* handle, int trafficClass, void** sendComm,
                 DeviceHandle** deviceHandle) {
  return guarded("connect", false, [&]() -> Status {
    if (handle == nullptr || sendComm == nullptr) return missing("the handle or the result");
    *sendComm = nullptr;
    SendConnection* connection = nullptr;
    if (Status status = connect(context, device, handle, trafficClass, &connection); !status)
      return status;
    if (connection != nullptr && deviceHandle != nullptr) *deviceHandle = nullptr;
    *sendComm = static_cast<Connection*>(connection);
    return {};
  });
}

Result acceptOn(void* listenComm, void** recvComm, DeviceHandle** deviceHandle) {
  return guarded("accept", false, [&]() -> Status {
    if (listenComm == nullptr || recvComm == nullptr) return missing("the listener or the result");
    *recvComm = nullptr;
    ReceiveConnection* connection = nullptr;
    if (Status status = accept(static_cast<Listener*>(listenComm), &connection); !status) {
      return status;
    }
    if (connection != nullptr && deviceHandle != nullptr) *deviceHandle = nullptr;
    *recvComm = static_cast<Connection*>(connection);
    return {};
  });
}

// Over sockets host memory needs nothing, and has the null handle.
Result registerMemory(void* comm, void* data, std::size_t bytes, int type, void** handle) {
  return guarded("regMr", false, [&]() -> Status {
    if (handle != nullptr) *handle = nullptr;
    if (type == nccl_abi::kHostPointer) {
      if (handle == nullptr) return {};
      Memory* made = nullptr;
      Status status = registerHostMemory(static_cast<const Connection*>(comm), data, bytes, &made);
      *handle = made;
      return status;
    }
    if (type == nccl_abi::kDevicePointer && claimsDeviceMemory()) {
      if (handle == nullptr) return missing("the handle");
      Memory* made = nullptr;
      Status status = registerDeviceMemory(data, bytes, &made);
      *handle = made;
      return status;
    }
    auto* const connection = static_cast<Connection*>(comm);
    if (type == nccl_abi::kDevicePointer && connection != nullptr && connection->ground() &&
        connection->ground()->gpu.peerMemory) {
      if (handle == nullptr) return missing("the handle");
      Memory* made = nullptr;
      Status status = registerDirect(connection, data, bytes, -1, 0, &made);
      *handle = made;
      return status;
    }
    return Status::error(
        Code::Unsupported,
        fmt::format("memory of type {} is not host memory, and no other is claimed", type));
  });
}

Result registerDmaBuf(void* comm, void* data, std::size_t bytes, int type, std::uint64_t offset,
                      int fd, void** handle) {
  return guarded("regMrDmaBuf", false, [&]() -> Status {
    if (handle == nullptr) return missing("the handle");
    *handle = nullptr;
    auto* const connection = static_cast<Connection*>(comm);
    if (type != nccl_abi::kDevicePointer || connection == nullptr || !connection->ground() ||
        !connection->ground()->gpu.dmaBuf) {
      return Status::error(Code::Unsupported, "DMA-BUF memory is not claimed");
    }
    if (fd < 0) return Status::error(Code::InvalidArgument, fmt::format("descriptor {}", fd));
    Memory* made = nullptr;
    Status status = registerDirect(connection, data, bytes, fd, offset, &made);
    *handle = made;
    return status;
  });
}

Result deregisterMemory(void* /*comm*/, void* handle) {
  return guarded("deregMr", false, [&]() -> Status {
    if (handle != nullptr) deregister(static_cast<Memory*>(handle));
    return {};
  });
}

Result send(void* sendComm, void* data, std::size_t bytes, int tag, void* handle, void** request) {
  return guarded("isend", true, [&]() -> Status {
    if (sendComm == nullptr || request == nullptr) return missing("the connection or the request");
    *request = nullptr;
    Request* made = nullptr;
    auto* connection = static_cast<SendConnection*>(static_cast<Connection*>(sendComm));
    const Status status =
        connection->send(data, bytes, tag, static_cast<const Memory*>(handle), &made);
    *request = made;
    return status;
  });
}

template <typename Size>
Result receive(void* recvComm, int count, void** data, const Size* bytes, const int* tags,
               void** handles, void** request) {
  return guarded("irecv", true, [&]() -> Status {
    if (recvComm == nullptr || request == nullptr) return missing("the connection or the request");
    *request = nullptr;  // NCCL may have put a hint there that the request is not needed
    if (count < 1 || count > nccl_abi::kMaxGroupedReceives) {
      logError("irecv: {} receives in one request; 1 to {} go", count,
               nccl_abi::kMaxGroupedReceives);
      return Status::error(Code::InvalidArgument, "number of receives");
    }
    std::array<Receive, nccl_abi::kMaxGroupedReceives> receives;
    for (int i = 0; i < count; ++i) {
      if constexpr (std::is_signed_v<Size>) {
        if (bytes[i] < 0) {
          logError("irecv: a receive of {} bytes", bytes[i]);
          return Status::error(Code::InvalidArgument, "size of a receive");
        }
      }
      receives[i] = {data[i], static_cast<std::size_t>(bytes[i]), tags[i],
                     handles != nullptr ? static_cast<const Memory*>(handles[i]) : nullptr};
    }
    Request* made = nullptr;
    auto* connection = static_cast<ReceiveConnection*>(static_cast<Connection*>(recvComm));
    const Status status =
        connection->receive(std::span(receives.data(), static_cast<std::size_t>(count)), &made);
    *request = made;
    return status;
  });
}

// Through staging a receive is done once the copy engine has reported behind its copy, so it is
// visible; what a NIC has written into device memory may not be.
Result flush(void* recvComm, int count, void** data, int* sizes, void** handles, void** request) {
  return guarded("iflush", true, [&]() -> Status {
    if (request == nullptr) return missing("the request");
    *request = nullptr;
    if (recvComm == nullptr || count < 1 || count > nccl_abi::kMaxGroupedReceives ||
        handles == nullptr) {
      return {};
    }
    std::array<const Memory*, nccl_abi::kMaxGroupedReceives> memory{};
    const auto parts = static_cast<std::size_t>(count);
    for (std::size_t i = 0; i < parts; ++i) memory[i] = static_cast<const Memory*>(handles[i]);
    Request* made = nullptr;
    auto* connection = static_cast<ReceiveConnection*>(static_cast<Connection*>(recvComm));
    const Status status = connection->flush(std::span<void* const>(data, parts), sizes,
                                            std::span(memory.data(), parts), &made);
    *request = made;
    return status;
  });
}

Result test(void* request, int* done, int* sizes) {
  return guarded("test", true, [&]() -> Status {
    if (request == nullptr || done == nullptr) {
      logError("test: the request or the result is null");
      return missing("the request or the result");
    }
    auto* made = static_cast<Request*>(request);
    bool finished = false;
    const Status status = made->connection->test(made, &finished, sizes);
    *done = finished ? 1 : 0;
    return status;
  });
}

Result closeConnection(void* comm) {
  return guarded("close", false, [&]() -> Status {
    if (comm != nullptr) close(static_cast<Connection*>(comm));
    return {};
  });
}

Result closeListener(void* comm) {
  return guarded("closeListen", false, [&]() -> Status {
    if (comm != nullptr) close(static_cast<Listener*>(comm));
    return {};
  });
}

// --- Versions that have no context.

constexpr int kUnset = -1;  // traffic class
int trafficClassOf(const CommConfig* config) {
  return config != nullptr ? config->trafficClass : kUnset;
}

template <int kVersion>
Result initAlone(Logger log) {
  return initVersion(kVersion, log, kUnset, nullptr);
}
Result initV10(Logger log, ProfilerCallback /*profiler*/) {
  return initVersion(10, log, kUnset, nullptr);
}
Result listenAlone(int device, void* handle, void** listenComm) {
  return listenIn(nullptr, device, handle, listenComm);
}
Result connectAlone(int device, void* handle, void** sendComm, DeviceHandle** deviceHandle) {
  return connectIn(nullptr, device, handle, kUnset, sendComm, deviceHandle);
}
Result connectV10(int device, CommConfig* config, void* handle, void** sendComm,
                  DeviceHandle** deviceHandle) {
  return connectIn(nullptr, device, handle, trafficClassOf(config), sendComm, deviceHandle);
}

// --- Sizes of messages: int in version 8, with profiler handles from 10 on.

Result sendV8(void* sendComm, void* data, int bytes, int tag, void* handle, void** request) {
  if (bytes < 0) {
    return guarded("isend", false, [&]() -> Status {
      return Status::error(Code::InvalidArgument, fmt::format("a send of {} bytes", bytes));
    });
  }
  return send(sendComm, data, static_cast<std::size_t>(bytes), tag, handle, request);
}
Result sendV9(void* sendComm, void* data, std::size_t bytes, int tag, void* handle,
              void** request) {
  return send(sendComm, data, bytes, tag, handle, request);
}
Result sendV10(void* sendComm, void* data, std::size_t bytes, int tag, void* handle,
               void* /*profilerHandle*/, void** request) {
  return send(sendComm, data, bytes, tag, handle, request);
}
Result receiveV8(void* recvComm, int count, void** data, int* bytes, int* tags, void** handles,
                 void** request) {
  return receive(recvComm, count, data, bytes, tags, handles, request);
}
Result receiveV9(void* recvComm, int count, void** data, std::size_t* bytes, int* tags,
                 void** handles, void** request) {
  return receive(recvComm, count, data, bytes, tags, handles, request);
}
Result receiveV10(void* recvComm, int count, void** data, std::size_t* bytes, int* tags,
                  void** handles, void** /*profilerHandles*/, void** request) {
  return receive(recvComm, count, data, bytes, tags, handles, request);
}

// --- Versions 11 and 12.

template <int kVersion>
Result initWithContext(void** context, std::uint64_t /*commId*/, CommConfig* config, Logger log,
                       ProfilerCallback /*profiler*/) {
  Context* made = nullptr;
  const Result result =
      initVersion(kVersion, log, trafficClassOf(config), context != nullptr ? &made : nullptr);
  if (context != nullptr) *context = made;
  return result;
}
Result listenWithContext(void* context, int device, void* handle, void** listenComm) {
  return listenIn(static_cast<Context*>(context), device, handle, listenComm);
}
Result connectWithContext(void* context, int device, void* handle, void** sendComm,
                          DeviceHandle** deviceHandle) {
  return connectIn(static_cast<Context*>(context), device, handle, kUnset, sendComm, deviceHandle);
}
Result finalize(void* context) {
  return guarded("finalize", false, [&]() -> Status {
    if (context != nullptr) finalise(static_cast<Context*>(context));
    return {};
  });
}

// The entries that all versions have alike. Null where NCCL allows it and there is nothing to
// offer: device-side networking, hints about the traffic to come.
template <typename Net, typename Properties>
constexpr Net withCommonEntries() {
  Net net{};
  net.name = kName;
  net.devices = devices;
  net.getProperties = getProperties<Properties>;
  net.accept = acceptOn;
  net.regMr = registerMemory;
  net.regMrDmaBuf = registerDmaBuf;
  net.deregMr = deregisterMemory;
  net.iflush = flush;
  net.test = test;
  net.closeSend = closeConnection;
  net.closeRecv = closeConnection;
  net.closeListen = closeListener;
  return net;
}

constexpr nccl_abi::NetV8 makeV8() {
  auto net = withCommonEntries<nccl_abi::NetV8, nccl_abi::PropertiesV8>();
  net.init = initAlone<8>;
  net.listen = listenAlone;
  net.connect = connectAlone;
  net.isend = sendV8;
  net.irecv = receiveV8;
  return net;
}
constexpr nccl_abi::NetV9 makeV9() {
  auto net = withCommonEntries<nccl_abi::NetV9, nccl_abi::PropertiesV9>();
  net.init = initAlone<9>;
  net.listen = listenAlone;
  net.connect = connectAlone;
  net.isend = sendV9;
  net.irecv = receiveV9;
  net.makeVDevice = makeVDevice<4>;
  return net;
}
constexpr nccl_abi::NetV10 makeV10() {
  auto net = withCommonEntries<nccl_abi::NetV10, nccl_abi::PropertiesV10>();
  net.init = initV10;
  net.listen = listenAlone;
  net.connect = connectV10;
  net.isend = sendV10;
  net.irecv = receiveV10;
  net.makeVDevice = makeVDevice<4>;
  return net;
}
template <typename Net, typename Properties, int kVersion>
constexpr Net makeWithContext() {
  auto net = withCommonEntries<Net, Properties>();
  net.init = initWithContext<kVersion>;
  net.listen = listenWithContext;
  net.connect = connectWithContext;
  net.isend = sendV10;
  net.irecv = receiveV10;
  net.finalize = finalize;
  net.makeVDevice = makeVDevice;  // of that version's number of devices
  return net;
}

}  // namespace
}  // namespace hoccl::net_plugin

#define HOCCL_EXPORT extern "C" __attribute__((visibility("default")))
HOCCL_EXPORT constinit const hoccl::nccl_abi::NetV8 ncclNetPlugin_v8 = hoccl::net_plugin::makeV8();
HOCCL_EXPORT constinit const hoccl::nccl_abi::NetV9 ncclNetPlugin_v9 = hoccl::net_plugin::makeV9();
HOCCL_EXPORT constinit const hoccl::nccl_abi::NetV10 ncclNetPlugin_v10 =
    hoccl::net_plugin::makeV10();
HOCCL_EXPORT constinit const hoccl::nccl_abi::NetV11 ncclNetPlugin_v11 =
    hoccl::net_plugin::makeWithContext<hoccl::nccl_abi::NetV11, hoccl::nccl_abi::PropertiesV11,
                                       11>();
HOCCL_EXPORT constinit const hoccl::nccl_abi::NetV12 ncclNetPlugin_v12 =
    hoccl::net_plugin::makeWithContext<hoccl::nccl_abi::NetV12, hoccl::nccl_abi::PropertiesV12,
                                       12>();
