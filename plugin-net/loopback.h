#pragma once

// A connection's way into device memory that the CPU cannot write: a queue pair on each NIC that is
// connected to itself. A small message, which came over the control socket, is written from here
// into its receive; and a read of a few bytes makes what the NIC has written visible (flush).

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/net/verbs/queue_pair.h"
#include "plugin-net/rail_memory.h"
#include "plugin-net/wire.h"

namespace hoccl::net_plugin {

class Loopback {
 public:
  /// On the first `rails` NICs.
  static Status create(const VerbsGround& ground, std::size_t rails,
                       std::unique_ptr<Loopback>* out);

  /// Copies [data, data + bytes), at most kEagerBytes, to `to`, which lies in `memory`. False: no
  /// room now. `written` grows by 1 when it is there; both stay until then.
  [[nodiscard]] bool write(const RailMemory& memory, void* to, const void* data,
                           std::uint64_t bytes, std::uint32_t* written);
  /// Reads a byte at `from` with every NIC; `read` grows by 1 with each.
  [[nodiscard]] bool flush(const RailMemory& memory, const void* from, std::uint32_t* read);
  [[nodiscard]] std::uint32_t rails() const { return static_cast<std::uint32_t>(ways_.size()); }
  /// Takes completions. An error stays.
  Status progress();
  /// Nothing is read or written any more.
  void stop();

 private:
  static constexpr std::uint32_t kDepth = 16, kLanding = 64;
  struct Way {
    CompletionQueue completions;
    QueuePair pair;  ///< before the queue its completions go to
    MemoryRegion region;
    std::uint32_t out = 0;
  };
  [[nodiscard]] bool post(Way& way, ibv_send_wr& request, std::uint32_t* count);

  std::vector<std::byte> memory_;  ///< kDepth places for small messages, then where reads land
  std::vector<Way> ways_;
  std::array<std::uint32_t*, kDepth> counts_{};  ///< by place; of writes and reads alike
  Status failure_;
};

}  // namespace hoccl::net_plugin
