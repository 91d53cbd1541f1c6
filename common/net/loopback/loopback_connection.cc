#include "common/net/loopback/loopback_connection.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <utility>

namespace hoccl {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kMessages = 4096;

constexpr std::size_t roundUp(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

struct SlotFlags {
  Flag ready;
  Flag credit;
  Flag mirrored;
};

std::size_t flagBytes(const StagingGeometry& geometry) {
  return roundUp(geometry.slots * sizeof(SlotFlags), kPage);
}

}  // namespace

Status LoopbackConnection::create(const PeerId& self, const StagingGeometry& geometry,
                                  std::unique_ptr<Connection>* out) {
  SharedMemory region;
  const std::size_t bytes =
      flagBytes(geometry) + geometry.slots * roundUp(geometry.slotBytes, kPage);
  if (Status status = SharedMemory::create("hoccl-loopback", bytes, &region); !status) return status;
  UniqueFd watch(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!watch) return Status::fromErrno("eventfd", errno);
  out->reset(new LoopbackConnection(self, geometry, std::move(region), std::move(watch)));
  return {};
}

LoopbackConnection::LoopbackConnection(const PeerId& self, const StagingGeometry& geometry,
                                       SharedMemory region, UniqueFd watch)
    : self_(self), region_(std::move(region)), watch_(std::move(watch)), messages_(kMessages) {
  auto* base = static_cast<std::byte*>(region_.data());
  auto* flags = reinterpret_cast<SlotFlags*>(base);
  std::byte* slots = base + flagBytes(geometry);
  staging_.base = base;
  staging_.bytes = region_.size();
  staging_.slotBytes = geometry.slotBytes;
  for (std::uint32_t i = 0; i < geometry.slots; ++i) {
    staging_.out.push_back({.data = slots + i * roundUp(geometry.slotBytes, kPage),
                            .ready = &flags[i].ready,
                            .credit = &flags[i].credit,
                            .mirrored = &flags[i].mirrored});
  }
  staging_.in = staging_.out;
}

bool LoopbackConnection::trySend(const Message& message) {
  if (count_ == kMessages) return false;
  messages_[(head_ + count_++) % kMessages] = message;
  return true;
}

bool LoopbackConnection::tryReceive(Message* message) {
  if (count_ == 0) return false;
  *message = messages_[head_];
  head_ = (head_ + 1) % kMessages;
  --count_;
  return true;
}

}  // namespace hoccl
