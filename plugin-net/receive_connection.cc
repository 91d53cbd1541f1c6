#include "plugin-net/receive_connection.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "common/base/time.h"

namespace hoccl::net_plugin {
namespace {

/// After so many small messages in a row into receives that were named for nothing, a tag's
/// receives are no longer named unasked.
constexpr unsigned kWastedNames = 8;
/// Small messages are given back in bundles of so many.
constexpr std::uint64_t kCreditBatch = kEagerWindow / 2;
/// A loopback queue pair that is full has room again in microseconds.
constexpr std::uint64_t kFlushRoomNs = 1'000'000'000;

}  // namespace

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

Status ReceiveEnd::progressLink() {
  VerbsLink* const link = end_.link();
  if (link == nullptr || !end_.failure()) return end_.failure();
  link->progress();
  if (loopback_) {
    if (Status status = progressLoopback(); !status) return status;
  }
  Control control;
  for (std::uint32_t slot = 0; link->takeMore(&slot, &control.limit);) {
    control.tag = slots_[slot].tag->tag;
    control.index = slots_[slot].index;
    control.place = {slot, slots_[slot].turn};
    end_.say(Kind::More, control);
  }
  return link->failure();
}

Status ReceiveEnd::progressLoopback() {
  if (Status status = loopback_->progress(); !status) return status;
  for (std::size_t i = 0; i < looping_.size();) {
    Slot& slot = *looping_[i];
    if (!slot.writing) {
      slot.writing = loopback_->write(*slot.rails, slot.data, slot.payload.data(),
                                      slot.payload.size(), &slot.written);
    }
    if (slot.written == 0) {
      ++i;
      continue;
    }
    slot.done = true;
    slot.rails = nullptr;
    looping_.erase(looping_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return {};
}

Status ReceiveEnd::prepareDirect() {
  if (loopback_ || end_.link() == nullptr) return {};
  const Status status = Loopback::create(*ground_, end_.link()->set().rails().size(), &loopback_);
  end_.alsoStop(loopback_.get());
  return status;
}

Status ReceiveEnd::flush(std::span<void* const> data, const int* sizes,
                         std::span<const Memory* const> memory, Request** out) {
  if (!end_.failure()) return end_.failure();
  FlushFacts facts;
  facts.disabled = flushOff_;
  std::size_t last = 0;
  for (std::size_t i = 0; i < data.size(); ++i) {
    const bool direct = memory[i] != nullptr && memory[i]->rails && memory[i]->rails->onDevice();
    if (!direct || sizes[i] <= 0) continue;
    facts.deviceMemory = true;
    facts.bytes += static_cast<std::uint64_t>(sizes[i]);
    last = i;  // one read stands for all that lies behind the same NIC
  }
  if (!needsFlush(facts)) return {};
  // NCCL takes a null request for "there is nothing to flush", so this cannot come later: the one
  // place where the attendant's turn, which takes microseconds, is waited for.
  Attended& attended = *this;
  std::optional<Turn> turn(std::in_place, attended);
  while (!*turn) {
    turn.reset();
    std::this_thread::yield();
    turn.emplace(attended);
  }
  if (!end_.failure()) return end_.failure();
  if (!loopback_ || freeRequests_.empty()) {
    return end_.fail(Status::error(Code::Internal, "more requests than NCCL may have open"));
  }
  ReceiveRequest* const request = &requests_[freeRequests_.back()];
  request->count = 0;
  request->flushed = 0;
  request->flushes = loopback_->rails();
  const std::uint64_t untilNs = monotonicNs() + kFlushRoomNs;
  while (!loopback_->flush(*memory[last]->rails, data[last], &request->flushed)) {
    if (Status status = loopback_->progress(); !status) return end_.fail(status);
    if (monotonicNs() > untilNs) {
      return end_.fail(Status::error(Code::Timeout, "the NIC does not take a flush"));
    }
  }
  freeRequests_.pop_back();
  *out = request;
  return {};
}

Status ReceiveEnd::advanceSetUp(bool* stands) {
  *stands = end_.link() == nullptr;
  if (*stands) return {};
  bool gone = false;
  if (Status status = progress(&gone); !status) return status;
  if (Status status = progressLink(); !status) return end_.fail(status);
  *stands = end_.link()->stands();
  if (*stands) join();
  return gone && !*stands ? end_.fail(end_.whyGone()) : Status();
}

void ReceiveEnd::attend() {
  if (!end_.failure()) return;
  bool gone = false;
  if (!progress(&gone)) return;
  if (Status status = progressLink(); !status) (void)end_.fail(status);
}

bool ReceiveEnd::uneasy() const { return end_.failure().ok() && end_.link()->set().failing(); }

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
      (receive.bytes > kEagerBytes || slot.onDevice) &&
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

void ReceiveEnd::gaveBack(TagState& tag) {
  if (++tag.unsaid < kCreditBatch) return;
  Control control;
  control.tag = tag.tag;
  control.index = tag.unsaid;
  tag.unsaid = 0;
  end_.say(Kind::Credit, control);
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

std::byte* ReceiveEnd::reserve(Slot& slot, std::uint32_t turn, std::uint64_t offset,
                               std::uint64_t bytes, std::uint64_t total) {
  if (turn == 0 || slot.gate.load(std::memory_order_acquire) != turn || total > slot.capacity ||
      offset > total || bytes > total - offset) {
    return nullptr;
  }
  std::uint64_t known = 0;
  if (!slot.total.compare_exchange_strong(known, total) && known != total) return nullptr;
  const std::uint64_t before = slot.reserved.fetch_add(bytes, std::memory_order_seq_cst);
  // Looked at again: the gate may have been closed before the place was taken.
  const bool open = slot.gate.load(std::memory_order_seq_cst) == turn;
  if (!open || before + bytes > total) return nullptr;
  return slot.staged != nullptr ? slot.staged->place(offset, bytes, total) : slot.data + offset;
}

std::byte* ReceiveEnd::DataSink::place(const FrameHeader& header, Status* bad) {
  if (static_cast<Kind>(header.kind) == Kind::Ahead) return placeAhead(header, bad);
  const Piece piece = pieceOf(header);
  const Place& at = piece.body.place;
  if (static_cast<Kind>(header.kind) == Kind::Data && at.slot < kReceiveSlots &&
      piece.body.base <= piece.body.total) {
    Slot& slot = end_.slots_[at.slot];
    const std::uint64_t left = piece.body.total - piece.body.base;
    if (piece.offset <= left) {
      const std::uint64_t offset = piece.body.base + piece.offset;
      std::byte* const place = reserve(slot, at.turn, offset, header.bytes, piece.body.total);
      if (place != nullptr) return place;
    }
  }
  *bad = Status::error(Code::Remote,
                       fmt::format("it sent [{}, +{}) of a message of {} bytes for receive {}/{}, "
                                   "which does not take that",
                                   piece.body.base + piece.offset, header.bytes, piece.body.total,
                                   at.slot, at.turn));
  return nullptr;
}

std::byte* ReceiveEnd::DataSink::placeAhead(const FrameHeader& header, Status* bad) {
  const AheadPiece piece = aheadPieceOf(header);
  const AheadBody& body = piece.body;
  if (body.index >= end_.openedAhead_.load(std::memory_order_seq_cst)) return nullptr;  // not now
  const OpenByIndex& open = end_.openAhead_[body.index % kReceiveSlots];
  // Where a receive has been opened, `ahead_` has been set for good.
  if (open.index.load(std::memory_order_acquire) == body.index && body.tag == end_.ahead_->tag) {
    Slot& slot = end_.slots_[open.slot.load(std::memory_order_relaxed)];
    const std::uint32_t turn = slot.gate.load(std::memory_order_acquire);
    // Looked at again: with all of its message there, the slot may be another receive's by now.
    if (open.index.load(std::memory_order_acquire) == body.index) {
      std::byte* const place = reserve(slot, turn, piece.offset, header.bytes, body.total);
      if (place != nullptr) return place;
    }
  }
  *bad = Status::error(Code::Remote,
                       fmt::format("it sent [{}, +{}) of message {} of tag {}, of {} bytes, ahead, "
                                   "which the receive does not take",
                                   piece.offset, header.bytes, body.index, body.tag, body.total));
  return nullptr;
}

void ReceiveEnd::DataSink::arrived(const FrameHeader& header) {
  // A piece without bytes would count for nothing.
  if (header.bytes == 0) return;
  const bool ahead = static_cast<Kind>(header.kind) == Kind::Ahead;
  const std::uint32_t at =
      ahead ? end_.openAhead_[aheadPieceOf(header).body.index % kReceiveSlots].slot.load(
                  std::memory_order_relaxed)
            : pieceOf(header).body.place.slot;
  Slot& slot = end_.slots_[at];
  if (slot.staged != nullptr) {
    const Piece piece = pieceOf(header);
    slot.staged->arrived(piece.body.base + piece.offset, header.bytes, piece.body.total);
    return;
  }
  slot.received.fetch_add(header.bytes, std::memory_order_release);
}

}  // namespace hoccl::net_plugin
