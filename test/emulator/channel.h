#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace hoccl::emu {

/// What carries out a piece of work. Also the kind of channel a stream's memory operations follow
/// (FACTS 5).
enum class Path : std::uint8_t { Immediate, Sm, D2H, H2D, P2P };
inline constexpr int kPaths = 5;

/// One hardware queue of a context: its operations leave it in the order of submission. An
/// operation that cannot begin yet, because it is a wait whose flag is not set or because what its
/// stream has before it is not done, keeps everything behind it in the channel, of whatever stream.
/// A kernel leaves the channel when it starts, a copy when its engine has it. Guarded by the
/// scheduler's lock.
struct Channel {
  std::deque<std::uint64_t> inside;  ///< tickets of the operations that have not left, oldest first
  unsigned streams = 0;              ///< streams that have unfinished operations of it
  std::int64_t movedAt = 0;          ///< when the last operation left

  /// An earlier operation keeps the one with this ticket from beginning.
  [[nodiscard]] bool holds(std::uint64_t ticket) const {
    return !inside.empty() && inside.front() < ticket;
  }
};

/// A stream's place in the channels of one kind.
struct ChannelUse {
  Channel* channel = nullptr;
  unsigned unfinished = 0;  ///< operations of the stream in the channel
};

/// The channels of one context. A stream
/// takes one when it begins to have work of the kind: the one it had if that is free, else the next
/// free one, else the one that the fewest streams use; and keeps it until that work is done.
class ChannelSet {
 public:
  /// `connections`: CUDA_DEVICE_MAX_CONNECTIONS, the number of channels of each kind; 0: not set.
  explicit ChannelSet(int connections);
  ChannelSet(const ChannelSet&) = delete;
  ChannelSet& operator=(const ChannelSet&) = delete;

  /// The channel for one more operation of a stream.
  Channel* enter(Path kind, ChannelUse* use);
  /// That operation is done.
  static void leave(ChannelUse* use);

 private:
  struct Kind {
    std::vector<Channel> channels;
    std::size_t next = 0;  ///< where the search for a channel begins
  };
  Kind kinds_[kPaths];
};

}  // namespace hoccl::emu
