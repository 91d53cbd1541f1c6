#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "common/net/tcp/bundle.h"
#include "plugin-net/device_memory.h"
#include "plugin-net/wire.h"

namespace hoccl::net_plugin {

/// A message from device memory on its way: parts of a slot's size, each copied into a staging slot
/// by the mover and then sent from there. The parts overlap, and so do messages.
///
/// What the receiver has not room for yet is copied ahead only into slots beyond half of them: a
/// receiver that never comes must not keep others from theirs.
class StagedSend {
 public:
  ~StagedSend() { end(); }
  void begin(std::shared_ptr<const Registration> memory, const void* data, std::uint64_t bytes);
  /// The receiver takes [0, granted) at `place`; 0 as long as it has not said so.
  Status progress(Bundle& bundle, const Place& place, std::uint64_t granted);
  /// Between `begin` and `end`.
  [[nodiscard]] bool active() const { return memory_ != nullptr; }
  [[nodiscard]] bool finished() const { return sent_ == bytes_; }
  /// Gives everything back. Whatever sends from slots has ended.
  void end();

 private:
  static constexpr std::size_t kParts = 16;  ///< slots one message holds at most
  enum class State { Free, Copying, Copied, Sending };
  struct Part {
    State state = State::Free;
    std::uint32_t slot = 0;
    std::uint64_t number = 0;
    std::atomic<std::uint64_t> moved{0};
  };
  [[nodiscard]] std::uint64_t lengthOf(std::uint64_t number) const;
  [[nodiscard]] bool post(Bundle& bundle, const Place& place, Part& part);
  Status copyNext(Part& part, std::uint64_t granted, bool* later);

  std::shared_ptr<const Registration> memory_;
  const std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t next_ = 0;  ///< number of the next part to be copied
  std::uint64_t sent_ = 0;  ///< bytes the kernel has taken
  std::array<Part, kParts> parts_;
};

}  // namespace hoccl::net_plugin
