#pragma once

#include <memory>

#include "common/net/transport.h"

namespace hoccl {

/// Peers on the same host. Both sides map one memfd that holds messages, slot flags and slots, so the
/// sender's copy engine writes where the receiver's reads and no CPU touches a byte. Set-up goes over
/// an abstract unix socket, on which the peer's user is checked and which afterwards tells its death.
Status makeShmTransport(const PeerId& self, const StagingGeometry& geometry,
                        std::unique_ptr<Transport>* out);

}  // namespace hoccl
