#include "common/base/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

namespace hoccl {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Status mapWhole(int fd, std::size_t bytes, void** out) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return Status::fromErrno(fmt::format("cannot map {} bytes of shared memory", bytes), errno);
  }
  *out = data;
  return {};
}

}  // namespace

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

SharedMemory::~SharedMemory() { reset(); }

void SharedMemory::reset() {
  if (data_ != nullptr) ::munmap(data_, size_);
  data_ = nullptr;
  size_ = 0;
  fd_.reset();
}

Status SharedMemory::create(const char* name, std::size_t bytes, SharedMemory* out) {
  if (bytes == 0) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("shared memory '{}' of 0 bytes was asked for", name));
  }
  // Beyond this limit the kernel would not refuse, but kill.
  if (rlimit limit{}; ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
    return Status::error(Code::System,
                         fmt::format("shared memory '{}' of {} bytes is larger than the limit on file "
                                     "sizes, {} bytes (ulimit -f): raise it",
                                     name, bytes, limit.rlim_cur));
  }
  SharedMemory made;
  made.fd_.reset(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made.fd_) {
    return Status::fromErrno(fmt::format("cannot create shared memory '{}' (memfd_create)", name),
                             errno);
  }
  if (::ftruncate(made.fd_.get(), static_cast<off_t>(bytes)) != 0) {
    return Status::fromErrno(fmt::format("cannot size shared memory '{}' to {} bytes", name, bytes),
                             errno);
  }
  if (::fcntl(made.fd_.get(), F_ADD_SEALS, kSizeSeals) != 0) {
    return Status::fromErrno(fmt::format("cannot seal the size of shared memory '{}'", name),
                             errno);
  }
  if (Status mapped = mapWhole(made.fd_.get(), bytes, &made.data_); !mapped) {
    return mapped.inContext(fmt::format("shared memory '{}'", name));
  }
  made.size_ = bytes;
  *out = std::move(made);
  return {};
}

Status SharedMemory::map(UniqueFd fd, std::size_t expectedBytes, SharedMemory* out) {
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) {
    return Status::fromErrno("cannot inspect received shared memory (fstat)", errno);
  }
  if (expectedBytes == 0 || info.st_size < 0 ||
      static_cast<std::uint64_t>(info.st_size) != expectedBytes) {
    return Status::error(
        Code::InvalidArgument,
        fmt::format("received shared memory has {} bytes where {} were expected; both processes "
                    "must run the same HOCCL version and settings",
                    static_cast<std::int64_t>(info.st_size), expectedBytes));
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return Status::error(Code::InvalidArgument,
                         "received descriptor is not shared memory of a sealed size");
  }
  SharedMemory made;
  if (Status mapped = mapWhole(fd.get(), expectedBytes, &made.data_); !mapped) return mapped;
  made.fd_ = std::move(fd);
  made.size_ = expectedBytes;
  *out = std::move(made);
  return {};
}

}  // namespace hoccl
