#include "common/base/status.h"

#include <cstring>

namespace hoccl {

const char* codeName(Code code) {
  switch (code) {
    case Code::Ok:
      return "ok";
    case Code::InvalidArgument:
      return "invalid argument";
    case Code::InvalidConfig:
      return "invalid configuration";
    case Code::Unsupported:
      return "unsupported";
    case Code::System:
      return "system error";
    case Code::Cuda:
      return "CUDA driver error";
    case Code::Remote:
      return "peer failure";
    case Code::Timeout:
      return "timeout";
    case Code::Aborted:
      return "aborted";
    case Code::Internal:
      return "internal error";
  }
  return "unknown";
}

Status Status::fromErrno(const std::string& what, int error, std::source_location where) {
  return Status::error(
      Code::System, what + ": " + std::strerror(error) + " (errno " + std::to_string(error) + ")",
      where);
}

std::string Status::withOrigin() const {
  if (ok()) return "ok";
  const char* base = std::strrchr(file_, '/');
  return message_ + " [" + (base ? base + 1 : file_) + ":" + std::to_string(line_) + "]";
}

Status Status::inContext(const std::string& prefix) const {
  if (ok()) return *this;
  Status status = *this;
  status.message_ = prefix + ": " + message_;
  return status;
}

}  // namespace hoccl
