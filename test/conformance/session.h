#pragma once

// Inside a child: the loaded plugin, connections, bytes.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "test/conformance/net_driver.h"
#include "test/conformance/processes.h"

namespace conformance {

/// One line that the plugin gave NCCL's logger.
struct LogLine {
  int level;
  std::string text;
};
/// Those since the last call.
std::vector<LogLine> takeLog();
/// What fills that log.
[[nodiscard]] hoccl::nccl_abi::Logger sessionLogger();
/// The one warning of the log; ends the child if there is none, or another number.
std::string onlyWarning();

/// The library, opened as NCCL does, initialised for one version.
class Session {
 public:
  explicit Session(int version, bool initialise = true);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  /// finalize and dlclose.
  void end();

  [[nodiscard]] Net& net() { return *net_; }
  [[nodiscard]] void* context() { return context_; }
  /// Each call returns at once or the child ends.
  void* listen(Handle* handle, int device = 0);
  void* connect(const Handle& handle, double seconds = 5, int device = 0);
  void* accept(void* listener, double seconds = 5);
  /// One connection between the two sides of a pair, from rank `from` to the other.
  void* connectPair(const Side& side, int from, int device = 0);

 private:
  void* library_ = nullptr;
  std::unique_ptr<Net> net_;
  void* context_ = nullptr;
};

/// Tests the request until it is done; ends the child when it is an error or not done in time.
int finish(Net& net, void* request, int* sizes = nullptr, double seconds = 10);
/// Tests until an error; ends the child unless one comes within 5 s. The error.
ncclResult_t failureOf(Net& net, void* request, double seconds = 5);
/// The error of a send (or receive) that must fail, when it is started or later.
ncclResult_t failureOfSend(Net& net, void* comm, const void* data, std::size_t bytes, int tag);
ncclResult_t failureOfReceive(Net& net, void* comm, void* data, std::size_t bytes, int tag);
/// A send or receive that is started now or, if the plugin says later, later.
void* startSend(Net& net, void* comm, const void* data, std::size_t bytes, int tag);
void* startReceive(Net& net, void* comm, void* data, std::size_t bytes, int tag);

/// Bytes that tell message, place and seed.
void fill(void* data, std::size_t bytes, std::uint64_t seed);
/// Whether they are there.
[[nodiscard]] bool matches(const void* data, std::size_t bytes, std::uint64_t seed);
[[nodiscard]] bool allBytes(const void* data, std::size_t bytes, unsigned char value);

}  // namespace conformance
