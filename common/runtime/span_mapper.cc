#include "common/runtime/span_mapper.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace hoccl {
namespace {

/// A sum that a hostile length cannot make small.
bool fits(const AddSpan& message) {
  std::uint64_t room = message.bytes - std::min(message.bytes, message.done);
  for (std::size_t i = 0; i < message.pieces; ++i) {
    if (message.pieceBytes[i] == 0 || message.pieceBytes[i] > room) return false;
    room -= message.pieceBytes[i];
  }
  return true;
}

static_assert(sizeof(SegmentHandle::Fabric) == kFabricHandleBytes);

bool byFabric(const AddSpan& message, std::size_t piece) {
  return (message.fabric >> piece & 1) != 0;
}

std::size_t descriptorsOf(const AddSpan& message) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(message.pieces, kSpanPieces); ++i) {
    if (!byFabric(message, i)) ++count;
  }
  return count;
}

}  // namespace

Status SpanMapper::begin(const AddSpan& message, Span* span) {
  CUdeviceptr address = 0;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuMemAddressReserve(&address, message.bytes, 0, 0, 0))
                            .inContext(fmt::format("no {} bytes of addresses", message.bytes)));
  span->address = address;
  span->bytes = message.bytes;
  return {};
}

Status SpanMapper::map(Span* span, SegmentHandle& segment, std::uint64_t bytes) {
  CUmemGenericAllocationHandle handle = 0;
  HOCCL_RETURN_IF_ERROR(importSegment(driver_, segment, &handle));
  const Status mapped =
      HOCCL_CU(driver_, cuMemMap(span->address + span->mapped, bytes, 0, handle, 0));
  (void)driver_->cuMemRelease(handle);
  if (!mapped) return mapped;
  span->pieces.push_back(bytes);
  span->mapped += bytes;
  return {};
}

/// With one missing the others are of no use, and no further one is kept.
void SpanMapper::keep(Span* span, SegmentHandle segment) {
  const std::size_t descriptors = segment.fd ? 1 : 0;
  if (kept_ + descriptors > mostKept_ || span->kept.size() + 1 != span->pieces.size()) return;
  span->kept.push_back(std::move(segment));
  span->descriptors += descriptors;
  kept_ += descriptors;
}

Status SpanMapper::allowAccess(const Span& span) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUdevice device = 0;
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuCtxGetDevice(&device)));
  access.location.id = device;
  return HOCCL_CU(driver_, cuMemSetAccess(span.address, span.bytes, &access, 1));
}

Status SpanMapper::undo(const Span& span) {
  Status first;
  CUdeviceptr at = span.address;
  for (const std::uint64_t bytes : span.pieces) {
    Status status = HOCCL_CU(driver_, cuMemUnmap(at, bytes));
    if (!status && first) first = std::move(status);
    at += bytes;
  }
  Status status = HOCCL_CU(driver_, cuMemAddressFree(span.address, span.bytes));
  return first ? status : first;
}

Status SpanMapper::add(const AddSpan& message, std::vector<UniqueFd>& segments, bool* whole,
                       CUdeviceptr* address, std::uint32_t* refused) {
  *refused = static_cast<std::uint32_t>(message.pieces);
  // What an application that gave up half-way has left.
  if (building_ != 0 && (building_ != message.id || message.pieces == 0)) {
    HOCCL_RETURN_IF_ERROR(unmap(building_));
  }
  if (message.pieces == 0) return {};
  const auto known = spans_.find(message.id);
  const std::uint64_t mapped = known == spans_.end() ? 0 : known->second.mapped;
  const bool goesOn = known == spans_.end()
                          ? message.done == 0
                          : building_ == message.id && message.bytes == known->second.bytes;
  if (message.pieces > kSpanPieces || segments.size() != descriptorsOf(message) || !goesOn ||
      message.done != mapped || !fits(message)) {
    return Status::error(
        Code::InvalidArgument,
        fmt::format(
            "span {:#x} of {} bytes: {} segments with {} descriptors behind {} bytes make no "
            "sense",
            message.id, message.bytes, message.pieces, segments.size(), message.done));
  }
  Span& span = spans_[message.id];
  building_ = message.id;
  Status status = known == spans_.end() ? begin(message, &span) : Status();
  if (!status) {
    spans_.erase(message.id);
    building_ = 0;
    return status;
  }
  std::size_t nextDescriptor = 0;
  for (std::uint32_t i = 0; status && i < message.pieces; ++i) {
    SegmentHandle segment;
    if (byFabric(message, i)) {
      std::memcpy(segment.fabric.data(), message.fabricHandles[i], segment.fabric.size());
    } else {
      segment.fd = std::move(segments[nextDescriptor++]);
    }
    status = map(&span, segment, message.pieceBytes[i]);
    if (status) {
      keep(&span, std::move(segment));
    } else {
      *refused = i;
    }
  }
  *whole = status && span.mapped == span.bytes;
  if (*whole) status = allowAccess(span);
  if (!status) {
    *whole = false;
    (void)unmap(message.id);
    return status.inContext(
        fmt::format("the mover cannot map the application's memory at {:#x} ({} "
                    "bytes)",
                    message.base, message.bytes));
  }
  if (*whole) building_ = 0;
  *address = span.address;
  return {};
}

Status SpanMapper::unmap(std::uint64_t id) {
  const auto position = spans_.find(id);
  if (position == spans_.end()) return {};
  const Span span = std::move(position->second);
  spans_.erase(position);
  kept_ -= span.descriptors;
  if (building_ == id) building_ = 0;
  return undo(span);
}

Status SpanMapper::unmapAll() {
  Status first;
  while (!spans_.empty()) {
    Status status = unmap(spans_.begin()->first);
    if (!status && first) first = std::move(status);
  }
  return first;
}

CUdeviceptr SpanMapper::addressOf(std::uint64_t id) const {
  const auto position = spans_.find(id);
  return position == spans_.end() || building_ == id ? 0 : position->second.address;
}

Status SpanMapper::passOn(AddSpan* message, std::vector<int>* segments) const {
  const auto position = spans_.find(message->id);
  if (position == spans_.end() || building_ == message->id) {
    return Status::error(Code::Internal, fmt::format("span {:#x} is not mapped", message->id));
  }
  const Span& span = position->second;
  if (span.kept.size() != span.pieces.size()) {
    return Status::error(Code::Unsupported,
                         fmt::format("the mover keeps {} file descriptors of memory already, half "
                                     "of what it may have (raise ulimit -n)",
                                     kept_));
  }
  segments->clear();
  message->pieces = message->fabric = 0;
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < span.pieces.size(); at += span.pieces[i++]) {
    if (at < message->done || message->pieces == kSpanPieces) continue;
    const SegmentHandle& segment = span.kept[i];
    if (segment.fd) {
      segments->push_back(segment.fd.get());
    } else {
      message->fabric |= 1ull << message->pieces;
      std::memcpy(message->fabricHandles[message->pieces], segment.fabric.data(),
                  segment.fabric.size());
    }
    message->pieceBytes[message->pieces++] = span.pieces[i];
  }
  return {};
}

}  // namespace hoccl
