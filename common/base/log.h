#pragma once

#include <fmt/format.h>

#include <string_view>

namespace hoccl {

enum class LogLevel { Error, Warn, Info, Debug, Off };

/// One line to standard error (or the file HOCCL_LOG_FILE names): "hoccl [level] host:pid role text".
/// Never from the launch path or the mover's awake loop, except when an operation has failed.
void logLine(LogLevel level, std::string_view text);
[[nodiscard]] bool logEnabled(LogLevel level);
void setLogLevel(LogLevel level);
/// Takes lines instead of standard error, each without prefix; any thread may call it.
using LogHandler = void (*)(LogLevel level, std::string_view text);
/// Null: back to standard error. With a handler the level is Info unless HOCCL_LOG says otherwise:
/// where a plugin hands its lines to its host's log, the host decides what is shown.
void setLogHandler(LogHandler handler);
/// Shown in each line: "app", "mover rank 3", "bench".
void setLogRole(std::string_view role);

template <typename... Args>
void logf(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (logEnabled(level)) logLine(level, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void logError(fmt::format_string<Args...> f, Args&&... a) {
  logf(LogLevel::Error, f, std::forward<Args>(a)...);
}
template <typename... Args>
void logWarn(fmt::format_string<Args...> f, Args&&... a) {
  logf(LogLevel::Warn, f, std::forward<Args>(a)...);
}
template <typename... Args>
void logInfo(fmt::format_string<Args...> f, Args&&... a) {
  logf(LogLevel::Info, f, std::forward<Args>(a)...);
}
template <typename... Args>
void logDebug(fmt::format_string<Args...> f, Args&&... a) {
  logf(LogLevel::Debug, f, std::forward<Args>(a)...);
}

}  // namespace hoccl
