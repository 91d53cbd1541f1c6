#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/status.h"

namespace hoccl {

/// The one table of every HOCCL_* variable. Columns: field, kind, variable, default, lowest, highest
/// (numbers; 0, 0 for text), choices ("a|b", empty for none), part of the policy all ranks must share
/// (1 or 0), help. Kinds: Bytes (suffixes KiB, MiB, GiB and K, M, G), Count, Micros, Millis, Flag
/// (0/1), Text, Choice.
#define HOCCL_CONFIG_TABLE(X)                                                                       \
  X(steer, Flag, "HOCCL_STEER", "1", 0, 1, "", 1,                                                   \
    "0 leaves every operation with NCCL; the job is plain NCCL")                                    \
  X(minBytes, Bytes, "HOCCL_MIN_BYTES", "64KiB", 64 << 10, 1ull << 40, "", 1,                       \
    "smallest send, receive or block of a collective that is steered; smaller ones stay with NCCL")                        \
  X(strict, Flag, "HOCCL_STRICT", "0", 0, 1, "", 1,                                                 \
    "1 turns a steerable operation that would go to NCCL into an error that says why")              \
  X(stats, Flag, "HOCCL_STATS", "0", 0, 1, "", 0,                                                   \
    "1 prints operations and bytes by communicator and path when the process ends")                 \
  X(agreeTimeoutMs, Millis, "HOCCL_AGREE_TIMEOUT_MS", "10000", 10, 600000, "", 0,                   \
    "how long the root waits for every rank before the communicator is left to plain NCCL")         \
  X(timeoutMs, Millis, "HOCCL_TIMEOUT_MS", "5000", 100, 600000, "", 0,                              \
    "bound on set-up, tear-down, and on finding dead processes")                                    \
  X(flagPool, Count, "HOCCL_FLAG_POOL", "4096", 1, 65536, "", 0,                                    \
    "launches that can be pending at once, a group counting once for each of its streams; a further "  \
    "one waits for a free slot")                    \
  X(slots, Count, "HOCCL_SLOTS", "8", 1, 64, "", 1,                                                 \
    "staging slots per pair of ranks and direction")                                                \
  X(slotBytes, Bytes, "HOCCL_SLOT_BYTES", "8MiB", 128 << 10, 1ull << 30, "", 1,                      \
    "size of a staging slot, and so of the largest chunk")                                          \
  X(laneDepth, Count, "HOCCL_LANE_DEPTH", "4", 1, 64, "", 0,                                        \
    "copies in flight per direction of the copy engines")                                                        \
  X(doorbell, Flag, "HOCCL_DOORBELL", "1", 0, 1, "", 0,                                              \
    "0: the mover does not make an idle GPU look at once at what its streams wait for")            \
  X(spinUs, Micros, "HOCCL_SPIN_US", "200", 0, 1000000, "", 0,                                       \
    "how long the mover spins without progress before it begins to sleep between polls")            \
  X(pollMaxUs, Micros, "HOCCL_POLL_MAX_US", "100", 1, 1000000, "", 0,                               \
    "longest sleep between two polls while an operation is pending")                                \
  X(importCache, Count, "HOCCL_IMPORT_CACHE", "1024", 1, 1048576, "", 0,                            \
    "imported allocations the mover keeps mapped")                                                  \
  X(importIdleMs, Millis, "HOCCL_IMPORT_IDLE_MS", "60000", 0, 86400000, "", 0,                      \
    "the mover unmaps an application's allocation that no operation has used for so long, up to twice "  \
    "that; 0 keeps it until it is freed")                                                           \
  X(netInlineBytes, Bytes, "HOCCL_NET_INLINE_BYTES", "0", 0, 1ull << 40, "", 0,                  \
    "net plugin: larger messages go over data sockets with threads of their own, those up to here over the "  \
    "connection's first socket, on NCCL's thread")                                                   \
  X(netStaging, Flag, "HOCCL_NET_STAGING", "0", 0, 1, "", 1,                                        \
    "net plugin: 1 takes device memory, too, copied to and from staging memory by a mover process; needs "  \
    "NCCL_TUNER_PLUGIN or NCCL_PROTO=^LL128, and NCCL_NET_GDR_LEVEL=SYS for NCCL to offer it")       \
  X(netStagingBytes, Bytes, "HOCCL_NET_STAGING_BYTES", "128MiB", 2 << 20, 1ull << 36, "", 0,        \
    "pinned staging memory of the net plugin, of a process and GPU, half of it for each direction")  \
  X(ctas, Count, "HOCCL_CTAS", "0", 0, 64, "", 1,                                                    \
    "CTAs (SMs), at most, of a collective that stays on NCCL's kernels; needs NCCL_TUNER_PLUGIN; 0 leaves "  \
    "it to NCCL")                                                                                   \
  X(appCopies, Choice, "HOCCL_APP_COPIES", "auto", 0, 0, "auto|unexportable|always|never", 0,       \
    "which buffers the application's own streams copy to and from staging memory: those the mover "  \
    "cannot map (unexportable), all, none (an error), or all where frees cannot be seen, else "      \
    "unexportable ones (auto)")                                                                     \
  X(appCopyBytes, Bytes, "HOCCL_APP_COPY_BYTES", "4GiB", 1 << 20, 1ull << 44, "", 0,                 \
    "pinned host memory for such copies, of a process and GPU; a larger operation or group may take "  \
    "more, further ones wait for room")                                                             \
  X(spans, Choice, "HOCCL_SPANS", "on", 0, 0, "off|on", 0,                                         \
    "whether the mover maps memory of cuMemCreate (PyTorch's expandable_segments); off: "             \
    "application-side copies, as HOCCL_APP_COPIES says")                                             \
  X(ownBlock, Choice, "HOCCL_OWN_BLOCK", "engine", 0, 0, "engine|kernel", 0,                         \
    "how a rank's own block is copied, in collectives out of place and in groups with a send and receive "  \
    "of the rank to itself: by copy engines, over another GPU or the host (engine), or within the GPU, "  \
    "which is fast, but a kernel (kernel)")                                                         \
  X(wait, Choice, "HOCCL_WAIT", "auto", 0, 0, "auto|memop|kernel|parked", 0,                        \
    "how the application's streams wait: by memory operations, by a kernel of one warp, by memory "  \
    "operations behind a small copy, or memop while the process has channels to spare, else kernel")    \
  X(transport, Choice, "HOCCL_TRANSPORT", "auto", 0, 0, "auto|shm|tcp|verbs", 1,                    \
    "how movers reach each other: shm on one host, between hosts verbs where both have RDMA NICs, else "  \
    "tcp (auto), shm alone, so that nothing is steered between hosts, tcp or verbs even on one host; "   \
    "and what the net plugin uses: verbs where there is an RDMA NIC, else tcp (auto), verbs, or tcp")                                    \
  X(p2p, Count, "HOCCL_P2P", "1", 0, 3, "", 1,                                                      \
    "direct copies between GPUs of a node: 1 pushed over NVLink, and pulled by the receiver over "     \
    "PCIe as far as NCCL_P2P_LEVEL says or NCCL would (PXB); 2 pushed over PCIe as well, where "       \
    "nothing promises that a flag comes after the bytes; 3 pulled everywhere; 0 none, as with "        \
    "NCCL_P2P_DISABLE=1 where this is not set; what cannot go directly goes through pinned memory")    \
  X(socketIfname, Text, "HOCCL_SOCKET_IFNAME", "", 0, 0, "", 0,                                     \
    "network interfaces for tcp, by the rules of NCCL_SOCKET_IFNAME (prefixes; = exact, ^ all but); "  \
    "default: NCCL_SOCKET_IFNAME")                                                                  \
  X(socketThreads, Count, "HOCCL_SOCKET_NTHREADS", "0", 0, 16, "", 0,                               \
    "threads of a tcp connection to a peer; 0: NCCL_SOCKET_NTHREADS, else the default")             \
  X(socketsPerThread, Count, "HOCCL_NSOCKS_PERTHREAD", "0", 0, 16, "", 0,                           \
    "sockets of each such thread; 0: NCCL_NSOCKS_PERTHREAD, else the default")                      \
  X(qpsPerPeer, Count, "HOCCL_QPS_PER_PEER", "0", 0, 16, "", 0,                                     \
    "verbs: queue pairs per NIC and peer; 0: NCCL_IB_QPS_PER_CONNECTION, else 4")                    \
  X(ibHca, Text, "HOCCL_IB_HCA", "", 0, 0, "", 0,                                                   \
    "verbs: devices, by the rules of NCCL_IB_HCA (prefixes; = exact, ^ all but, name:port); default: "  \
    "NCCL_IB_HCA, else all")                                                                        \
  X(ibGidIndex, Text, "HOCCL_IB_GID_INDEX", "", 0, 0, "", 0,                                        \
    "verbs: index of the GID to send from, or one for each device (mlx5_0:3,mlx5_1:1); default: "     \
    "NCCL_IB_GID_INDEX, else RoCE v2 with an IPv4 address first, link-local last")                   \
  X(ibTc, Text, "HOCCL_IB_TC", "", 0, 0, "", 0,                                                     \
    "verbs: traffic class, 0 to 255; default: NCCL_IB_TC, else 0")                                   \
  X(ibSl, Text, "HOCCL_IB_SL", "", 0, 0, "", 0,                                                     \
    "verbs: service level, 0 to 15; default: NCCL_IB_SL, else 0")                                    \
  X(ibPkey, Text, "HOCCL_IB_PKEY", "", 0, 0, "", 0,                                                 \
    "verbs: index of the partition key; default: NCCL_IB_PKEY, else 0")                              \
  X(ibTimeout, Text, "HOCCL_IB_TIMEOUT", "", 0, 0, "", 0,                                           \
    "verbs: a packet goes again after 4.096 us * 2^this, 1 to 31; default: NCCL_IB_TIMEOUT, else 15")  \
  X(ibRetryCnt, Text, "HOCCL_IB_RETRY_CNT", "", 0, 0, "", 0,                                        \
    "verbs: how often it does before the queue pair fails, 0 to 7; default: NCCL_IB_RETRY_CNT, else 7")  \
  X(ibAdaptiveRouting, Text, "HOCCL_IB_ADAPTIVE_ROUTING", "", 0, 0, "", 0,                          \
    "verbs: 1 for networks with adaptive routing, 0 for others, 2: on InfiniBand; default: "          \
    "NCCL_IB_ADAPTIVE_ROUTING, else 2")                                                              \
  X(ibRelaxedOrdering, Text, "HOCCL_IB_PCI_RELAXED_ORDERING", "", 0, 0, "", 0,                      \
    "verbs: PCIe relaxed ordering of what the NIC writes: 0 off, 1 on, 2 where the library knows it; "  \
    "default: NCCL_IB_PCI_RELAXED_ORDERING, else 2")                                                 \
  X(mover, Text, "HOCCL_MOVER_PATH", "", 0, 0, "", 0,                                               \
    "the hoccl-mover executable; default: beside the library, ../bin or ../libexec")                \
  X(coreLib, Text, "HOCCL_CORE_LIB", "", 0, 0, "", 0,                                               \
    "libhoccl.so the preloaded shim loads; default: beside the shim")                               \
  X(ncclLib, Text, "HOCCL_NCCL_LIB", "", 0, 0, "", 0,                                               \
    "libnccl.so.2 that hoccl bench and hoccl doctor use; default: the loader's search path")        \
  X(logLevel, Choice, "HOCCL_LOG", "warn", 0, 0, "error|warn|info|debug|off", 0,                    \
    "what HOCCL writes to its log")                                                                 \
  X(logFile, Text, "HOCCL_LOG_FILE", "", 0, 0, "", 0,                                               \
    "file the log goes to, %h and %p replaced by host and process id; default: standard error")     \
  X(emulate, Choice, "HOCCL_EMULATE", "auto", 0, 0, "auto|never|always", 0,                         \
    "hoccl bench: use the emulated driver where there is no GPU (auto), never, or always")

enum class ConfigKind { Bytes, Count, Micros, Millis, Flag, Text, Choice };

template <ConfigKind>
struct ConfigType {
  using type = std::uint64_t;
};
template <>
struct ConfigType<ConfigKind::Text> {
  using type = std::string;
};
template <>
struct ConfigType<ConfigKind::Choice> {
  using type = std::string;
};

/// Every variable's value in force, one field a row of the table.
struct Config {
#define X(field, kind, ...) ConfigType<ConfigKind::kind>::type field{};
  HOCCL_CONFIG_TABLE(X)
#undef X

