#pragma once

#include <sys/types.h>

#include <string>

#include "common/base/config.h"
#include "common/base/fd.h"
#include "common/base/status.h"

namespace hoccl {

/// HOCCL_MOVER_PATH, else the hoccl-mover beside this library, in ../bin or ../libexec. Error:
/// where it was looked for.
Status findMover(const Config& config, std::string* out);

/// Starts it in a session of its own, with `socket` as its descriptor kMoverSocketFd and no other,
/// every signal as by default, and without LD_PRELOAD and CUDA_DEVICE_MAX_CONNECTIONS. `mode` is
/// its argument.
Status spawnMover(const std::string& executable, const char* mode, int socket, pid_t* pid,
                  UniqueFd* pidfd);

}  // namespace hoccl
