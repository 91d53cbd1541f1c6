#pragma once

#include <string>

namespace hoccl {

/// The kernel's id of this boot; empty where it cannot be read.
std::string bootId();
/// Boot id and network namespace: equal exactly when two processes can reach each other's abstract
/// unix sockets. Where /proc does not tell, a value that equals no other process's.
std::string hostKey();
/// What NCCL takes for one node: NCCL_HOSTID if set, else host name and boot id.
std::string nodeKey();
/// The host name up to its first dot, for messages.
std::string shortHostName();

}  // namespace hoccl
