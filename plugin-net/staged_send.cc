#include "plugin-net/staged_send.h"

#include <fmt/format.h>

#include <algorithm>

namespace hoccl::net_plugin {

static_assert(kPartBytes == kCopySlotBytes, "a part lies in one slot");

void StagedSend::begin(std::shared_ptr<const Registration> memory, const void* data,
                       std::uint64_t bytes) {
  memory_ = std::move(memory);
  data_ = static_cast<const std::byte*>(data);
  bytes_ = bytes;
  next_ = sent_ = 0;
}

std::uint64_t StagedSend::lengthOf(std::uint64_t number) const {
  return std::min(kPartBytes, bytes_ - number * kPartBytes);
}

Status StagedSend::progress(Bundle& bundle, const Place& place, std::uint64_t granted) {
  CopyClient& mover = memory_->mover();
  for (Part& part : parts_) {
    if (part.state == State::Copying && mover.over(part.slot)) {
      if (Status status = mover.outcome(part.slot); !status) return status;
      part.state = State::Copied;
    }
    if (part.state == State::Copied &&
        part.number * kPartBytes + lengthOf(part.number) <= granted && post(bundle, place, part)) {
      part.state = State::Sending;
    }
    if (part.state == State::Sending &&
        part.moved.load(std::memory_order_acquire) == lengthOf(part.number)) {
      sent_ += lengthOf(part.number);
      mover.giveBack(part.slot);
      part.state = State::Free;
    }
  }
  bool later = false;
  for (Part& part : parts_) {
    if (part.state != State::Free) continue;
    if (next_ * kPartBytes >= bytes_ || later) break;
    if (Status status = copyNext(part, granted, &later); !status) return status;
  }
  if (!finished() && !mover.alive()) return mover.whyDead();
  mover.flush();
  return {};
}

Status StagedSend::copyNext(Part& part, std::uint64_t granted, bool* later) {
  const std::uint64_t length = lengthOf(next_);
  const bool ahead = next_ * kPartBytes + length > granted;
  const std::uint32_t slot = memory_->mover().take(CopyClient::Direction::ToHost, ahead);
  if (slot == CopyClient::kNoSlot) {
    *later = true;
    return {};
  }
  part.slot = slot;
  part.number = next_++;
  part.moved.store(0, std::memory_order_relaxed);
  part.state = State::Copying;
  std::array<CopyPiece, kCopyPieces> pieces;
  const std::byte* from = data_ + part.number * kPartBytes;
  const std::size_t count = memory_->pieces(from, length, pieces);
  if (count == 0) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("a send of {} bytes from {}, of which regMr has not been told",
                                     bytes_, static_cast<const void*>(data_)));
  }
  memory_->mover().copy(slot, std::span(pieces.data(), count));
  return {};
}

bool StagedSend::post(Bundle& bundle, const Place& place, Part& part) {
  PieceBody body;
  body.place = place;
  body.total = bytes_;
  body.base = part.number * kPartBytes;
  Transfer transfer;
  transfer.kind = static_cast<std::uint16_t>(Kind::Data);
  transfer.user = std::bit_cast<std::array<std::byte, sizeof(PieceBody)>>(body);
  transfer.data = memory_->mover().memory(part.slot);
  transfer.bytes = lengthOf(part.number);
  transfer.done = &part.moved;
  return bundle.post(transfer);
}

void StagedSend::end() {
  if (!memory_) return;
  for (Part& part : parts_) {
    if (part.state != State::Free) memory_->mover().giveBack(part.slot);
    part.state = State::Free;
  }
  memory_.reset();
}

}  // namespace hoccl::net_plugin
