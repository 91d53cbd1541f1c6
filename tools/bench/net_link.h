#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/base/config.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/net/tcp/bundle.h"
#include "common/net/tcp/socket_address.h"

namespace hoccl::bench {

/// What both processes know, from before they parted.
struct NetPair {
  int side = 0;   ///< 0 or 1
  int talk = -1;  ///< a socket to the other process, for the set-up
  Config config;
  BundleOptions options;             ///< threads and sockets
  SocketAddress local;               ///< where the sockets run
  std::uint64_t timeoutMs = 30'000;  ///< for any wait
};

/// One way between two processes, measured from both ends: the two sides make the same calls with
/// the same arguments. Side 0 begins, and learns how long it took until side 1 had everything.
class NetLink {
 public:
  explicit NetLink(const NetPair& pair) : pair_(pair) {}
  virtual ~NetLink() = default;
  /// 8 bytes to and fro, `iterations` times.
  Status pingPong(int iterations, double* seconds);
  /// `iterations` payloads of `bytes` from side 0 to 1, as many under way as the link takes.
  virtual Status stream(std::uint64_t bytes, int iterations, double* seconds) = 0;
  /// Messages of 8 bytes (shm: of a cache line) one behind the other.
  virtual Status burst(int messages, double* seconds);

 protected:
  /// One message to the other side, and one from there.
  virtual Status say() = 0;
  virtual Status listen() = 0;

  NetPair pair_;
};

/// Plain sockets driven by as many threads with as many sockets, without anything of HOCCL's.
Status makeBareLink(const NetPair& pair, std::uint64_t maxBytes, std::unique_ptr<NetLink>* out);
/// The tcp transport's bundle.
Status makeTcpLink(const NetPair& pair, std::uint64_t maxBytes, std::unique_ptr<NetLink>* out);
/// The shm transport; the slots are filled and emptied by the CPU, where movers have copy engines.
Status makeShmLink(const NetPair& pair, std::uint64_t maxBytes, std::unique_ptr<NetLink>* out);
/// The verbs transport, with HOCCL_QPS_PER_PEER queue pairs on the NICs that HOCCL_IB_HCA chooses:
/// the NIC moves what lies in the slots, and nobody touches it.
Status makeVerbsLink(const NetPair& pair, std::uint64_t maxBytes, std::unique_ptr<NetLink>* out);

// --- For the implementations -------------------------------------------------------------------

/// Exactly so many bytes to or from the other process.
Status tell(const NetPair& pair, const void* data, std::size_t bytes);
Status hear(const NetPair& pair, void* data, std::size_t bytes);

/// Memory of that size, touched; the contents are checked by stream() of the two links that carry
/// bytes of their own accord.
class NetBuffer {
 public:
  static Status create(std::uint64_t bytes, NetBuffer* out);
  NetBuffer() = default;
  NetBuffer(NetBuffer&& other) noexcept { *this = std::move(other); }
  NetBuffer& operator=(NetBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~NetBuffer();
  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

/// Spins, leaves the CPU to others now and then, and ends with an error after the time-out.
class NetWait {
 public:
  NetWait(const NetPair& pair, const char* what);
  /// Call after each look that found nothing.
  Status again();

 private:
  const char* what_;
  std::uint64_t endNs_;
  unsigned rounds_ = 0;
};

}  // namespace hoccl::bench
