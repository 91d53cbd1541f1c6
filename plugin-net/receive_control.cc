// What the sender says to a receiving end on the control socket: small messages, which may come
// before their receive, and large ones that wait for a place.

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "plugin-net/receive_connection.h"

namespace hoccl::net_plugin {
namespace {

/// After so many small messages in a row into receives that were named for nothing, a tag's
/// receives are no longer named unasked.
constexpr unsigned kWastedNames = 8;
/// Small messages are given back in bundles of so many.
constexpr std::uint64_t kCreditBatch = kEagerWindow / 2;

}  // namespace

std::byte* ReceiveEnd::placeOfSmall(Slot& slot, std::uint64_t bytes) {
  if (slot.staged != nullptr) return slot.staged->small(bytes);
  if (!slot.onDevice) return slot.data;
  slot.payload.resize(bytes);
  return slot.payload.data();
}

void ReceiveEnd::smallCame(Slot& slot, std::uint64_t bytes) {
  if (slot.onDevice && bytes > 0) {
    std::shared_ptr<const RailMemory> rails = slot.rails;  // takeOff lets go of it
    takeOff(slot, bytes);
    slot.rails = std::move(rails);
    slot.written = 0;
    looping_.push_back(&slot);
    return;
  }
  if (slot.staged == nullptr) return finish(slot, bytes);
  takeOff(slot, bytes);
  slot.small = true;
  slot.staged->smallIsHere();
}

void ReceiveEnd::deliver(Slot& slot, const std::vector<std::byte>& payload) {
  std::byte* const to = placeOfSmall(slot, payload.size());
  if (!payload.empty()) std::memcpy(to, payload.data(), payload.size());
  smallCame(slot, payload.size());
}

void ReceiveEnd::gaveBack(TagState& tag) {
  if (++tag.unsaid < kCreditBatch) return;
  Control control;
  control.tag = tag.tag;
  control.index = tag.unsaid;
  tag.unsaid = 0;
  end_.say(Kind::Credit, control);
}

Status ReceiveEnd::begin(const FrameHeader& header) {
  const Control control = controlOf(header);
  if (static_cast<Kind>(header.kind) != Kind::Message || header.bytes > kEagerBytes ||
      control.bytes != header.bytes) {
    return Status::error(Code::Remote, fmt::format("a message of kind {} with {} bytes, for {}",
                                                   header.kind, header.bytes, control.bytes));
  }
  TagState* const tag = stateOf(control.tag);
  if (tag == nullptr || control.index < tag->nextMessage) {
    return Status::error(
        Code::Remote, fmt::format("message {} of tag {} out of order", control.index, control.tag));
  }
  tag->nextMessage = control.index + 1;
  coming_ = true;
  comingTag_ = tag;
  comingBytes_ = header.bytes;
  comingSlot_ = nullptr;
  comingEarly_ = nullptr;
  if (control.index >= tag->next) {
    if (tag->early.size() >= kEagerWindow) {
      return Status::error(Code::Remote, fmt::format("more than {} messages of tag {} without a "
                                                     "receive",
                                                     kEagerWindow, control.tag));
    }
    Early& early = tag->early.emplace_back();
    early.index = control.index;
    early.payload.resize(header.bytes);
    comingEarly_ = &early;
    return {};
  }
  const auto found = std::find_if(tag->open.begin(), tag->open.end(),
                                  [&](const Slot* slot) { return slot->index == control.index; });
  if (found == tag->open.end()) {
    return Status::error(Code::Remote, fmt::format("message {} of tag {}, whose receive is over",
                                                   control.index, control.tag));
  }
  Slot& slot = **found;
  if (header.bytes > slot.capacity) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("a message of {} bytes (tag {}) came for a receive of {}",
                                     header.bytes, control.tag, slot.capacity));
  }
  // No piece may come for it from now on, nor have come.
  if (slot.gate.exchange(0, std::memory_order_seq_cst) != 0) {
    if (slot.reserved.load(std::memory_order_seq_cst) != 0) {
      return Status::error(
          Code::Remote, fmt::format("message {} of tag {} came twice", control.index, control.tag));
    }
  }
  if (slot.posted && ++tag->wasted >= kWastedNames) {
    tag->large = false;
    tag->wasted = 0;
  }
  comingSlot_ = &slot;
  comingData_ = placeOfSmall(slot, header.bytes);
  return {};
}

void ReceiveEnd::end() {
  coming_ = false;
  TagState& tag = *comingTag_;
  if (comingEarly_ != nullptr) {
    Early& early = *comingEarly_;
    early.complete = true;
    if (early.slot == nullptr) return;
    deliver(*early.slot, early.payload);
    tag.early.remove_if([&](const Early& other) { return &other == &early; });
  } else {
    smallCame(*comingSlot_, comingBytes_);
  }
  gaveBack(tag);
}

Status ReceiveEnd::heardAnnounce(const Control& control) {
  TagState* const tag = stateOf(control.tag);
  if (tag == nullptr || control.bytes == 0 || control.bytes > nccl_abi::kMaxMessageBytes) {
    return Status::error(Code::Remote, fmt::format("a message of {} bytes announced (tag {})",
                                                   control.bytes, control.tag));
  }
  tag->large = true;
  tag->wasted = 0;
  if (control.index >= tag->next) {
    if (tag->asked.size() >= kReceiveSlots ||
        (!tag->asked.empty() && tag->asked.back().index >= control.index)) {
      return Status::error(Code::Remote, fmt::format("message {} of tag {} announced out of order",
                                                     control.index, control.tag));
    }
    tag->asked.push_back({control.index, control.bytes});
    return {};
  }
  const auto found = std::find_if(tag->open.begin(), tag->open.end(),
                                  [&](const Slot* slot) { return slot->index == control.index; });
  // Not open: its place was named and has been used before the question came.
  if (found != tag->open.end()) {
    (*found)->asked = control.bytes;
    namePlace(**found);
  }
  return {};
}

std::byte* ReceiveEnd::ControlSink::place(const FrameHeader& header, Status* bad) {
  VerbsLink* const link = end_.end_.link();
  if (link != nullptr && VerbsLink::owns(header.kind)) return link->place(header, bad);
  if (header.kind == static_cast<std::uint16_t>(Kind::Data)) {
    return end_.dataSink_.place(header, bad);  // of a message that is not worth another thread
  }
  *bad = end_.begin(header);
  if (!*bad) return nullptr;
  if (end_.comingSlot_ == nullptr) return end_.comingEarly_->payload.data();
  return end_.comingData_;
}

void ReceiveEnd::ControlSink::arrived(const FrameHeader& header) {
  ReceiveEnd& end = end_;
  if (!end.heardBad_) return;
  if (end.end_.link() != nullptr && VerbsLink::owns(header.kind)) {
    return end.end_.link()->arrived(header);
  }
  switch (static_cast<Kind>(header.kind)) {
    case Kind::Message:
      if (!end.coming_) end.heardBad_ = end.begin(header);  // without a payload
      if (end.heardBad_.ok()) end.end();
      return;
    case Kind::Announce:
      end.heardBad_ = end.heardAnnounce(controlOf(header));
      return;
    case Kind::Data:
      return end.dataSink_.arrived(header);
    default:
      end.heardBad_ = Status::error(
          Code::Remote, fmt::format("a sending end sent a message of kind {}", header.kind));
  }
}

}  // namespace hoccl::net_plugin
