#include "common/net/shm/shm_connection.h"

#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "common/base/log.h"
#include "common/base/unix_socket.h"

namespace hoccl {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::uint32_t kRingMessages = 4096;  // power of two
constexpr std::size_t kMostNotTaken = 4;

constexpr std::size_t roundUp(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

struct SlotFlags {
  Flag ready;
  Flag credit;
  Flag mirrored;  ///< the sending side's alone
};

}  // namespace

/// One direction's messages: one writer, one reader.
struct ShmConnection::MessageRing {
  alignas(kCacheLine) std::atomic<std::uint64_t> head;  ///< next to read
  alignas(kCacheLine) std::atomic<std::uint64_t> tail;  ///< next to write
  alignas(kCacheLine) Message messages[kRingMessages];
};

// Region: ring of each direction, flags of each direction's slots, slots of each direction.
// Direction 0 is from the connecting to the accepting side.
std::size_t ShmConnection::regionBytes(const StagingGeometry& geometry) {
  return roundUp(2 * sizeof(MessageRing) + 2 * geometry.slots * sizeof(SlotFlags), kPage) +
         2 * geometry.slots * roundUp(geometry.slotBytes, kPage);
}

ShmConnection::ShmConnection(SharedMemory region, UniqueFd socket, const StagingGeometry& geometry,
                             Side side, const PeerId& peer)
    : region_(std::move(region)), socket_(std::move(socket)), peer_(peer) {
  auto* base = static_cast<std::byte*>(region_.data());
  auto* rings = reinterpret_cast<MessageRing*>(base);
  auto* flags = reinterpret_cast<SlotFlags*>(base + 2 * sizeof(MessageRing));
  std::byte* slots =
      base + roundUp(2 * sizeof(MessageRing) + 2 * geometry.slots * sizeof(SlotFlags), kPage);
  const unsigned outDirection = side == Side::Connecting ? 0 : 1;
  sendRing_ = rings + outDirection;
  receiveRing_ = rings + (1 - outDirection);

  staging_.base = base;
  staging_.bytes = region_.size();
  staging_.slotBytes = geometry.slotBytes;
  auto slotAt = [&](unsigned direction, std::uint32_t index) {
    const std::size_t position = direction * geometry.slots + index;
    return Slot{.data = slots + position * roundUp(geometry.slotBytes, kPage),
                .ready = &flags[position].ready,
                .credit = &flags[position].credit,
                .mirrored = &flags[position].mirrored};
  };
  for (std::uint32_t i = 0; i < geometry.slots; ++i) {
    staging_.out.push_back(slotAt(outDirection, i));
    staging_.in.push_back(slotAt(1 - outDirection, i));
  }
}

bool ShmConnection::trySend(const Message& message) {
  const std::uint64_t tail = sendRing_->tail.load(std::memory_order_relaxed);
  if (tail - sendRing_->head.load(std::memory_order_acquire) >= kRingMessages) return false;
  sendRing_->messages[tail % kRingMessages] = message;
  sendRing_->tail.store(tail + 1, std::memory_order_release);
  return true;
}

bool ShmConnection::tryReceive(Message* message) {
  const std::uint64_t head = receiveRing_->head.load(std::memory_order_relaxed);
  if (head == receiveRing_->tail.load(std::memory_order_acquire)) return false;
  *message = receiveRing_->messages[head % kRingMessages];
  receiveRing_->head.store(head + 1, std::memory_order_release);
  return true;
}

void ShmConnection::nudge() {
  const char byte = 0;
  // A full socket holds nudges the peer has not taken yet, and a closed one nobody to wake.
  [[maybe_unused]] ssize_t sent = ::send(socket_.get(), &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void ShmConnection::watch() {
  // After the set-up only nudges come over the socket, what is handed over, and the peer's end.
  // What is not taken yet holds descriptors, of which a socket holds more than a process may have.
  while (handedOver_.size() < kMostNotTaken) {
    std::byte buffer[HandedOver::kMostBytes];
    std::size_t bytes = 0;
    std::vector<UniqueFd> fds;
    ReceiveState state = ReceiveState::WouldBlock;
    const Status status = recvWithFds(socket_.get(), buffer, sizeof buffer, &bytes, &fds, &state);
    if (!status) {
      // A message that could not be taken in is lost; an error of the socket stays.
      logInfo("from another mover of this node: {}", status.message());
      char byte = 0;
      const ssize_t got = ::recv(socket_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      const bool alive = got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
      if (alive) continue;
      state = ReceiveState::Closed;
    }
    if (state == ReceiveState::Closed) gone_.store(true, std::memory_order_release);
    if (state != ReceiveState::Message) return;
    if (bytes > 1) handedOver_.push_back({{buffer, buffer + bytes}, std::move(fds)});
  }
}

Status ShmConnection::handOver(const void* data, std::size_t bytes, std::span<const int> fds,
                               std::uint64_t timeoutMs) {
  return sendWithFdsWithin(socket_.get(), data, bytes, fds, timeoutMs);
}

bool ShmConnection::takeHandedOver(HandedOver* out) {
  if (handedOver_.empty()) return false;
  *out = std::move(handedOver_.front());
  handedOver_.pop_front();
  return true;
}

}  // namespace hoccl
