#include "common/net/tcp/frames.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace hoccl {
namespace {

/// Frames that one system call sends at most.
constexpr std::size_t kBatch = 8;

bool wouldBlock(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

Status socketError(const char* what, int error) {
  if (error == EPIPE || error == ECONNRESET) {
    return Status::error(Code::Remote, "the peer closed the connection (its process has ended)");
  }
  if (error == ETIMEDOUT) {
    return Status::error(Code::Remote, "the peer's host does not answer any more");
  }
  return Status::fromErrno(what, error);
}

}  // namespace

FramedSocket::FramedSocket(UniqueFd fd, const FrameLimits& limits)
    : fd_(std::move(fd)),
      limits_(limits),
      queue_(std::max<std::size_t>(limits.queue, 1)),
      buffer_(std::max(limits.readAhead, sizeof(FrameHeader))) {}

FramedSocket::Io FramedSocket::fail(Status status) {
  if (status_) status_ = std::move(status);
  return Io::Failed;
}

FramedSocket::Io FramedSocket::refuse(Status status) {
  nonsense_ = true;
  return fail(std::move(status));
}

bool FramedSocket::midFrame() const { return inFrame_ || begin_ != end_; }

bool FramedSocket::push(const OutFrame& frame) {
  if (queued_ == queue_.size()) return false;
  queue_[(head_ + queued_) % queue_.size()] = frame;
  ++queued_;
  return true;
}

FramedSocket::Io FramedSocket::send() {
  if (!sendStatus_) return Io::Failed;
  while (queued_ > 0) {
    iovec parts[2 * kBatch];
    std::size_t count = 0;
    std::uint64_t skip = sentOfHead_;
    for (std::size_t i = 0; i < std::min(queued_, kBatch); ++i) {
      OutFrame& frame = queue_[(head_ + i) % queue_.size()];
      if (skip < sizeof frame.header) {
        parts[count++] = {reinterpret_cast<std::byte*>(&frame.header) + skip,
                          sizeof frame.header - skip};
        skip = 0;
      } else {
        skip -= sizeof frame.header;
      }
      if (frame.header.bytes > skip) {
        parts[count++] = {const_cast<std::byte*>(frame.payload) + skip, frame.header.bytes - skip};
      }
      skip = 0;
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && wouldBlock(errno)) return Io::Blocked;
    if (sent < 0) {
      // What the peer sent before its end can still be received.
      sendStatus_ = socketError("cannot send to the peer", errno);
      return Io::Failed;
    }
    sentOfHead_ += static_cast<std::uint64_t>(sent);
    while (queued_ > 0) {
      const OutFrame& frame = queue_[head_];
      const std::uint64_t whole = sizeof frame.header + frame.header.bytes;
      if (sentOfHead_ < whole) break;
      sentOfHead_ -= whole;
      if (frame.done) frame.done->fetch_add(frame.header.bytes, std::memory_order_release);
      head_ = (head_ + 1) % queue_.size();
      --queued_;
    }
  }
  return Io::Idle;
}

/// Takes frames out of what has been read ahead, until it needs more bytes.
FramedSocket::Io FramedSocket::takeBuffered(FrameSink& sink) {
  for (;;) {
    if (!inFrame_) {
      if (end_ - begin_ < sizeof current_) {
        if (begin_ > 0) std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
        return Io::Moved;
      }
      std::memcpy(&current_, buffer_.data() + begin_, sizeof current_);
      if (current_.magic != kFrameMagic) {
        return refuse(Status::error(
            Code::Remote, fmt::format("the peer sent {:#010x} where a frame begins: it is not "
                                      "HOCCL, or the connection is damaged",
                                      current_.magic)));
      }
      if (current_.version != kFrameVersion) {
        return refuse(Status::error(
            Code::Remote, fmt::format("frames of version {} here, {} there: the two builds of "
                                      "HOCCL differ",
                                      kFrameVersion, current_.version)));
      }
      if (current_.bytes > limits_.maxPayload) {
        return refuse(Status::error(
            Code::Remote, fmt::format("the peer announced a frame of {} bytes; at most {} "
                                      "are allowed",
                                      current_.bytes, limits_.maxPayload)));
      }
      begin_ += sizeof current_;
      if (current_.bytes == 0) {
        sink.arrived(current_);
        continue;
      }
      inFrame_ = true;
      place_ = nullptr;
      received_ = 0;
    }
    if (!place_) {
      Status bad;
      place_ = sink.place(current_, &bad);
      if (!bad) return refuse(std::move(bad));
      if (!place_) return Io::Idle;
    }
    const std::size_t here = static_cast<std::size_t>(
        std::min<std::uint64_t>(end_ - begin_, current_.bytes - received_));
    std::memcpy(place_ + received_, buffer_.data() + begin_, here);
    begin_ += here;
    if (!arrivedUpTo(sink, received_ + here)) {
      begin_ = end_ = 0;
      return Io::Moved;
    }
  }
}

/// So much of the current payload is there. True if it is all.
bool FramedSocket::arrivedUpTo(FrameSink& sink, std::uint64_t bytes) {
  received_ = bytes;
  if (received_ < current_.bytes) return false;
  inFrame_ = false;
  sink.arrived(current_);
  return true;
}

FramedSocket::Io FramedSocket::receive(FrameSink& sink, std::size_t budget) {
  if (!status_) return Io::Failed;
  std::size_t total = 0;
  for (;;) {
    if (const Io taken = takeBuffered(sink); taken != Io::Moved) return taken;
    if (total >= budget) return Io::Moved;
    // The rest of the payload straight to its place, and behind it what comes next.
    iovec parts[2];
    int count = 0;
    std::size_t payload = 0;
    if (inFrame_) {
      payload = static_cast<std::size_t>(current_.bytes - received_);
      parts[count++] = {place_ + received_, payload};
    }
    const std::size_t room = buffer_.size() - end_;
    parts[count++] = {buffer_.data() + end_, room};
    const ssize_t got = count == 1 ? ::recv(fd_.get(), parts[0].iov_base, parts[0].iov_len, 0)
                                   : ::readv(fd_.get(), parts, count);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && wouldBlock(errno)) return Io::Blocked;
    if (got < 0) return fail(socketError("cannot receive from the peer", errno));
    if (got == 0) {
      if (!midFrame()) return Io::Ended;
      return fail(
          Status::error(Code::Remote, "the peer closed the connection in the middle of a message"));
    }
    const auto bytes = static_cast<std::size_t>(got);
    total += bytes;
    const std::size_t direct = std::min(bytes, payload);
    end_ += bytes - direct;
    if (direct > 0) arrivedUpTo(sink, received_ + direct);
    if (bytes == payload + room) continue;
    // Less than there was room for: the socket is empty. Not asked again, which would cost a call.
    if (const Io taken = takeBuffered(sink); taken != Io::Moved) return taken;
    return Io::Blocked;
  }
}

}  // namespace hoccl
