#include "common/runtime/peer_imports.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hoccl {
namespace {

/// What the parts of a Handle hold, one behind the other.
struct Description {
  unsigned char ipcHandle[kIpcHandleBytes];
  std::uint64_t base;
  std::uint64_t bytes;
};
static_assert(sizeof(Description) <= HandlePart::kParts * HandlePart::kBytes);

}  // namespace

void PeerImports::describe(const BufferRef& buffer, Message (*parts)[HandlePart::kParts]) {
  Description description{};
  std::memcpy(description.ipcHandle, buffer.ipcHandle, sizeof description.ipcHandle);
  description.base = buffer.allocationBase;
  description.bytes = buffer.allocationBytes;
  unsigned char text[HandlePart::kParts * HandlePart::kBytes] = {};
  std::memcpy(text, &description, sizeof description);
  for (std::uint32_t i = 0; i < HandlePart::kParts; ++i) {
    HandlePart part{MessageType::Handle, i, buffer.allocationId, {}};
    std::memcpy(part.bytes, text + i * HandlePart::kBytes, HandlePart::kBytes);
    std::memcpy(static_cast<void*>(&(*parts)[i]), &part, sizeof part);
  }
}

bool PeerImports::tell(const Message& message) {
  HandlePart part{};
  std::memcpy(static_cast<void*>(&part), &message, sizeof part);
  if (part.allocation == 0 || part.part >= HandlePart::kParts) return false;
  if (part.part > 0 && partOf_ != part.allocation) return false;
  partOf_ = part.allocation;
  std::memcpy(part_ + part.part * HandlePart::kBytes, part.bytes, HandlePart::kBytes);
  if (part.part + 1 < HandlePart::kParts) return true;
  partOf_ = 0;
  auto [position, added] = known_.try_emplace(part.allocation);
  if (!added) return false;
  Description description{};
  std::memcpy(&description, part_, sizeof description);
  auto import = std::make_unique<PeerImport>();
  import->buffer.kind = isSpan(part.allocation) ? BufferKind::Span : BufferKind::Device;
  import->buffer.allocationId = part.allocation;
  import->buffer.allocationBase = description.base;
  import->buffer.allocationBytes = description.bytes;
  std::memcpy(import->buffer.ipcHandle, description.ipcHandle, sizeof description.ipcHandle);
  position->second = std::move(import);
  return true;
}

PeerImport* PeerImports::acquire(std::uint64_t allocation, bool* fresh) {
  *fresh = false;
  const auto position = known_.find(allocation);
  if (position == known_.end()) return nullptr;
  PeerImport& import = *position->second;
  if (import.state == PeerImport::State::Told) {
    import.state = PeerImport::State::Pending;
    import.serial = ++serials_;
    *fresh = true;
    if (counts(import)) ++mapped_;
    work_ = work_ || mapped_ > capacity_;
  }
  ++import.users;
  import.lastUse = ++clock_;
  return &import;
}

void PeerImports::release(PeerImport* import) {
  --import->users;
  import->lastUse = ++clock_;
  work_ = work_ || (import->users == 0 && (!leaving_.empty() || mapped_ > capacity_));
}

PeerImport* PeerImports::find(std::uint64_t serial) {
  for (auto& import : leaving_) {
    if (import->serial == serial) return import.get();
  }
  for (auto& [allocation, import] : known_) {
    if (import->serial == serial) return import.get();
  }
  return nullptr;
}

void PeerImports::settle(PeerImport* import, CUdeviceptr address) {
  import->state = address ? PeerImport::State::Ready : PeerImport::State::Failed;
  import->address = address;
  work_ = true;
  const auto position = known_.find(import->buffer.allocationId);
  const bool known = position != known_.end() && position->second.get() == import;
  if (!address && known && counts(*import)) --mapped_;
}

void PeerImports::forget(std::uint64_t allocation) {
  work_ = true;
  const auto position = known_.find(allocation);
  if (position == known_.end()) {
    forgotten_.push_back(allocation);
    return;
  }
  const PeerImport& import = *position->second;
  const bool mapped =
      import.state == PeerImport::State::Pending || import.state == PeerImport::State::Ready;
  if (mapped && counts(import)) --mapped_;
  leaving_.push_back(std::move(position->second));
  known_.erase(position);
}

void PeerImports::unmapped(std::uint64_t serial) {
  const auto position = unmapping_.find(serial);
  if (position == unmapping_.end()) return;
  forgotten_.push_back(position->second);
  unmapping_.erase(position);
  work_ = true;
}