  /// The table's defaults.
  static Config defaults();
  /// Defaults overlaid with the environment. On a bad value or an unknown HOCCL_* variable: an error
  /// that names each offender (variable, value, what is allowed, the nearest known name); `out` is
  /// then untouched.
  static Status fromEnvironment(Config* out);
  /// The same with one line an offender, for `hoccl config`; empty when the environment is right.
  static std::vector<std::string> problemsOfEnvironment(Config* out);
  /// Sets one variable by its name from text; the error names variable, value and what is allowed.
  Status set(std::string_view variable, std::string_view value);
  /// The value in force as text, in the form `set` takes.
  [[nodiscard]] std::string get(std::string_view variable) const;
  /// FNV-1a digest of the rows marked as policy: equal on all ranks, or the job is plain NCCL.
  [[nodiscard]] std::uint64_t policyDigest() const;
  /// "HOCCL_MIN_BYTES=65536 HOCCL_SLOTS=8 …" of the policy rows, for messages about differing ranks.
  [[nodiscard]] std::string policyText() const;
};

struct ConfigRow {
  ConfigKind kind;
  const char* variable;
  const char* defaultText;
  std::uint64_t lowest, highest;
  const char* choices;
  bool policy;
  const char* help;
};
/// The table for `hoccl config` and its tests.
const std::vector<ConfigRow>& configRows();
/// What a row allows, for a person: "64KiB to 1TiB", "error|warn|info|debug|off", "0 or 1".
std::string allowedText(const ConfigRow& row);

/// "64KiB", "1.5MiB", "2G", "4096" to bytes (all suffixes are powers of 1024).
Status parseBytes(std::string_view text, std::uint64_t* out);
/// 65536 to "64KiB"; exact, the largest unit that divides.
std::string formatBytes(std::uint64_t bytes);

}  // namespace hoccl
