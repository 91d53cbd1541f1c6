#pragma once

#include <source_location>
#include <string>
#include <utility>

namespace hoccl {

/// What kind of failure a Status carries; translated to ncclResult_t or an exit code only at the edge.
enum class Code {
  Ok,
  InvalidArgument,  ///< the caller passed something that can never work
  InvalidConfig,    ///< a variable, file or message with a bad value
  Unsupported,      ///< right in principle, not with this hardware, driver or peer
  System,           ///< a system call failed
  Cuda,             ///< a driver call failed
  Remote,           ///< a peer failed, died or sent something wrong
  Timeout,          ///< a bounded wait ran out
  Aborted,          ///< ended by ncclCommAbort or shutdown
  Internal,         ///< a bug in HOCCL
};

const char* codeName(Code code);

/// Success, or an error with a message for a person: what, where, why, what to change.
/// Copyable, tested like a bool (true is success). Place of origin is kept for the log.
class [[nodiscard]] Status {
 public:
  Status() = default;
  static Status error(Code code, std::string message,
                      std::source_location where = std::source_location::current()) {
    Status status;
    status.code_ = code;
    status.message_ = std::move(message);
    status.file_ = where.file_name();
    status.line_ = where.line();
    return status;
  }
  /// `call` failed with the given errno value: "<what>: <strerror> (errno N)".
  static Status fromErrno(const std::string& what, int error,
                          std::source_location where = std::source_location::current());

  explicit operator bool() const { return code_ == Code::Ok; }
  [[nodiscard]] bool ok() const { return code_ == Code::Ok; }
  [[nodiscard]] Code code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }
  /// The message with "file:line" of where the error was made, for the debug log.
  [[nodiscard]] std::string withOrigin() const;
  /// The same error with `prefix` in front of its message.
  [[nodiscard]] Status inContext(const std::string& prefix) const;

 private:
  Code code_ = Code::Ok;
  std::string message_;
  const char* file_ = "";
  unsigned line_ = 0;
};

}  // namespace hoccl
