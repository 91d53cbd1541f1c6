#pragma once

#include <unistd.h>

#include <utility>

namespace hoccl {

/// Owns one file descriptor and closes it; -1 means none.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool valid() const { return fd_ >= 0; }
  explicit operator bool() const { return valid(); }
  /// Closes what it holds and holds `fd` instead.
  void reset(int fd = -1) {
    // Linux releases the descriptor even where close() reports an error; a second close() would hit
    // somebody else's.
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }
  /// Gives the descriptor up without closing it.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

}  // namespace hoccl
