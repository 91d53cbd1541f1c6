#pragma once

// Processes of a test. The test program itself never loads the plugin: it forks, and the children
// do.

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace conformance {

/// In a child: what is wrong goes to standard error, and the child ends with status 1.
[[noreturn]] void giveUp(const char* file, int line, const std::string& what);
#define REQUIRE(condition)                                                   \
  do {                                                                       \
    if (!(condition)) ::conformance::giveUp(__FILE__, __LINE__, #condition); \
  } while (0)
#define REQUIRE_SAYING(condition, text)                                                   \
  do {                                                                                    \
    if (!(condition))                                                                     \
      ::conformance::giveUp(__FILE__, __LINE__, std::string(#condition) + ": " + (text)); \
  } while (0)
#define REQUIRE_OK(call)                                                              \
  do {                                                                                \
    const int result_ = static_cast<int>(call);                                       \
    if (result_ != 0) {                                                               \
      ::conformance::giveUp(__FILE__, __LINE__,                                       \
                            std::string(#call) + " gave " + std::to_string(result_)); \
    }                                                                                 \
  } while (0)

/// What a child has to do with the others: a channel to its pair.
class Side {
 public:
  Side(int rank, int fd) : rank_(rank), fd_(fd) {}
  [[nodiscard]] int rank() const { return rank_; }
  /// To and from the other side; the child ends if the other is gone.
  void give(const void* data, std::size_t bytes) const;
  void take(void* data, std::size_t bytes) const;
  /// Both are here.
  void meet() const;
  /// The channel, for waits on the other's end.
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int rank_;
  int fd_;
};

struct Outcome {
  std::vector<int> statuses;  ///< as wait() gives them
  bool timedOut = false;
  double seconds = 0;  ///< in which the children have run
  std::string output;  ///< of all, standard error and output
  [[nodiscard]] bool ok() const;
  [[nodiscard]] std::string text() const;
};

/// Two processes that run `body` with their side; killed after `seconds`. In two guests of the RDMA
/// lab (docs/rdma-lab.md): one in each, and this is about the one here.
Outcome runPair(const std::function<void(const Side&)>& body, double seconds = 30);
/// One process.
Outcome runAlone(const std::function<void()>& body, double seconds = 30);
/// A program of its own, with additional environment ("NAME=value"; "NAME" removes it).
Outcome runProgram(const std::vector<std::string>& command,
                   const std::vector<std::string>& environment, const std::string& folder = {},
                   double seconds = 30);

[[nodiscard]] double now();
/// Every limit of time in tests is longer by this factor, of CONFORMANCE_PATIENCE: guests under
/// emulation on busy processors have clocks that run ahead of what they get done.
[[nodiscard]] double patience();
/// Threads and descriptors of this process.
[[nodiscard]] std::size_t threadCount();
/// Before the plugin has started any. A sanitizer starts one of its own with the first.
[[nodiscard]] std::size_t threadsWithoutPlugin();
/// Whether there are so many, now or soon: one that has been joined may still be on its way out.
[[nodiscard]] bool threadsSettleAt(std::size_t count);
[[nodiscard]] std::size_t descriptorCount();

}  // namespace conformance
