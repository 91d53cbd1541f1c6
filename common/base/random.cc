#include "common/base/random.h"

#include <fcntl.h>
#include <sys/random.h>

#include <cerrno>

#include "common/base/fd.h"

namespace hoccl {
namespace {

// For sandboxes whose filter refuses getrandom().
Status readUrandom(std::uint8_t* out, std::size_t bytes) {
  UniqueFd fd(::open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  if (!fd) return Status::fromErrno("cannot open /dev/urandom", errno);
  while (bytes > 0) {
    const ssize_t got = ::read(fd.get(), out, bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return Status::fromErrno("cannot read /dev/urandom", got < 0 ? errno : EIO);
    out += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return {};
}

}  // namespace

Status randomBytes(void* out, std::size_t bytes) {
  auto* at = static_cast<std::uint8_t*>(out);
  while (bytes > 0) {
    const ssize_t got = ::getrandom(at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return readUrandom(at, bytes);
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return {};
}

Status random64(std::uint64_t* out) { return randomBytes(out, sizeof *out); }

Status random128(std::array<std::uint8_t, 16>* out) {
  return randomBytes(out->data(), out->size());
}

}  // namespace hoccl