void PeerImports::unmap(PeerImport& import, CUdeviceptr* address, std::uint64_t* serial,
                        BufferRef* which) {
  *which = import.buffer;
  if (import.serial == 0) import.serial = ++serials_;
  *address = std::exchange(import.address, 0);
  *serial = std::exchange(import.serial, 0);
  import.state = PeerImport::State::Told;
}

bool PeerImports::nextUnmap(CUdeviceptr* address, std::uint64_t* serial, BufferRef* which) {
  for (std::size_t i = 0; i < leaving_.size();) {
    PeerImport& import = *leaving_[i];
    if (import.users > 0 || import.state == PeerImport::State::Pending) {
      ++i;
      continue;
    }
    const std::uint64_t allocation = import.buffer.allocationId;
    // A span is mapped when it comes, whether or not a send needs it.
    const bool mapped = unmappable(import) || import.buffer.kind == BufferKind::Span;
    if (mapped) {
      unmap(import, address, serial, which);
      unmapping_[*serial] = allocation;
    } else {
      forgotten_.push_back(allocation);
    }
    leaving_.erase(leaving_.begin() + static_cast<std::ptrdiff_t>(i));
    if (mapped) return true;
  }
  if (mapped_ > capacity_) {
    PeerImport* oldest = nullptr;
    for (auto& [allocation, import] : known_) {
      if (unmappable(*import) && counts(*import) &&
          (!oldest || import->lastUse < oldest->lastUse)) {
        oldest = import.get();
      }
    }
    if (oldest) {
      unmap(*oldest, address, serial, which);
      --mapped_;
      return true;
    }
  }
  work_ = false;
  return false;
}

bool PeerImports::nextForgotten(std::uint64_t* allocation) {
  if (forgotten_.empty()) return false;
  *allocation = forgotten_.front();
  forgotten_.erase(forgotten_.begin());
  return true;
}

void PeerImports::abandon() {
  for (auto& [allocation, import] : known_) leaving_.push_back(std::move(import));
  known_.clear();
  mapped_ = 0;
  std::erase_if(leaving_,
                [](const auto& import) { return import->state == PeerImport::State::Pending; });
  work_ = true;
}

ToldPeer::State ToldPeer::tell(std::uint64_t allocation) {
  const auto [position, added] = told_.try_emplace(allocation, State::Told);
  return added ? State::New : position->second;
}

void ToldPeer::refused(std::uint64_t allocation) {
  const auto position = told_.find(allocation);
  if (position != told_.end() && position->second == State::Told) position->second = State::Part;
}

ToldPeer::State ToldPeer::share(std::uint64_t allocation) {
  const auto [position, added] = told_.try_emplace(allocation, State::Sharing);
  return added ? State::New : position->second;
}

void ToldPeer::shared(std::uint64_t allocation, SpanShare share, bool* tell, bool* forget) {
  const auto position = told_.find(allocation);
  *tell = *forget = false;
  if (position == told_.end() || position->second != State::Sharing) return;  // the peer has gone
  // Asked to forget it, the peer lets go of whatever it has of it.
  *forget = forgetWhenShared_.erase(allocation) > 0;
  *tell = share == SpanShare::Whole || share == SpanShare::Part || *forget;
  switch (share) {
    case SpanShare::Whole:
      position->second = State::Told;
      break;
    case SpanShare::Part:
      position->second = State::Part;
      break;
    case SpanShare::Nothing:
    case SpanShare::Later:
      position->second = State::Refused;
      break;
  }
  if (*forget || share == SpanShare::Later) told_.erase(position);
}

ToldPeer::TakenBack ToldPeer::takeBack(std::uint64_t allocation, std::uint64_t ticket) {
  const auto position = told_.find(allocation);
  if (position == told_.end()) return TakenBack::NotTold;
  const State state = position->second;
  if (state != State::Sharing) told_.erase(position);
  if (state == State::Refused) return TakenBack::NotTold;
  asked_.emplace_back(allocation, ticket);
  if (state != State::Sharing) return TakenBack::Ask;
  forgetWhenShared_.insert(allocation);
  return TakenBack::Later;
}

bool ToldPeer::answered(std::uint64_t allocation, std::uint64_t* ticket) {
  const auto position = std::find_if(asked_.begin(), asked_.end(),
                                     [&](const auto& each) { return each.first == allocation; });
  if (position == asked_.end()) return false;
  *ticket = position->second;
  asked_.erase(position);
  return true;
}

bool ToldPeer::nextVoid(std::uint64_t* ticket) {
  told_.clear();
  forgetWhenShared_.clear();
  if (asked_.empty()) return false;
  *ticket = asked_.back().second;
  asked_.pop_back();
  return true;
}

}  // namespace hoccl
