#pragma once

#include <memory>

#include "common/base/config.h"
#include "common/net/tcp/bundle.h"
#include "common/net/tcp/socket_address.h"
#include "common/net/transport.h"
#include "common/net/verbs/nic.h"
#include "common/net/verbs/verbs_library.h"
#include "common/net/verbs/verbs_settings.h"

namespace hoccl {

/// Peers that an RDMA NIC reaches. Set-up and what is said about failures go over TCP, at `local`.
Status makeVerbsTransport(const PeerId& self, const StagingGeometry& geometry,
                          const VerbsLibrary& library, const VerbsSettings& settings,
                          const SocketAddress& local, const BundleOptions& options,
                          std::unique_ptr<Transport>* out);

/// The same with libibverbs and as the environment has it (verbs_settings.h; for the sockets
/// interfaces.h). An error says in one line why no NIC can be used.
Status makeVerbsTransport(const PeerId& self, const StagingGeometry& geometry, const Config& config,
                          std::unique_ptr<Transport>* out);

}  // namespace hoccl
