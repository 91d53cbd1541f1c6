#include "plugin-net/receive_connection.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "common/base/time.h"

namespace hoccl::net_plugin {

ReceiveEnd::ReceiveEnd(std::string peer, std::shared_ptr<const VerbsGround> ground)
    : ground_(std::move(ground)),
      mayAhead_(!DeviceMemory::ofThisProcess().claimed()),
      flushOff_(std::getenv("NCCL_GDR_FLUSH_DISABLE") != nullptr &&
                std::string_view(std::getenv("NCCL_GDR_FLUSH_DISABLE")) == "1"),
      end_("receiving from", std::move(peer)) {
  freeSlots_.reserve(kReceiveSlots);
  freeRequests_.reserve(kReceiveSlots);
  for (std::size_t i = kReceiveSlots; i-- > 0;) {
    requests_[i].connection = this;
    freeSlots_.push_back(static_cast<std::uint16_t>(i));
    freeRequests_.push_back(static_cast<std::uint16_t>(i));
  }
}

ReceiveEnd::~ReceiveEnd() {
  leave();
  end_.alsoStop(nullptr);
  loopback_.reset();
  // What has arrived may not have been acknowledged when the queue pairs go.
  if (end_.link() != nullptr && end_.bundle() != nullptr) end_.link()->sayBye();
}

ReceiveEnd::TagState* ReceiveEnd::stateOf(int tag) {
  if (last_ != nullptr && lastTag_ == tag) return last_;
  auto found = tags_.find(tag);
  if (found == tags_.end()) {
    if (tags_.size() >= kMaxTags) return nullptr;
    found = tags_.try_emplace(tag).first;
    found->second.tag = tag;
  }
  lastTag_ = tag;
  last_ = &found->second;  // stays: nodes of the map do not move
  return last_;
}

Status ReceiveEnd::progress(bool* gone) {
  end_.receive(controlSink_, gone);
  if (!heardBad_) return end_.fail(heardBad_);
  return {};
}

Status ReceiveEnd::receive(std::span<const Receive> receives, Request** out) {
  *out = nullptr;
  const Turn turn(*this);
  if (!turn) return {};  // later
  if (!end_.failure()) return end_.failure();
  std::array<TagState*, nccl_abi::kMaxGroupedReceives> tags{};
  for (std::size_t i = 0; i < receives.size(); ++i) {
    if (receives[i].bytes > 0 && receives[i].data == nullptr) {
      return end_.fail(
          Status::error(Code::InvalidArgument,
                        fmt::format("a receive of {} bytes to a null pointer", receives[i].bytes)));
    }
    tags[i] = stateOf(receives[i].tag);
    if (tags[i] == nullptr) {
      return end_.fail(
          Status::error(Code::InvalidArgument, fmt::format("more than {} tags", kMaxTags)));
    }
  }
  if (freeRequests_.empty() || freeSlots_.size() < receives.size()) return {};
  ReceiveRequest* const request = &requests_[freeRequests_.back()];
  freeRequests_.pop_back();
  request->count = receives.size();
  request->flushes = request->flushed = 0;
  request->lateNs = end_.bundle()->endingSinceNs() == 0 ? 0 : monotonicNs();
  for (std::size_t i = 0; i < receives.size(); ++i) {
    Slot& slot = slots_[freeSlots_.back()];
    freeSlots_.pop_back();
    request->slots[i] = &slot;
    open(slot, receives[i], *tags[i]);
    if (!heardBad_) return end_.fail(heardBad_);
  }
  *out = request;
  return {};
}

void ReceiveEnd::open(Slot& slot, const Receive& receive, TagState& tag) {
  slot.data = static_cast<std::byte*>(receive.data);
  slot.capacity = receive.bytes;
  slot.staged = nullptr;
  slot.small = false;
  slot.asked = 0;
  slot.rails = nullptr;
  slot.direct = false;
  slot.writing = false;
  slot.onDevice = receive.memory != nullptr && receive.memory->rails &&
                  receive.memory->rails->onDevice() && receive.bytes > 0;
  if (receive.memory != nullptr && receive.memory->rails && end_.link() != nullptr &&
      (receive.bytes > kEagerBytes || (ground_->gpu.any() && receive.bytes > 0)) &&
      end_.link()->reaches(receive.memory->rails.get(), receive.data, receive.bytes)) {
    slot.rails = receive.memory->rails;
  }
  if (receive.memory != nullptr && receive.memory->device != nullptr) {
    if (!slot.ownStaged) slot.ownStaged = std::make_unique<StagedReceive>();
    slot.staged = slot.ownStaged.get();
    slot.staged->begin(receive.memory->device->shared_from_this(), receive.data);
    staging_.push_back(&slot);
  }
  if (slot.onDevice && (slot.rails == nullptr || !loopback_)) {
    heardBad_ = Status::error(
        Code::InvalidArgument,
        fmt::format("a receive of {} bytes into device memory at {}, of which regMr has not been "
                    "told for this connection's NICs",
                    receive.bytes, receive.data));
    return;
  }
  slot.total.store(0, std::memory_order_relaxed);
  slot.reserved.store(0, std::memory_order_relaxed);
  slot.received.store(0, std::memory_order_relaxed);
  if (++slot.turn == 0) slot.turn = 1;
  slot.tag = &tag;
  slot.index = tag.next++;
  slot.posted = slot.done = false;
  slot.bytes = 0;
  tag.open.push_back(&slot);
  if (ahead_ == nullptr && mayAhead_) ahead_ = &tag;
  const bool cameEarly = !tag.early.empty() && tag.early.front().index == slot.index;
  openAhead(slot, !cameEarly && !slot.onDevice);
  if (cameEarly) {
    Early& early = tag.early.front();
    if (early.payload.size() > slot.capacity) {
      heardBad_ =
          Status::error(Code::InvalidArgument,
                        fmt::format("a message of {} bytes (tag {}) came for a receive of {}",
                                    early.payload.size(), tag.tag, slot.capacity));
      return;
    }
    if (!early.complete) {
      early.slot = &slot;
      return;
    }
    deliver(slot, early.payload);
    tag.early.pop_front();
    gaveBack(tag);
    return;
  }
  const bool asked = !tag.asked.empty() && tag.asked.front().index == slot.index;
  if (asked) {
    slot.asked = tag.asked.front().bytes;
    tag.asked.pop_front();
  }
  if (asked || (tag.large && slot.capacity > kEagerBytes)) namePlace(slot);
}

void ReceiveEnd::openAhead(Slot& slot, bool takesPieces) {
  if (slot.tag != ahead_) return;
  if (takesPieces) {
    slot.gate.store(slot.turn, std::memory_order_release);
    OpenByIndex& open = openAhead_[slot.index % kReceiveSlots];
    open.slot.store(static_cast<std::uint32_t>(&slot - slots_.data()), std::memory_order_relaxed);
    open.index.store(slot.index, std::memory_order_release);
  }
  openedAhead_.store(slot.index + 1, std::memory_order_seq_cst);
  end_.bundle()->resumeData();
}

void ReceiveEnd::namePlace(Slot& slot) {
  if (slot.posted) return;
  std::uint64_t limit = 0;
  // Not now: once the sender asks, or there is room.
  if (slot.staged != nullptr &&
      !slot.staged->reserve(slot.asked != 0 ? std::min(slot.asked, slot.capacity) : slot.capacity,
                            slot.asked != 0, &limit)) {
    return;
  }
  if (!slot.onDevice) slot.gate.store(slot.turn, std::memory_order_release);
  sayPosted(slot, limit);
}

void ReceiveEnd::sayPosted(Slot& slot, std::uint64_t limit) {
  slot.posted = true;
  Control control;
  control.ahead = slot.tag == ahead_ ? 1 : 0;
  control.tag = slot.tag->tag;
  control.index = slot.index;
  control.bytes = slot.capacity;
  control.place = {static_cast<std::uint32_t>(&slot - slots_.data()), slot.turn};
  control.limit = limit;
  if (slot.rails == nullptr || slot.done) return end_.say(Kind::Posted, control);
  DirectPlace place;
  end_.link()->open(control.place.slot, slot.data, slot.capacity, *slot.rails, &place);
  slot.direct = true;
  end_.say(Kind::Posted, control, &place);
}

bool ReceiveEnd::finished(Slot& slot) {
  if (slot.done) return true;
  if (slot.staged != nullptr) return false;         // progressStaged tells
  if (slot.onDevice && !slot.direct) return false;  // named later, or progressLoopback tells
  if (slot.direct) {
    const auto at = static_cast<std::uint32_t>(&slot - slots_.data());
    const VerbsLink::Coming& coming = end_.link()->coming(at);
    if (coming.whole) {
      slot.tag->wasted = 0;
      finish(slot, coming.total);
      return true;
    }
  }
  // All that has been given a place is there, and so nobody writes there any more.
  const std::uint64_t received = slot.received.load(std::memory_order_acquire);
  if (received == 0 || received != slot.total.load(std::memory_order_relaxed)) return false;
  slot.tag->wasted = 0;
  finish(slot, received);
  if (!slot.posted) {  // sent ahead of being asked for, and so will be the next
    slot.tag->large = true;
    sayPosted(slot, 0);
  }
  return true;
}

void ReceiveEnd::finish(Slot& slot, std::uint64_t bytes) {
  takeOff(slot, bytes);
  slot.done = true;
}

Status ReceiveEnd::progressStaged() {
  for (std::size_t i = 0; i < staging_.size();) {
    Slot& slot = *staging_[i];
    if (!slot.posted && slot.asked != 0 && !slot.small) namePlace(slot);
    const std::uint64_t total = slot.total.load(std::memory_order_relaxed);
    std::uint64_t limit = 0;
    if (Status status = slot.staged->progress(total, &limit); !status) return end_.fail(status);
    if (limit != 0) {
      Control control;
      control.tag = slot.tag->tag;
      control.index = slot.index;
      control.limit = limit;
      control.place = {static_cast<std::uint32_t>(&slot - slots_.data()), slot.turn};
      end_.say(Kind::More, control);
    }
    if (!slot.staged->finished(total)) {
      ++i;
      continue;
    }
    if (slot.small) {
      slot.done = true;
    } else {
      slot.tag->wasted = 0;
      finish(slot, total);
    }
    slot.staged->end();
    DeviceMemory::ofThisProcess().countReceived(slot.bytes);
    staging_.erase(staging_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return {};
}

void ReceiveEnd::takeOff(Slot& slot, std::uint64_t bytes) {
  slot.gate.store(0, std::memory_order_seq_cst);
  if (slot.tag == ahead_) {
    openAhead_[slot.index % kReceiveSlots].index.store(kNoIndex, std::memory_order_release);
  }
  if (slot.direct) end_.link()->close(static_cast<std::uint32_t>(&slot - slots_.data()));
  slot.direct = false;
  slot.rails = nullptr;
  slot.bytes = bytes;
  std::deque<Slot*>& open = slot.tag->open;
  open.erase(std::find(open.begin(), open.end(), &slot));  // in most cases the first
}

Status ReceiveEnd::test(Request* base, bool* done, int* sizes) {
  *done = false;
  const Turn turn(*this);
  if (!turn) return {};
  auto* const request = static_cast<ReceiveRequest*>(base);
  const auto allFinished = [&] {
    if (request->flushed < request->flushes) return false;
    for (std::size_t i = 0; i < request->count; ++i) {
      if (!finished(*request->slots[i])) return false;
    }
    return true;
  };
  // What the queue pairs have brought is there even if they have failed since.
  Status linked;
  if (!allFinished() && !(linked = progressLink(), allFinished())) {
    if (!linked) return end_.fail(linked);
    bool gone = false;
    if (Status status = progress(&gone); !status) return status;
    gone = gone || overdue(*request);
    if (!staging_.empty()) {
      if (Status status = progressStaged(); !status) return status;
    }
    // Looked at again: the last piece may have come just before the end.
    if (!allFinished()) {
      // What only the mover has to do does not need the peer.
      gone = gone &&
             !std::all_of(
                 request->slots.begin(), request->slots.begin() + request->count, [&](Slot* slot) {
                   return finished(*slot) ||
                          (slot->staged != nullptr && slot->staged->allCame(slot->total.load()));
                 });
      return gone ? end_.fail(end_.whyGone()) : Status();
    }
  }
  for (std::size_t i = 0; i < request->count; ++i) {
    Slot& slot = *request->slots[i];
    if (sizes != nullptr) {
      sizes[i] = static_cast<int>(std::min<std::uint64_t>(slot.bytes, INT_MAX));
    }
    freeSlots_.push_back(static_cast<std::uint16_t>(&slot - slots_.data()));
  }
  freeRequests_.push_back(static_cast<std::uint16_t>(request - requests_.data()));
  *done = true;
  return {};
}

bool ReceiveEnd::overdue(const ReceiveRequest& request) {
  const std::uint64_t sinceNs = end_.bundle()->endingSinceNs();
  return sinceNs != 0 && monotonicNs() > std::max(sinceNs, request.lateNs) + Bundle::kLastBytesNs;
}

}  // namespace hoccl::net_plugin
