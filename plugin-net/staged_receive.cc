#include "plugin-net/staged_receive.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace hoccl::net_plugin {

void StagedReceive::begin(std::shared_ptr<const Registration> memory, void* data) {
  memory_ = std::move(memory);
  data_ = static_cast<std::byte*>(data);
  next_ = copied_ = 0;
  came_.store(0, std::memory_order_relaxed);
  isSmall_ = smallHere_ = smallCopying_ = false;
}

std::uint64_t StagedReceive::lengthOf(std::uint64_t number, std::uint64_t total) {
  return std::min(kPartBytes, total - number * kPartBytes);
}

/// The part at `next_`, whose place in the window is free.
void StagedReceive::assign(std::uint32_t slot) {
  Part& part = parts_[next_ % kParts];
  part.slot = slot;
  part.reserved.store(0, std::memory_order_relaxed);
  part.arrived.store(0, std::memory_order_relaxed);
  part.state.store(Filling, std::memory_order_relaxed);
  part.number.store(next_++, std::memory_order_release);
}

bool StagedReceive::reserve(std::uint64_t bytes, bool asked, std::uint64_t* limit) {
  const std::uint64_t wanted =
      std::min<std::uint64_t>((bytes + kPartBytes - 1) / kPartBytes, kParts);
  CopyClient& mover = memory_->mover();
  while (spare_.size() < wanted) {
    // The first slot of what has been asked for may be the last one there is.
    const bool spare = !asked || !spare_.empty();
    const std::uint32_t slot = mover.take(CopyClient::Direction::ToDevice, spare);
    if (slot == CopyClient::kNoSlot) break;
    spare_.push_back(slot);
  }
  if (spare_.size() < (asked ? 1 : wanted)) {
    for (const std::uint32_t slot : spare_) mover.giveBack(slot);
    spare_.clear();
    return false;
  }
  for (const std::uint32_t slot : spare_) assign(slot);
  spare_.clear();
  *limit = next_ * kPartBytes;
  return true;
}

std::byte* StagedReceive::place(std::uint64_t offset, std::uint64_t bytes, std::uint64_t total) {
  const std::uint64_t number = offset / kPartBytes;
  Part& part = parts_[number % kParts];
  if (part.number.load(std::memory_order_acquire) != number || bytes > kPartBytes ||
      offset % kPartBytes + bytes > lengthOf(number, total)) {
    return nullptr;
  }
  const std::uint64_t before = part.reserved.fetch_add(bytes, std::memory_order_seq_cst);
  // Looked at again: the slot may have moved on before the place was taken.
  if (before + bytes > lengthOf(number, total) ||
      part.number.load(std::memory_order_seq_cst) != number) {
    return nullptr;
  }
  return memory_->mover().memory(part.slot) + offset % kPartBytes;
}

void StagedReceive::arrived(std::uint64_t offset, std::uint64_t bytes, std::uint64_t total) {
  const std::uint64_t number = offset / kPartBytes;
  Part& part = parts_[number % kParts];
  const std::uint64_t length = lengthOf(number, total);
  came_.fetch_add(bytes, std::memory_order_relaxed);
  if (part.arrived.fetch_add(bytes, std::memory_order_acq_rel) + bytes != length) return;
  const bool right = copyIn(part.slot, number * kPartBytes, length);
  part.state.store(right ? Copying : Misplaced, std::memory_order_release);
}

bool StagedReceive::copyIn(std::uint32_t slot, std::uint64_t offset, std::uint64_t bytes) {
  std::array<CopyPiece, kCopyPieces> pieces;
  const std::size_t count = memory_->pieces(data_ + offset, bytes, pieces);
  if (count > 0) memory_->mover().copy(slot, std::span(pieces.data(), count));
  return count > 0;
}

Status StagedReceive::progress(std::uint64_t total, std::uint64_t* limit) {
  CopyClient& mover = memory_->mover();
  if (!mover.alive()) return mover.whyDead();
  mover.flush();
  if (isSmall_) return progressSmall();
  if (total == 0) return {};
  for (Part& part : parts_) {
    const std::uint32_t state = part.state.load(std::memory_order_acquire);
    if (state == Misplaced) {
      return Status::error(
          Code::InvalidArgument,
          fmt::format("a receive of {} bytes to {}, of which regMr has not been told", total,
                      static_cast<void*>(data_)));
    }
    if (state != Copying || !mover.over(part.slot)) continue;
    if (Status status = mover.outcome(part.slot); !status) return status;
    copied_ += lengthOf(part.number.load(std::memory_order_relaxed), total);
    part.number.store(kNone, std::memory_order_seq_cst);
    part.state.store(Free, std::memory_order_relaxed);
    spare_.push_back(part.slot);
  }
  // No limit before the place has been named.
  const bool named = next_ > 0;
  while (named && next_ * kPartBytes < total &&
         parts_[next_ % kParts].state.load(std::memory_order_relaxed) == Free) {
    std::uint32_t slot = CopyClient::kNoSlot;
    if (!spare_.empty()) {
      slot = spare_.back();
      spare_.pop_back();
    } else {
      slot = mover.take(CopyClient::Direction::ToDevice, true);
    }
    if (slot == CopyClient::kNoSlot) break;
    assign(slot);
    *limit = next_ * kPartBytes;
  }
  if (next_ * kPartBytes >= total) {
    for (const std::uint32_t slot : spare_) mover.giveBack(slot);
    spare_.clear();
  }
  return {};
}

std::byte* StagedReceive::small(std::uint64_t bytes) {
  std::shared_ptr<const Registration> memory = memory_;
  end();
  memory_ = std::move(memory);
  isSmall_ = true;
  smallHere_ = false;
  small_.resize(bytes);
  return small_.data();
}

Status StagedReceive::progressSmall() {
  CopyClient& mover = memory_->mover();
  if (!smallHere_ || small_.empty()) return {};
  if (!smallCopying_) {
    smallSlot_ = mover.take(CopyClient::Direction::ToDevice, false);
    if (smallSlot_ == CopyClient::kNoSlot) return {};
    smallCopying_ = true;
    std::memcpy(mover.memory(smallSlot_), small_.data(), small_.size());
    if (!copyIn(smallSlot_, 0, small_.size())) {
      return Status::error(Code::InvalidArgument,
                           fmt::format("a receive to {}, of which regMr has not been told",
                                       static_cast<void*>(data_)));
    }
  }
  if (!mover.over(smallSlot_)) return {};
  if (Status status = mover.outcome(smallSlot_); !status) return status;
  mover.giveBack(smallSlot_);
  smallCopying_ = false;
  copied_ = small_.size();
  small_.clear();
  return {};
}

bool StagedReceive::finished(std::uint64_t total) const {
  if (isSmall_) return smallHere_ && small_.empty();
  return total > 0 && copied_ == total;
}

bool StagedReceive::allCame(std::uint64_t total) const {
  if (isSmall_) return smallHere_;
  return total > 0 && came_.load(std::memory_order_relaxed) == total;
}

void StagedReceive::end() {
  if (!memory_) return;
  CopyClient& mover = memory_->mover();
  for (Part& part : parts_) {
    part.number.store(kNone, std::memory_order_seq_cst);
    if (part.state.exchange(Free, std::memory_order_acq_rel) != Free) mover.giveBack(part.slot);
  }
  for (const std::uint32_t slot : spare_) mover.giveBack(slot);
  spare_.clear();
  if (smallCopying_) mover.giveBack(smallSlot_);
  smallCopying_ = false;
  memory_.reset();
}

}  // namespace hoccl::net_plugin
