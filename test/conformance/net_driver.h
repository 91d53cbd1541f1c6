#pragma once

// One way of driving all versions of NCCL's net plugin interface, loaded as NCCL loads it.

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plugin-net/nccl_net_abi.h"

namespace conformance {

inline constexpr int kVersions[] = {8, 9, 10, 11, 12};
/// ncclConfig.trafficClass of what is made next; -1: unset. From version 10 on.
inline int trafficClass = -1;

struct Properties {
  std::string name, pciPath;
  std::uint64_t guid = 0;
  int pointerSupport = 0, speedMbps = 0, maxComms = 0, maxReceives = 0, deviceType = -1;
  float latencyUs = -1;
  std::size_t maxPointToPointBytes = 0, maxCollectiveBytes = 0;  ///< 0 where the version has none
  int virtualDevices = 0, virtualDevice = -1;
  int rail = 0, plane = 0;
};

using Handle = std::array<std::byte, hoccl::nccl_abi::kHandleBytes>;

/// A plugin's table of one version. Every call is the plugin's own; versions without a context get
/// and give a null one.
class Net {
 public:
  virtual ~Net() = default;
  [[nodiscard]] virtual int version() const = 0;
  [[nodiscard]] virtual const char* name() const = 0;
  virtual ncclResult_t init(void** context, hoccl::nccl_abi::Logger logger) = 0;
  virtual ncclResult_t devices(int* count) = 0;
  virtual ncclResult_t properties(int device, Properties* out) = 0;
  /// The devices as one; the number of the new one. Versions without: ncclInvalidUsage.
  virtual ncclResult_t makeVirtual(int count, const int* devices, int* out) = 0;
  virtual ncclResult_t listen(void* context, int device, void* handle, void** out) = 0;
  virtual ncclResult_t connect(void* context, int device, void* handle, void** out) = 0;
  virtual ncclResult_t accept(void* listener, void** out) = 0;
  virtual ncclResult_t registerMemory(void* comm, void* data, std::size_t bytes, int type,
                                      void** handle) = 0;
  virtual ncclResult_t deregisterMemory(void* comm, void* handle) = 0;
  virtual ncclResult_t send(void* comm, const void* data, std::size_t bytes, int tag,
                            void** request, void* handle = nullptr) = 0;
  virtual ncclResult_t receive(void* comm, int count, void** data, const std::size_t* bytes,
                               const int* tags, void** request, void* const* handles = nullptr) = 0;
  virtual ncclResult_t flush(void* comm, void* data, int bytes, void** request,
                             void* handle = nullptr) = 0;
  virtual ncclResult_t test(void* request, int* done, int* sizes) = 0;
  virtual ncclResult_t closeSend(void* comm) = 0;
  virtual ncclResult_t closeReceive(void* comm) = 0;
  virtual ncclResult_t closeListen(void* comm) = 0;
  /// Null entries where NCCL would crash: "" if there are none.
  [[nodiscard]] virtual std::string missing() const = 0;
  virtual ncclResult_t finalize(void* context) = 0;
};

/// The table of that version in a library that dlopen gave; null if it has none.
std::unique_ptr<Net> netOf(void* library, int version);

}  // namespace conformance
