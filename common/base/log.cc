#include "common/base/log.h"

#include <fcntl.h>
// The only file that sees spdlog, so that nothing of it leaks into the headers of a plugin.
#include <spdlog/logger.h>
#include <spdlog/sinks/sink.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "common/base/host_identity.h"

namespace hoccl {
namespace {

spdlog::level::level_enum toSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::Error:
      return spdlog::level::err;
    case LogLevel::Warn:
      return spdlog::level::warn;
    case LogLevel::Info:
      return spdlog::level::info;
    case LogLevel::Debug:
      return spdlog::level::debug;
    case LogLevel::Off:
      return spdlog::level::off;
  }
  return spdlog::level::warn;
}

const char* levelWord(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::err:
      return "error";
    case spdlog::level::warn:
      return "warn";
    case spdlog::level::info:
      return "info";
    default:
      return "debug";
  }
}

std::optional<LogLevel> levelFromText(const char* text) {
  if (text == nullptr) return std::nullopt;
  if (std::strcmp(text, "error") == 0) return LogLevel::Error;
  if (std::strcmp(text, "warn") == 0) return LogLevel::Warn;
  if (std::strcmp(text, "info") == 0) return LogLevel::Info;
  if (std::strcmp(text, "debug") == 0) return LogLevel::Debug;
  if (std::strcmp(text, "off") == 0) return LogLevel::Off;
  return std::nullopt;
}

// %h and %p of HOCCL_LOG_FILE.
std::string expandFileName(std::string_view pattern, std::string_view host) {
  std::string name;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] == '%' && i + 1 < pattern.size() && pattern[i + 1] == 'h') {
      name += host;
      ++i;
    } else if (pattern[i] == '%' && i + 1 < pattern.size() && pattern[i + 1] == 'p') {
      name += std::to_string(::getpid());
      ++i;
    } else {
      name += pattern[i];
    }
  }
  return name;
}

// The role shown in each line. Read without a lock by every thread; a role that was ever set lives
// on, since a reader may still hold it (roles are few and short).
std::atomic<const std::string*> currentRole{nullptr};

std::atomic<LogHandler> currentHandler{nullptr};

LogLevel fromSpdlog(spdlog::level::level_enum level) {
  switch (level) {
    case spdlog::level::err:
      return LogLevel::Error;
    case spdlog::level::warn:
      return LogLevel::Warn;
    case spdlog::level::info:
      return LogLevel::Info;
    default:
      return LogLevel::Debug;
  }
}

// Writes each line with one write(2) and takes no lock: a lock could be left held in the child of a
// fork, which then hangs at its first line; and a descriptor opened for appending keeps lines
// whole.
class LineSink final : public spdlog::sinks::sink {
 public:
  LineSink(int fd, std::string host) : fd_(fd), host_(std::move(host)) {}

  void log(const spdlog::details::log_msg& message) override {
    if (const LogHandler handler = currentHandler.load(std::memory_order_acquire)) {
      handler(fromSpdlog(message.level),
              std::string_view(message.payload.data(), message.payload.size()));
      return;
    }
    const std::string* role = currentRole.load(std::memory_order_acquire);
    fmt::memory_buffer line;
    fmt::format_to(std::back_inserter(line), "hoccl [{}] {}:{} {}{}", levelWord(message.level),
                   host_, ::getpid(), role ? *role : std::string(), role ? " " : "");
    for (const char c : std::string_view(message.payload.data(), message.payload.size())) {
      line.push_back(c == '\n' ? ' ' : c);  // one message, one line
    }
    line.push_back('\n');
    const int savedErrno = errno;
    const char* at = line.data();
    std::size_t left = line.size();
    while (left > 0) {
      const ssize_t wrote = ::write(fd_, at, left);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) break;  // nowhere left to complain
      at += wrote;
      left -= static_cast<std::size_t>(wrote);
    }
    errno = savedErrno;
  }
  void flush() override {}
  void set_pattern(const std::string&) override {}
  void set_formatter(std::unique_ptr<spdlog::formatter>) override {}

 private:
  const int fd_;
  const std::string host_;
};

// Made at the first line and never destroyed: threads may log while the process ends.
spdlog::logger& logger() {
  static spdlog::logger* const instance = [] {
    const std::string host = shortHostName();
    // Where the process has no standard error, the descriptor may become anything.
    int fd = ::fcntl(STDERR_FILENO, F_GETFD) < 0 ? -1 : STDERR_FILENO;
    std::string problem;
    const char* pattern = std::getenv("HOCCL_LOG_FILE");
    if (pattern != nullptr && *pattern != '\0') {
      const std::string name = expandFileName(pattern, host);
      // Not waiting for the reader of a FIFO, which is no file to log to.
      const int opened =
          ::open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0644);
      if (opened >= 0) {
        fd = opened;
      } else {
        problem = fmt::format(
            "cannot open the log file {} (HOCCL_LOG_FILE): {}; logging to "
            "standard error",
            name, std::strerror(errno));
      }
    }
    auto* made = new spdlog::logger("hoccl", std::make_shared<LineSink>(fd, host));
    made->set_level(toSpdlog(levelFromText(std::getenv("HOCCL_LOG")).value_or(LogLevel::Warn)));
    if (!problem.empty()) made->warn("{}", problem);
    return made;
  }();
  return *instance;
}

}  // namespace

void logLine(LogLevel level, std::string_view text) {
  if (level == LogLevel::Off) return;
  logger().log(toSpdlog(level), spdlog::string_view_t(text.data(), text.size()));
}

bool logEnabled(LogLevel level) {
  return level != LogLevel::Off && logger().should_log(toSpdlog(level));
}

void setLogLevel(LogLevel level) { logger().set_level(toSpdlog(level)); }

void setLogHandler(LogHandler handler) {
  currentHandler.store(handler, std::memory_order_release);
  const LogLevel unset = handler != nullptr ? LogLevel::Info : LogLevel::Warn;
  setLogLevel(levelFromText(std::getenv("HOCCL_LOG")).value_or(unset));
}

void setLogRole(std::string_view role) {
  static std::mutex mutex;
  static auto* const roles = new std::list<std::string>;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const std::string& known : *roles) {
    if (known == role) {
      currentRole.store(&known, std::memory_order_release);
      return;
    }
  }
  currentRole.store(role.empty() ? nullptr : &roles->emplace_back(role), std::memory_order_release);
}

}  // namespace hoccl
