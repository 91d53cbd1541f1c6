#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "common/base/config.h"
#include "common/net/tcp/bundle.h"
#include "common/net/tcp/bundle_setup.h"
#include "common/net/tcp/socket_address.h"
#include "common/net/transport.h"

namespace hoccl {

/// Peers anywhere a TCP connection reaches. Each side has staging memory of its own; the sockets'
/// threads move filled slots over (bundle.h).
Status makeTcpTransport(const PeerId& self, const StagingGeometry& geometry,
                        const SocketAddress& local, const BundleOptions& options,
                        std::unique_ptr<Transport>* out);

/// The same at the first interface that the environment allows (interfaces.h).
Status makeTcpTransport(const PeerId& self, const StagingGeometry& geometry, const Config& config,
                        std::unique_ptr<Transport>* out);

/// A transport's address as it travels: where it listens, and the nonce that lets a peer in. Text
/// without zero bytes, at most 64 characters.
std::string encodeTcpAddress(const SocketAddress& address, const BundleNonce& nonce);
Status decodeTcpAddress(std::string_view text, SocketAddress* address, BundleNonce* nonce);

}  // namespace hoccl
