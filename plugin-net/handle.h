#pragma once

// What `listen` writes into NCCL's handle, which travels to the peer, and what both ends say when
// they meet.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/base/status.h"
#include "common/net/tcp/bundle_setup.h"
#include "common/net/verbs/path_set.h"
#include "plugin-net/nccl_net_abi.h"

namespace hoccl::net_plugin {

struct ListenerAddress {
  SocketAddress address;
  BundleNonce nonce{};
};

/// Fills the kHandleBytes bytes at `handle`.
void packHandle(const ListenerAddress& address, void* handle);
/// An error that says whose handle it is, if it is not one of this version.
Status unpackHandle(const void* handle, ListenerAddress* out);

/// This process, as `describe` shows it to the peer, and the queue pairs it has (connecting) or
/// both use (accepting); none: all goes over the sockets.
BundleHello makeHello(const PathExtent& extent = {});
PathExtent extentOf(const BundleHello& hello);
/// "node17, process 4711, at 10.0.0.1:4242".
std::string describe(const BundleHello& hello, const std::string& address);
/// Whether the peer speaks this version's protocol.
Status checkHello(const BundleHello& hello);

}  // namespace hoccl::net_plugin
