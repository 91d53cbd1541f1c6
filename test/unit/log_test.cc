#include "common/base/log.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace hoccl {
namespace {

// The log is made once a process, so each test looks at one made in a child with an environment of
// its own. Returns what the child wrote to standard error.
std::string stderrOf(const std::vector<std::pair<const char*, std::string>>& environment,
                     const std::function<void()>& work) {
  char name[] = "/tmp/hoccl-log-test-XXXXXX";
  const int file = ::mkstemp(name);
  EXPECT_GE(file, 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::unsetenv("HOCCL_LOG");
    ::unsetenv("HOCCL_LOG_FILE");
    for (const auto& [variable, value] : environment) ::setenv(variable, value.c_str(), 1);
    ::dup2(file, STDERR_FILENO);
    work();
    ::_exit(0);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  std::stringstream text;
  text << std::ifstream(name).rdbuf();
  ::close(file);
  ::unlink(name);
  return text.str();
}

std::size_t countOf(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

// Lines of a plugin: no prefix, from Info on, and back to standard error afterwards.
TEST(LogTest, HandlerTakesTheLines) {
  const std::string text = stderrOf({}, [] {
    static std::string taken;
    setLogHandler([](LogLevel level, std::string_view line) {
      taken += level == LogLevel::Info ? "info:" : level == LogLevel::Error ? "error:" : "other:";
      taken += std::string(line) + ";";
    });
    logInfo("one {}", 1);
    logDebug("not shown");
    logError("two");
    setLogHandler(nullptr);
    logInfo("not shown either");
    logWarn("taken {}", taken);
  });
  EXPECT_NE(text.find("taken info:one 1;error:two;\n"), std::string::npos) << text;
  EXPECT_EQ(countOf(text, "\n"), 1u) << text;
}

TEST(LogTest, LineHasLevelHostProcessAndRole) {
  const std::string text = stderrOf({}, [] {
    setLogRole("mover rank 3");
    logWarn("peer {} is gone", 5);
  });
  EXPECT_EQ(text.rfind("hoccl [warn] ", 0), 0u) << text;
  EXPECT_NE(text.find(" mover rank 3 peer 5 is gone\n"), std::string::npos) << text;
  EXPECT_EQ(countOf(text, "\n"), 1u);
}

TEST(LogTest, LevelComesFromTheEnvironment) {
  const auto all = [] {
    logError("one");
    logWarn("two");
    logInfo("three");
    logDebug("four");
  };
  EXPECT_EQ(countOf(stderrOf({}, all), "\n"), 2u) << "warn by default";
  EXPECT_EQ(countOf(stderrOf({{"HOCCL_LOG", "error"}}, all), "\n"), 1u);
  EXPECT_EQ(countOf(stderrOf({{"HOCCL_LOG", "debug"}}, all), "\n"), 4u);
  EXPECT_EQ(stderrOf({{"HOCCL_LOG", "off"}}, all), "");
  EXPECT_EQ(countOf(stderrOf({{"HOCCL_LOG", "nonsense"}}, all), "\n"), 2u);
}

TEST(LogTest, LevelCanBeChanged) {
  const std::string text = stderrOf({}, [] {
    EXPECT_FALSE(logEnabled(LogLevel::Info));
    setLogLevel(LogLevel::Info);
    EXPECT_TRUE(logEnabled(LogLevel::Info));
    EXPECT_FALSE(logEnabled(LogLevel::Off));
    logInfo("seen");
    setLogLevel(LogLevel::Off);
    logError("hidden");
  });
  EXPECT_EQ(countOf(text, "seen"), 1u);
  EXPECT_EQ(countOf(text, "hidden"), 0u);
}

TEST(LogTest, NewlinesInATextStayInOneLine) {
  const std::string text = stderrOf({}, [] { logLine(LogLevel::Error, "a\nb"); });
  EXPECT_NE(text.find("a b\n"), std::string::npos) << text;
}

TEST(LogTest, FileNameTakesHostAndProcess) {
  char folder[] = "/tmp/hoccl-log-dir-XXXXXX";
  ASSERT_NE(::mkdtemp(folder), nullptr);
  const std::string pattern = std::string(folder) + "/%h.%p.%q";
  const std::string onStderr = stderrOf({{"HOCCL_LOG_FILE", pattern}}, [&] {
    logError("into the file");
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    const std::string shortHost = std::string(host).substr(0, std::string(host).find('.'));
    const std::string name =
        std::string(folder) + "/" + shortHost + "." + std::to_string(::getpid()) + ".%q";
    std::stringstream text;
    text << std::ifstream(name).rdbuf();
    if (text.str().find("into the file") == std::string::npos) ::_exit(1);
    ::unlink(name.c_str());
  });
  EXPECT_EQ(onStderr, "");
  EXPECT_EQ(::rmdir(folder), 0);
}

TEST(LogTest, FileThatCannotBeOpenedIsSaidOnceAndStderrUsed) {
  const std::string text = stderrOf({{"HOCCL_LOG_FILE", "/no/such/folder/log"}}, [] {
    logError("first");
    logError("second");
  });
  EXPECT_EQ(countOf(text, "/no/such/folder/log"), 1u) << text;
  EXPECT_EQ(countOf(text, "first"), 1u);
  EXPECT_EQ(countOf(text, "second"), 1u);
}

TEST(LogTest, LinesOfManyThreadsStayWhole) {
  constexpr int kThreads = 4;
  constexpr int kLines = 200;
  const std::string text = stderrOf({}, [] {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([thread] {
        for (int line = 0; line < kLines; ++line) {
          if (line % 50 == 0) setLogRole("role " + std::to_string(thread));
          logError("begin {} end", std::string(100, static_cast<char>('a' + thread)));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  std::istringstream lines(text);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    EXPECT_EQ(line.rfind("hoccl [error] ", 0), 0u) << line;
    EXPECT_EQ(line.substr(line.size() - 4), " end") << line;
    EXPECT_EQ(countOf(line, "begin"), 1u) << line;
  }
  EXPECT_EQ(count, kThreads * kLines);
}

TEST(LogTest, KeepsErrno) {
  stderrOf({}, [] {
    logError("made");
    errno = 77;
    logError("again");
    if (errno != 77) ::_exit(1);
  });
}

}  // namespace
}  // namespace hoccl
