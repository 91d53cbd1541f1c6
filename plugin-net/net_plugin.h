#pragma once

// The net plugin behind NCCL's versions of its interface (abi_adapters.cc): what a plugin does, in
// our own terms. Nothing here blocks, and one thread at a time uses a connection, as NCCL's proxy
// does; different connections may be used by different threads.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/net/tcp/interfaces.h"
#include "plugin-net/nccl_net_abi.h"

namespace hoccl::net_plugin {

struct VerbsGround;

/// A device as NCCL sees it: a network interface, or an RDMA NIC's port and the interface over
/// which its connections are set up. Stays where it is while the library is loaded, so that names
/// may be kept.
struct Device {
  std::string name;
  std::string pciPath;     ///< in sysfs, links resolved; empty: none
  std::uint64_t guid = 0;  ///< the same on no other adapter or host
  int speedMbps = 0;
  int port = 0;
  std::vector<int> members;  ///< of one made by makeVirtualDevice; else empty
  Interface interface;
  std::shared_ptr<const VerbsGround> ground;  ///< null: no NIC
};

/// What one init made; owns what was made in it. Versions before 11 share a null one.
class Context;
class Listener;

/// A send or a group of receives under way. Belongs to its connection until `test` says done.
struct Request;

/// Device memory that has been registered (device_memory.h).
class Registration;
/// Host memory that NICs know (rail_memory.h).
class RailMemory;

/// What regMr gives NCCL: one of the two.
struct Memory {
  Registration* device = nullptr;
  std::shared_ptr<RailMemory> rails;
};

/// One receive of a group.
struct Receive {
  void* data = nullptr;
  std::size_t bytes = 0;  ///< at most
  int tag = 0;
  const Memory* memory = nullptr;  ///< null: host memory that is not registered
};

/// Either end of a connection. An error is kept: every later call gives it again.
class Connection {
 public:
  virtual ~Connection() = default;
  /// `done` false: later. When done, `sizes` (one for each receive of the group, may be null) has
  /// the bytes that came or went, at most INT_MAX, and the request is gone.
  virtual Status test(Request* request, bool* done, int* sizes) = 0;
  /// The NICs it is made on; null: none.
  [[nodiscard]] virtual const std::shared_ptr<const VerbsGround>& ground() const = 0;
  /// Before device memory is used that NICs reach.
  virtual Status prepareDirect() { return {}; }
};

/// The sending end.
class SendConnection : public Connection {
 public:
  /// `data` stays until the request is done; it lies in `memory`, or in host memory where that is
  /// null. `out` null with success: not now.
  virtual Status send(const void* data, std::size_t bytes, int tag, const Memory* memory,
                      Request** out) = 0;
};

/// The receiving end.
class ReceiveConnection : public Connection {
 public:
  /// 1 to kMaxGroupedReceives receives that are done together. The n-th message of a tag goes into
  /// the n-th receive of that tag; one larger than its receive is an error.
  virtual Status receive(std::span<const Receive> receives, Request** out) = 0;
  /// What a receive that is done has brought into device memory becomes visible there with the
  /// request; null: it is. `sizes` as NCCL has them.
  virtual Status flush(std::span<void* const> data, const int* sizes,
                       std::span<const Memory* const> memory, Request** out) = 0;
};

struct Request {
  Connection* connection = nullptr;
};

/// Finds the interfaces and takes over NCCL's logger; the first time it says so in one line.
/// `trafficClass`: of connections of that context; -1 or the smallest integer: unset. `context`,
/// where it is not null, gets a new one.
Status initialise(int abiVersion, nccl_abi::Logger logger, int trafficClass, Context** context);
/// Ends the context and everything still open in it.
void finalise(Context* context);

/// Those of the last `initialise`.
[[nodiscard]] std::size_t deviceCount();
Status deviceAt(int index, const Device** out);

/// Makes one device of several, whose connections use the NICs of all of them. Its number is behind
/// those there are. Refused where one has no NIC or is itself made of several.
Status makeVirtualDevice(std::span<const int> members, int* out);

/// Fills the 128 bytes of `handle`, which NCCL takes to the peer.
Status listen(Context* context, int device, void* handle, Listener** out);
/// Called again with the same handle (in the same place) until `out` is not null. `trafficClass`:
/// as in `initialise`; without a context.
Status connect(Context* context, int device, const void* handle, int trafficClass,
               SendConnection** out);
/// Called again until `out` is not null.
Status accept(Listener* listener, ReceiveConnection** out);

void close(Listener* listener);
/// What was sent and taken by the kernel still goes out; the peer is not waited for.
void close(Connection* connection);

/// Device memory is claimed (HOCCL_NET_STAGING=1).
[[nodiscard]] bool claimsDeviceMemory();
/// What regMr and deregMr do. Device memory: nothing is pinned, and nothing waited for in the
/// first. Host memory: pinned for the NICs of the connection, if it has any; else `out` is null.
Status registerDeviceMemory(void* data, std::size_t bytes, Memory** out);
Status registerHostMemory(const Connection* connection, void* data, std::size_t bytes,
                          Memory** out);
/// Device memory that NICs reach by themselves (gpu_direct.h); `fd` -1: not a DMA-BUF.
Status registerDirect(Connection* connection, void* data, std::size_t bytes, int fd,
                      std::uint64_t offset, Memory** out);
void deregister(Memory* memory);

/// Listeners and connections that are open, and connections being made.
[[nodiscard]] std::size_t openCount();

}  // namespace hoccl::net_plugin
