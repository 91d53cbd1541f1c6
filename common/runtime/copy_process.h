#pragma once

namespace hoccl {

/// The life of a mover that only copies, for the net plugin (copy_segment.h): takes the
/// application's hello from `socket`, opens the device, copies until the application or its socket
/// ends. Returns the process's exit code.
int runCopyMover(int socket);

}  // namespace hoccl
