#include "common/runtime/segment.h"

#include <fmt/format.h>

namespace hoccl {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t roundUp(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}
constexpr std::size_t kRingOffset = roundUp(sizeof(SegmentHeader), kPage);
constexpr std::size_t kCommunicatorsOffset =
    roundUp(kRingOffset + sizeof(OpRingEntry) * kOpRingEntries, kPage);
constexpr std::size_t kLaunchesOffset =
    roundUp(kCommunicatorsOffset + sizeof(CommunicatorRecord) * kMaxCommunicators, kPage);

}  // namespace

std::size_t Segment::bytesFor(std::uint32_t launchSlots) {
  return roundUp(kLaunchesOffset + sizeof(LaunchFlags) * launchSlots, kPage);
}

void Segment::locate() {
  ring_ = reinterpret_cast<OpRingEntry*>(base_ + kRingOffset);
  communicators_ = reinterpret_cast<CommunicatorRecord*>(base_ + kCommunicatorsOffset);
  launches_ = reinterpret_cast<LaunchFlags*>(base_ + kLaunchesOffset);
}

Segment Segment::create(void* memory, std::uint32_t launchSlots) {
  Segment segment(memory);
  SegmentHeader& header = segment.header();
  header.version = kSegmentVersion;
  header.launchSlots = launchSlots;
  header.bytes = bytesFor(launchSlots);
  segment.locate();
  for (std::uint64_t i = 0; i < kOpRingEntries; ++i) {
    segment.ring_[i].turn.store(i, std::memory_order_relaxed);
  }
  header.magic = kSegmentMagic;
  return segment;
}

Status Segment::attach(void* memory, std::size_t bytes, Segment* out) {
  if (bytes < sizeof(SegmentHeader)) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("torn segment: {} bytes, shorter than its header", bytes));
  }
  Segment segment(memory);
  const SegmentHeader& header = segment.header();
  if (header.magic != kSegmentMagic) {
    return Status::error(
        Code::InvalidArgument,
        fmt::format("torn segment: magic {:#x}, expected {:#x}", header.magic, kSegmentMagic));
  }
  if (header.version != kSegmentVersion) {
    return Status::error(
        Code::InvalidArgument,
        fmt::format("segment of version {}, this hoccl-mover speaks {}: library and "
                    "mover come from different builds",
                    header.version, kSegmentVersion));
  }
  if (header.launchSlots == 0 || header.bytes != bytesFor(header.launchSlots) ||
      header.bytes != bytes) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("torn segment: {} launch slots in {} bytes, {} mapped",
                                     header.launchSlots, header.bytes, bytes));
  }
  segment.locate();
  *out = segment;
  return {};
}

bool Segment::tryClaim(std::uint64_t* out) const {
  std::atomic<std::uint64_t>& tail = header().opTail;
  std::uint64_t position = tail.load(std::memory_order_relaxed);
  for (;;) {
    const std::uint64_t turn = entry(position).turn.load(std::memory_order_acquire);
    if (turn == position) {
      if (tail.compare_exchange_weak(position, position + 1, std::memory_order_relaxed)) {
        *out = position;
        return true;
      }
    } else if (turn < position) {
      return false;  // a full round behind: the mover has not freed this entry yet
    } else {
      position = tail.load(std::memory_order_relaxed);
    }
  }
}

void Segment::fill(std::uint64_t position, const OpDescriptor& op) const {
  OpRingEntry& its = entry(position);
  its.op = op;
  its.turn.store(position + 1, std::memory_order_release);
}

bool Segment::oldest(bool beyond, std::uint64_t* out) const {
  std::atomic<std::uint64_t>& head = header().opHead;
  std::uint64_t position = head.load(std::memory_order_relaxed);
  std::uint64_t turn = entry(position).turn.load(std::memory_order_acquire);
  // Taken before, perhaps while one in front of it was not filled; perhaps claimed anew since.
  while (turn >= position + kOpRingEntries) {
    turn = entry(++position).turn.load(std::memory_order_acquire);
    head.store(position, std::memory_order_relaxed);
  }
  *out = position;
  if (turn == position + 1 || !beyond) return turn == position + 1;
  const std::uint64_t end = header().opTail.load(std::memory_order_acquire);
  for (++position; position < end; ++position) {
    if (entry(position).turn.load(std::memory_order_acquire) != position + 1) continue;
    *out = position;
    return true;
  }
  return false;
}

bool Segment::tryPop(OpDescriptor* op, bool beyond) const {
  std::uint64_t position = 0;
  if (!oldest(beyond, &position)) return false;
  OpRingEntry& its = entry(position);
  *op = its.op;
  its.turn.store(position + kOpRingEntries, std::memory_order_release);
  return true;
}

bool Segment::empty() const {
  std::uint64_t position = 0;
  return !oldest(true, &position);
}

}  // namespace hoccl
