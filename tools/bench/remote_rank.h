#pragma once

#include <cstdint>
#include <string>

#include "common/base/fd.h"
#include "common/base/status.h"
#include "tools/bench/rank_environment.h"

namespace hoccl::bench {

/// Another host on which `hoccl bench serve` starts ranks. All hosts have the programs at the same
/// paths.
struct RemoteHost {
  std::string address;  ///< "10.0.0.2:4242"; empty: none
  std::string key;      ///< whoever knows it may start programs there
};

/// What `hoccl bench serve` has written to that file. Error: names the file and what is wrong.
Status readRemoteHost(const std::string& file, RemoteHost* out);

/// Starts a rank there, in that host's environment with these changes; `channel` leads to it.
/// Error: names the address.
Status startRemoteRank(const RemoteHost& host, const RankEnvironment& environment,
                       std::uint64_t timeoutMs, UniqueFd* channel);

/// `hoccl bench serve`: writes address and key to the file, which only the user can read, and
/// starts ranks until it is killed. The interface: HOCCL_SOCKET_IFNAME. Returns the exit status.
int serveRanks(const std::string& file);

}  // namespace hoccl::bench
