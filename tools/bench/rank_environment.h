#pragma once

#include <string>
#include <vector>

namespace hoccl::bench {

/// What the environment of one rank process is made of.
struct RankEnvironment {
  std::string preload;             ///< the steering library; empty: the rank runs plain NCCL
  std::string hostId;              ///< NCCL_HOSTID; empty: left as the user has it
  std::string libraryPath;         ///< put in front of LD_LIBRARY_PATH; empty: nothing
  std::vector<std::string> extra;  ///< NAME=value, replacing what is there; NAME alone: taken out

  /// `base` (NAME=value each) changed accordingly. Without `preload` every entry of LD_PRELOAD and
  /// every NCCL plugin variable that names HOCCL is taken out, so that the rank really is plain
  /// NCCL.
  [[nodiscard]] std::vector<std::string> applyTo(const std::vector<std::string>& base) const;
};

/// This process's environment.
std::vector<std::string> ownEnvironment();

/// The transports NCCL says it uses ("via NET/Socket", "via P2P/CUMEM", "via SHM/direct") in the
/// text it writes with NCCL_DEBUG=INFO; several joined by "+", empty when it says none.
std::string ncclTransportIn(const std::string& log);
/// Whether it says there that it has set its copy engines up, which it does when the first
/// collective takes them ("Init CE, rank 0 …", src/ce_coll.cc).
bool ncclCopyEnginesIn(const std::string& log);

}  // namespace hoccl::bench
