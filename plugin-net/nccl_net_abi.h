#pragma once

// NCCL's net plugin interface, versions 8 to 12, as far as a plugin needs it: written from the
// public headers' facts (order, types, meaning), each size and offset checked below. What changed
// by version:
//   8  the oldest one here: sizes of messages are int
//   9  sizes of messages are size_t; properties gain forceFlush, the devices of a virtual NIC,
//   largest sizes 10 a profiler callback for init, a traffic class for connect, profiler handles
//   for isend and irecv 11 a context for each communicator: init makes it, listen and connect take
//   it, finalize ends it 12 properties: rail and plane, and room for 8 devices in a virtual NIC

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace hoccl::nccl_abi {

inline constexpr std::size_t kHandleBytes = 128;
inline constexpr int kMaxRequests = 32;  ///< receive requests that may be open on one connection
inline constexpr int kMaxGroupedReceives = 8;  ///< receives one request may have
inline constexpr std::size_t kMaxMessageBytes = std::size_t{1} << 40;
inline constexpr int kHostPointer = 0x1, kDevicePointer = 0x2, kDmaBufPointer = 0x4;
inline constexpr int kDeviceTypeHost = 0;
inline constexpr std::int16_t kNoRail = -1;

/// NCCL's logger (ncclDebugLogger_t): enums are ints at the edge.
using Logger = void (*)(int level, unsigned long subsystems, const char* file, int line,
                        const char* format, ...);
inline constexpr int kLogWarn = 2, kLogInfo = 3, kLogTrace = 5;
inline constexpr unsigned long kSubsystemInit = 0x1, kSubsystemNet = 0x10;

using ProfilerCallback = ncclResult_t (*)(void** event, int type, void* parent, std::int64_t plugin,
                                          void* extra);

/// What a device-side plugin fills for connect and accept; never touched here.
struct DeviceHandle;

struct CommConfig {
  int trafficClass;
};

template <int kDevices>
struct VirtualDevice {
  int count;
  int devices[kDevices];
};

struct PropertiesV8 {
  char* name;
  char* pciPath;
  std::uint64_t guid;
  int pointerSupport;
  int registrationIsGlobal;
  int speedMbps;
  int port;
  float latencyUs;
  int maxComms;
  int maxReceives;
  int deviceType;
  int deviceVersion;
};

struct PropertiesV9 {
  char* name;
  char* pciPath;
  std::uint64_t guid;
  int pointerSupport;
  int registrationIsGlobal;
  int forceFlush;
  int speedMbps;
  int port;
  float latencyUs;
  int maxComms;
  int maxReceives;
  int deviceType;
  int deviceVersion;
  VirtualDevice<4> virtualDevice;
  std::size_t maxPointToPointBytes;
  std::size_t maxCollectiveBytes;
};
using PropertiesV10 = PropertiesV9;

struct PropertiesV11 {
  char* name;
  char* pciPath;
  std::uint64_t guid;
  int pointerSupport;
  int registrationIsGlobal;
  int forceFlush;
  int speedMbps;
  int port;
  float latencyUs;
  int maxComms;
  int maxReceives;
  int deviceType;
  int deviceVersion;
  VirtualDevice<4> virtualDevice;
  std::size_t maxPointToPointBytes;
  std::size_t maxCollectiveBytes;
  int maxMultiRequests;
};

struct PropertiesV12 {
  char* name;
  char* pciPath;
  std::uint64_t guid;
  int pointerSupport;
  int registrationIsGlobal;
  int forceFlush;
  int speedMbps;
  int port;
  float latencyUs;
  int maxComms;
  int maxReceives;
  int deviceType;
  int deviceVersion;
  VirtualDevice<8> virtualDevice;
  std::size_t maxPointToPointBytes;
  std::size_t maxCollectiveBytes;
  int maxMultiRequests;
  std::int16_t rail;
  std::int16_t plane;
};

using Result = ncclResult_t;

// The calls that are alike in all these versions.
using Devices = Result (*)(int* count);
template <typename Properties>
using GetProperties = Result (*)(int device, Properties* out);
using Accept = Result (*)(void* listenComm, void** recvComm, DeviceHandle** deviceHandle);
using RegisterMemory = Result (*)(void* comm, void* data, std::size_t bytes, int type,
                                  void** handle);
using RegisterDmaBuf = Result (*)(void* comm, void* data, std::size_t bytes, int type,
                                  std::uint64_t offset, int fd, void** handle);
using DeregisterMemory = Result (*)(void* comm, void* handle);
using Flush = Result (*)(void* recvComm, int count, void** data, int* sizes, void** handles,
                         void** request);
using Test = Result (*)(void* request, int* done, int* sizes);
using Close = Result (*)(void* comm);
using GetDeviceMemory = Result (*)(void* comm, void* handle, void** deviceHandle);
using ReceiveConsumed = Result (*)(void* recvComm, int count, void* request);
template <int kDevices>
using MakeVirtualDevice = Result (*)(int* device, VirtualDevice<kDevices>* of);

struct NetV8 {
  const char* name;
  Result (*init)(Logger log);
  Devices devices;
  GetProperties<PropertiesV8> getProperties;
  Result (*listen)(int device, void* handle, void** listenComm);
  Result (*connect)(int device, void* handle, void** sendComm, DeviceHandle** deviceHandle);
  Accept accept;
  RegisterMemory regMr;
  RegisterDmaBuf regMrDmaBuf;
  DeregisterMemory deregMr;
  Result (*isend)(void* sendComm, void* data, int bytes, int tag, void* handle, void** request);
  Result (*irecv)(void* recvComm, int count, void** data, int* bytes, int* tags, void** handles,
                  void** request);
  Flush iflush;
  Test test;
  Close closeSend;
  Close closeRecv;
  Close closeListen;
  GetDeviceMemory getDeviceMr;
  ReceiveConsumed irecvConsumed;
};

struct NetV9 {
  const char* name;
  Result (*init)(Logger log);
  Devices devices;
  GetProperties<PropertiesV9> getProperties;
  Result (*listen)(int device, void* handle, void** listenComm);
  Result (*connect)(int device, void* handle, void** sendComm, DeviceHandle** deviceHandle);
  Accept accept;
  RegisterMemory regMr;
  RegisterDmaBuf regMrDmaBuf;
  DeregisterMemory deregMr;
  Result (*isend)(void* sendComm, void* data, std::size_t bytes, int tag, void* handle,
                  void** request);
  Result (*irecv)(void* recvComm, int count, void** data, std::size_t* bytes, int* tags,
                  void** handles, void** request);
  Flush iflush;
  Test test;
  Close closeSend;
  Close closeRecv;
  Close closeListen;
  GetDeviceMemory getDeviceMr;
  ReceiveConsumed irecvConsumed;
  MakeVirtualDevice<4> makeVDevice;
};

struct NetV10 {
  const char* name;
  Result (*init)(Logger log, ProfilerCallback profiler);
  Devices devices;
  GetProperties<PropertiesV10> getProperties;
  Result (*listen)(int device, void* handle, void** listenComm);
  Result (*connect)(int device, CommConfig* config, void* handle, void** sendComm,
                    DeviceHandle** deviceHandle);
  Accept accept;
  RegisterMemory regMr;
  RegisterDmaBuf regMrDmaBuf;
  DeregisterMemory deregMr;
  Result (*isend)(void* sendComm, void* data, std::size_t bytes, int tag, void* handle,
                  void* profilerHandle, void** request);
  Result (*irecv)(void* recvComm, int count, void** data, std::size_t* bytes, int* tags,
                  void** handles, void** profilerHandles, void** request);
  Flush iflush;
  Test test;
  Close closeSend;
  Close closeRecv;
  Close closeListen;
  GetDeviceMemory getDeviceMr;
  ReceiveConsumed irecvConsumed;
  MakeVirtualDevice<4> makeVDevice;
};

/// Versions 11 and 12: the same calls, other properties.
template <typename Properties, int kVirtualDevices>
struct NetWithContext {
  const char* name;
  Result (*init)(void** context, std::uint64_t commId, CommConfig* config, Logger log,
                 ProfilerCallback profiler);
  Devices devices;
  GetProperties<Properties> getProperties;
  Result (*listen)(void* context, int device, void* handle, void** listenComm);
  Result (*connect)(void* context, int device, void* handle, void** sendComm,
                    DeviceHandle** deviceHandle);
  Accept accept;
  RegisterMemory regMr;
  RegisterDmaBuf regMrDmaBuf;
  DeregisterMemory deregMr;
  Result (*isend)(void* sendComm, void* data, std::size_t bytes, int tag, void* handle,
                  void* profilerHandle, void** request);
  Result (*irecv)(void* recvComm, int count, void** data, std::size_t* bytes, int* tags,
                  void** handles, void** profilerHandles, void** request);
  Flush iflush;
  Test test;
  Close closeSend;
  Close closeRecv;
  Close closeListen;
  GetDeviceMemory getDeviceMr;
  ReceiveConsumed irecvConsumed;
  MakeVirtualDevice<kVirtualDevices> makeVDevice;
  Result (*finalize)(void* context);
  Result (*setNetAttr)(void* context, void* attributes);
};
using NetV11 = NetWithContext<PropertiesV11, 4>;
using NetV12 = NetWithContext<PropertiesV12, 8>;

#define HOCCL_ABI_OFFSET(type, member, at) static_assert(offsetof(type, member) == (at))
static_assert(sizeof(void*) == 8 && sizeof(int) == 4 && sizeof(Result) == 4);
static_assert(sizeof(PropertiesV8) == 64 && sizeof(PropertiesV9) == 104 &&
              sizeof(PropertiesV11) == 112 && sizeof(PropertiesV12) == 128);
HOCCL_ABI_OFFSET(PropertiesV8, guid, 16);
HOCCL_ABI_OFFSET(PropertiesV8, pointerSupport, 24);
HOCCL_ABI_OFFSET(PropertiesV8, speedMbps, 32);
HOCCL_ABI_OFFSET(PropertiesV8, latencyUs, 40);
HOCCL_ABI_OFFSET(PropertiesV8, maxReceives, 48);
HOCCL_ABI_OFFSET(PropertiesV8, deviceVersion, 56);
HOCCL_ABI_OFFSET(PropertiesV9, forceFlush, 32);
HOCCL_ABI_OFFSET(PropertiesV9, speedMbps, 36);
HOCCL_ABI_OFFSET(PropertiesV9, latencyUs, 44);
HOCCL_ABI_OFFSET(PropertiesV9, maxReceives, 52);
HOCCL_ABI_OFFSET(PropertiesV9, deviceVersion, 60);
HOCCL_ABI_OFFSET(PropertiesV9, virtualDevice, 64);
HOCCL_ABI_OFFSET(PropertiesV9, maxPointToPointBytes, 88);
HOCCL_ABI_OFFSET(PropertiesV9, maxCollectiveBytes, 96);
HOCCL_ABI_OFFSET(PropertiesV11, virtualDevice, 64);
HOCCL_ABI_OFFSET(PropertiesV11, maxPointToPointBytes, 88);
HOCCL_ABI_OFFSET(PropertiesV11, maxMultiRequests, 104);
HOCCL_ABI_OFFSET(PropertiesV12, virtualDevice, 64);
HOCCL_ABI_OFFSET(PropertiesV12, maxPointToPointBytes, 104);
HOCCL_ABI_OFFSET(PropertiesV12, maxCollectiveBytes, 112);
HOCCL_ABI_OFFSET(PropertiesV12, maxMultiRequests, 120);
HOCCL_ABI_OFFSET(PropertiesV12, rail, 124);
HOCCL_ABI_OFFSET(PropertiesV12, plane, 126);

// Tables of pointers: the count of entries, and where the calls lie that newer versions added.
static_assert(sizeof(NetV8) == 19 * 8 && sizeof(NetV9) == 20 * 8 && sizeof(NetV10) == 20 * 8 &&
              sizeof(NetV11) == 22 * 8 && sizeof(NetV12) == 22 * 8);
HOCCL_ABI_OFFSET(NetV8, regMr, 7 * 8);
HOCCL_ABI_OFFSET(NetV8, isend, 10 * 8);
HOCCL_ABI_OFFSET(NetV8, test, 13 * 8);
HOCCL_ABI_OFFSET(NetV8, irecvConsumed, 18 * 8);
HOCCL_ABI_OFFSET(NetV9, isend, 10 * 8);
HOCCL_ABI_OFFSET(NetV9, makeVDevice, 19 * 8);
HOCCL_ABI_OFFSET(NetV10, isend, 10 * 8);
HOCCL_ABI_OFFSET(NetV10, makeVDevice, 19 * 8);
HOCCL_ABI_OFFSET(NetV11, isend, 10 * 8);
HOCCL_ABI_OFFSET(NetV11, finalize, 20 * 8);
HOCCL_ABI_OFFSET(NetV11, setNetAttr, 21 * 8);
HOCCL_ABI_OFFSET(NetV12, finalize, 20 * 8);
#undef HOCCL_ABI_OFFSET
static_assert(std::is_standard_layout_v<NetV8> && std::is_trivial_v<NetV12>);

}  // namespace hoccl::nccl_abi
