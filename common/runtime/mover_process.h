#pragma once

namespace hoccl {

/// The mover's whole life: takes the application's hello from `socket`, opens the device, moves data
/// until the application ends. Returns the process's exit code.
int runMover(int socket);

}  // namespace hoccl
