#pragma once

// What NCCL's own socket transport does for a small message, to measure beside the plugin.

#include <cstddef>

#include "test/conformance/processes.h"

namespace conformance {

/// Seconds that a message of `bytes` takes one way, as half a ping-pong's time, over loopback
/// sockets used as NCCL 2.28.9's net_socket.cc does: a control socket for each direction, on which
/// up to 128 bytes (NCCL_SOCKET_INLINE) follow their size. The sender writes both at once; the
/// receiver reads the size, then the bytes. `bytes` is 128 at most.
double ncclSocketsPingPong(const Side& side, std::size_t bytes, std::size_t count);

}  // namespace conformance
