#pragma once

// Frames on a stream socket: a header of 64 bytes and a payload. FramedSocket is the state machine
// of one socket, without threads or waiting of its own.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/base/fd.h"
#include "common/base/status.h"

namespace hoccl {

inline constexpr std::uint32_t kFrameMagic =
    0x31464348u;  // "HCF1"; another byte order does not fit
inline constexpr std::uint16_t kFrameVersion = 1;
inline constexpr std::size_t kFrameUserBytes = 48;

struct FrameHeader {
  std::uint32_t magic = kFrameMagic;
  std::uint16_t version = kFrameVersion;
  std::uint16_t kind = 0;                         ///< the user's
  std::uint64_t bytes = 0;                        ///< of the payload that follows
  std::array<std::byte, kFrameUserBytes> user{};  ///< the user's
};
static_assert(sizeof(FrameHeader) == 64);

/// Where received payloads go. Called by whoever advances the socket.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  /// Where the payload of that frame (`bytes` > 0) goes; it stays valid until `arrived` or until
  /// the socket is destroyed. Null: not now, and the socket reads nothing more until it is asked
  /// again. Null with an error in `bad`: the frame makes no sense, and the socket fails.
  virtual std::byte* place(const FrameHeader& header, Status* bad) = 0;
  /// The payload is there in full (at once where there is none).
  virtual void arrived(const FrameHeader& header) = 0;
};

/// A frame to send. The payload is sent from where it lies and must stay until `done` counts it.
struct OutFrame {
  FrameHeader header;
  const std::byte* payload = nullptr;
  /// Grows by `header.bytes` (release) when the kernel has taken the whole frame; may be null.
  std::atomic<std::uint64_t>* done = nullptr;
};

struct FrameLimits {
  std::uint64_t maxPayload = 16u << 20;  ///< a longer one fails the socket
  std::size_t readAhead = 64;  ///< bytes read beyond what is known to come, at least a header
  std::size_t queue = 64;      ///< frames that wait to be sent
};

/// One non-blocking stream socket that carries frames. Not thread-safe. Memory is taken at
/// construction only, and never by what the peer says.
class FramedSocket {
 public:
  enum class Io {
    Moved,    ///< something moved; more may at once (the budget ran out)
    Blocked,  ///< the socket has no room, or nothing more to read: wait for it (a peer's end may
              ///< lie behind what was read)
    Idle,     ///< sending: nothing queued. Receiving: the sink said not now
    Ended,    ///< receiving: the peer closed its side between two frames
    Failed,   ///< see status(); stays so. After sending failed, receiving may still go on
  };

  FramedSocket(UniqueFd fd, const FrameLimits& limits);
  FramedSocket(FramedSocket&&) noexcept = default;
  FramedSocket& operator=(FramedSocket&&) noexcept = default;

  [[nodiscard]] int fd() const { return fd_.get(); }
  /// Queues a frame; false while the queue is full.
  [[nodiscard]] bool push(const OutFrame& frame);
  [[nodiscard]] bool sending() const { return queued_ > 0; }
  [[nodiscard]] bool queueFull() const { return queued_ == queue_.size(); }
  /// Sends what is queued, until the socket blocks.
  Io send();
  /// Receives until the socket has nothing more, the sink says not now, or about `budget` bytes
  /// have come.
  Io receive(FrameSink& sink, std::size_t budget);
  [[nodiscard]] const Status& status() const { return status_ ? sendStatus_ : status_; }
  /// It failed because of what the peer sent.
  [[nodiscard]] bool nonsense() const { return nonsense_; }
  /// Bytes of the current payload that have not come; 0 between frames.
  [[nodiscard]] std::uint64_t missing() const { return inFrame_ ? current_.bytes - received_ : 0; }
  /// Inside a frame, received in part.
  [[nodiscard]] bool midFrame() const;

 private:
  Io fail(Status status);
  Io refuse(Status status);
  Io takeBuffered(FrameSink& sink);
  bool arrivedUpTo(FrameSink& sink, std::uint64_t bytes);
  UniqueFd fd_;
  FrameLimits limits_;
  bool nonsense_ = false;
  Status status_;      ///< of receiving
  Status sendStatus_;  ///< of sending, which may fail while there is still something to receive

  std::vector<OutFrame> queue_;  ///< a ring
  std::size_t head_ = 0, queued_ = 0;
  std::uint64_t sentOfHead_ = 0;  ///< header and payload

  std::vector<std::byte> buffer_;  ///< read ahead: [begin_, end_) is not looked at yet
  std::size_t begin_ = 0, end_ = 0;
  FrameHeader current_;
  bool inFrame_ = false;        ///< current_ is valid
  std::byte* place_ = nullptr;  ///< where its payload goes, once the sink has said
  std::uint64_t received_ = 0;  ///< of its payload
};

}  // namespace hoccl
