#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "common/base/fd.h"
#include "common/base/status.h"

namespace hoccl::bench {

/// One JSON object a line over a stream socket, between the bench and a rank process. Never blocks
/// without a bound.
class LineChannel {
 public:
  LineChannel() = default;
  explicit LineChannel(UniqueFd socket) : socket_(std::move(socket)) {}

  [[nodiscard]] int fd() const { return socket_.get(); }
  void close() { socket_.reset(); }
  /// Error: the peer is gone, or its buffer stays full for `timeoutMs`.
  Status send(const nlohmann::json& message, std::uint64_t timeoutMs);
  enum class State { Message, Nothing, Closed };
  /// Takes one message if a whole one is there. Error: a line that is no JSON object or too long.
  Status tryReceive(nlohmann::json* message, State* state);
  /// Waits for one message. Error: Code::Timeout, or Code::Remote when the peer is gone.
  Status receive(nlohmann::json* message, std::uint64_t timeoutMs);

 private:
  UniqueFd socket_;
  std::string buffer_;
};

}  // namespace hoccl::bench
