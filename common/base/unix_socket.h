#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "common/base/fd.h"
#include "common/base/status.h"

/// AF_UNIX sockets that keep message boundaries (SOCK_SEQPACKET) and carry descriptors. All are
/// close-on-exec and non-blocking. A name is an abstract one (no file), visible in its network
/// namespace only, so the peer's user is checked on both ends of every connection.
namespace hoccl {

/// Descriptors one message can carry here.
inline constexpr std::size_t kMaxMessageFds = 32;

/// A connected pair, for a process and the one it starts.
Status makeSocketPair(UniqueFd* one, UniqueFd* other);
/// Listens under the abstract name (without the leading zero byte; at most 107 bytes).
Status listenUnix(std::string_view name, UniqueFd* out);
/// Connects to the abstract name; the wait is for a full backlog only. Nobody listening:
/// Code::Remote at once. A listener of another user is refused.
Status connectUnix(std::string_view name, std::uint64_t timeoutMs, UniqueFd* out);
/// Takes one pending connection; success with `out` empty when there is none. A peer of another
/// user is disconnected and reported as an error; the listener stays usable.
Status acceptUnix(int listener, UniqueFd* out);
/// The same, waiting for a connection for at most `timeoutMs`.
Status acceptUnixWithin(int listener, std::uint64_t timeoutMs, UniqueFd* out);

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
/// Who is at the other end, as the kernel recorded it when the connection was made (SO_PEERCRED).
Status peerCredentials(int socket, PeerCredentials* out);
/// An error that names both users unless the peer runs as this process's effective user.
Status checkPeerUser(int socket);

/// Sends `bytes` (> 0) of `data` and the descriptors as one message. `sent` is false, with success,
/// when the socket's buffer is full. A peer that is gone: Code::Remote.
Status sendWithFds(int socket, const void* data, std::size_t bytes, std::span<const int> fds,
                   bool* sent);
/// The same, waiting for room for at most `timeoutMs`.
Status sendWithFdsWithin(int socket, const void* data, std::size_t bytes, std::span<const int> fds,
                         std::uint64_t timeoutMs);

enum class ReceiveState { Message, WouldBlock, Closed };

/// Receives one message into `buffer`; `bytes` is its length, `fds` its descriptors
/// (close-on-exec). A message longer than the buffer, or descriptors that did not fit (this process
/// is out of descriptors), is an error, and whatever arrived is closed; the state is Message then,
/// since the socket stands. The peer's orderly end is a state.
Status recvWithFds(int socket, void* buffer, std::size_t capacity, std::size_t* bytes,
                   std::vector<UniqueFd>* fds, ReceiveState* state);
/// The same, waiting for at most `timeoutMs`; the peer's end is an error here (Code::Remote).
Status recvWithFdsWithin(int socket, void* buffer, std::size_t capacity, std::size_t* bytes,
                         std::vector<UniqueFd>* fds, std::uint64_t timeoutMs);

}  // namespace hoccl
