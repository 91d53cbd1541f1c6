#include "plugin-net/send_connection.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>

namespace hoccl::net_plugin {
namespace {

/// While queue pairs carry a message, the control socket is looked at in each such test.
constexpr unsigned kTestsUnheard = 16;

}  // namespace

SendEnd::SendEnd(std::string peer, std::uint64_t inlineBytes,
                 std::shared_ptr<const VerbsGround> ground)
    : ground_(std::move(ground)),
      mayAhead_(!DeviceMemory::ofThisProcess().claimed()),
      inlineBytes_(inlineBytes),
      end_("sending to", std::move(peer)) {
  free_.reserve(kSendRequests);
  for (std::size_t i = kSendRequests; i-- > 0;) {
    requests_[i].connection = this;
    free_.push_back(static_cast<std::uint16_t>(i));
  }
}

SendEnd::~SendEnd() {
  leave();
  // With sends under way this is the end of everything, and nobody needs what was sent before.
  end_.shut(free_.size() == kSendRequests);
}

SendEnd::TagState* SendEnd::stateOf(int tag) {
  if (last_ != nullptr && lastTag_ == tag) return last_;
  auto found = tags_.find(tag);
  if (found == tags_.end()) {
    if (tags_.size() >= kMaxTags) return nullptr;
    found = tags_.try_emplace(tag).first;
  }
  lastTag_ = tag;
  last_ = &found->second;  // stays: nodes of the map do not move
  return last_;
}

SendEnd::TagState* SendEnd::knownState(int tag) {
  const auto found = tags_.find(tag);
  return found == tags_.end() ? nullptr : &found->second;
}

SendEnd::SendRequest* SendEnd::takeRequest() {
  if (free_.empty()) return nullptr;
  SendRequest* request = &requests_[free_.back()];
  free_.pop_back();
  return request;
}

Status SendEnd::progress(bool* gone) {
  end_.receive(controlSink_, gone);
  if (!heardBad_) return end_.fail(heardBad_);
  return {};
}

Status SendEnd::progressLink() {
  VerbsLink* const link = end_.link();
  if (link == nullptr || !end_.failure()) return end_.failure();
  link->progress();
  return link->failure();
}

Status SendEnd::advanceSetUp(bool* stands) {
  *stands = end_.link() == nullptr;
  if (*stands) return {};
  bool gone = false;
  if (Status status = progress(&gone); !status) return status;
  if (Status status = progressLink(); !status) return end_.fail(status);
  *stands = end_.link()->stands();
  if (*stands) join();
  return gone ? end_.fail(end_.whyGone()) : Status();
}

void SendEnd::attend() {
  if (!end_.failure()) return;
  bool gone = false;
  if (!progress(&gone)) return;
  if (Status status = progressLink(); !status) (void)end_.fail(status);
}

bool SendEnd::uneasy() const { return end_.failure().ok() && end_.link()->set().pressing(); }

Status SendEnd::send(const void* data, std::size_t bytes, int tag, const Memory* memory,
                     Request** out) {
  *out = nullptr;
  const Turn turn(*this);
  if (!turn) return {};  // later
  if (!end_.failure()) return end_.failure();
  if (bytes > nccl_abi::kMaxMessageBytes || (bytes > 0 && data == nullptr)) {
    return end_.fail(Status::error(Code::InvalidArgument,
                                   fmt::format("a send of {} bytes from {}", bytes, data)));
  }
  TagState* const state = stateOf(tag);
  if (state == nullptr) {
    return end_.fail(
        Status::error(Code::InvalidArgument, fmt::format("more than {} tags", kMaxTags)));
  }
  SendRequest* const request = takeRequest();
  if (request == nullptr) return {};
  request->data = static_cast<const std::byte*>(data);
  request->bytes = bytes;
  request->tag = tag;
  request->rails = nullptr;
  const bool onDevice = memory != nullptr && memory->rails && memory->rails->onDevice();
  if (memory != nullptr && memory->rails && (bytes > kEagerBytes || (onDevice && bytes > 0)) &&
      end_.link() != nullptr && end_.link()->reaches(memory->rails.get(), data, bytes)) {
    request->rails = memory->rails;
  }
  if (onDevice && bytes > 0 && request->rails == nullptr) {
    return end_.fail(Status::error(
        Code::InvalidArgument, fmt::format("a send of {} bytes from device memory at {}, of which "
                                           "regMr has not been told for this connection's NICs",
                                           bytes, data)));
  }
  if (memory != nullptr && memory->device != nullptr && bytes > 0) {
    if (!request->staged) request->staged = std::make_unique<StagedSend>();
    request->staged->begin(memory->device->shared_from_this(), data, bytes);
    request->named = false;
    staging_.push_back(request);
    if (Status status = sendLarge(*state, *request); !status) return status;
    if (Status status = progressStaged(); !status) return status;
    DeviceMemory::ofThisProcess().countSent(bytes);
  } else if (bytes <= kEagerBytes && request->rails == nullptr) {
    bool said = false;
    if (Status status = sendSmall(*state, *request, &said); !status) return status;
    if (!said) {
      free_.push_back(static_cast<std::uint16_t>(numberOf(*request)));
      return {};
    }
  } else if (Status status = sendLarge(*state, *request); !status) {
    return status;
  }
  *out = request;
  return {};
}

Status SendEnd::sendSmall(TagState& tag, SendRequest& request, bool* said) {
  bool gone = false;
  if (tag.unread >= kEagerWindow) {
    if (Status status = progress(&gone); !status) return status;
    if (gone) return end_.fail(end_.whyGone());
    if (tag.unread >= kEagerWindow) return {};
  }
  Control control;
  control.tag = request.tag;
  control.index = tag.next;
  control.bytes = request.bytes;
  if (!end_.sayNow(Kind::Message, control, request.data, request.bytes)) {
    if (Status status = progress(&gone); !status) return status;
    return gone ? end_.fail(end_.whyGone()) : Status();
  }
  ++tag.next;
  ++tag.unread;
  request.index = control.index;
  request.position = end_.said();
  request.stage = Stage::Small;
  *said = true;
  return {};
}

Status SendEnd::sendLarge(TagState& tag, SendRequest& request) {
  const PostedReceive& posted = tag.posted[tag.next % kReceiveSlots];
  if (posted.index != tag.next) {
    bool gone = false;  // its place may have been named already, and lie unread
    if (Status status = progress(&gone); !status) return status;
    if (gone) return end_.fail(end_.whyGone());
  }
  request.state = &tag;
  request.index = tag.next++;
  request.moved.store(0, std::memory_order_relaxed);
  request.ahead = false;
  ++tag.waiting;
  if (posted.index == request.index) {
    const Status status = takePosted(request, posted);
    return status.ok() ? status : end_.fail(status);
  }
  request.posted = 0;
  // Not past one of the same tag that is still here: it might never get by.
  if (&tag == ahead_ && tag.waiting == 1 && request.rails == nullptr) {
    request.ahead = true;
    aheadUpTo_ = request.index + 1;
    request.stage = Stage::Queueing;
    tryMove(request);
    return {};
  }
  request.stage = request.staged && request.staged->active() ? Stage::Staged : Stage::Asking;
  Control control;
  control.tag = request.tag;
  control.index = request.index;
  control.bytes = request.bytes;
  end_.say(Kind::Announce, control);
  return {};
}

Status SendEnd::takePosted(SendRequest& request, const PostedReceive& receive) {
  if (request.bytes > receive.bytes) {
    return Status::error(
        Code::InvalidArgument,
        fmt::format("a message of {} bytes (tag {}), and the receive posted for it "
                    "takes {}",
                    request.bytes, request.tag, receive.bytes));
  }
  request.receive = receive;
  if (request.staged && request.staged->active()) {
    request.stage = Stage::Staged;
    request.named = true;
    return {};
  }
  if (request.rails != nullptr && receive.isDirect) {
    --request.state->waiting;
    request.stage = Stage::Writing;
    end_.link()->write(numberOf(request), receive.place.slot, receive.direct, request.data,
                       request.bytes, request.rails);
    return {};
  }
  const bool fromDevice = request.rails != nullptr && request.rails->onDevice();
  if (fromDevice || (receive.isDirect && receive.direct.onDevice != 0)) {
    return Status::error(
        Code::InvalidArgument,
        fmt::format("a message of {} bytes (tag {}) {} device memory, and the other end's memory "
                    "is not registered with its NICs",
                    request.bytes, request.tag, fromDevice ? "from" : "into"));
  }
  request.stage = Stage::Queueing;
  request.posted = 0;
  tryMove(request);
  return {};
}

void SendEnd::tryMove(SendRequest& request) {
  // Messages sent ahead may lie in the data sockets and hold up what is behind them.
  const bool heldUp = aheadUpTo_ > namedUpTo_ && request.state != ahead_;
  if (!request.ahead && request.posted == 0 && request.receive.limit == 0 &&
      (request.bytes <= inlineBytes_ || heldUp)) {
    --request.state->waiting;
    request.stage = Stage::Saying;
    request.said = 0;
    return sayParts(request);
  }
  Transfer transfer;
  transfer.done = &request.moved;
  if (request.ahead) {
    AheadBody body;
    body.tag = request.tag;
    body.index = request.index;
    body.total = request.bytes;
    transfer.kind = static_cast<std::uint16_t>(Kind::Ahead);
    transfer.user = std::bit_cast<std::array<std::byte, sizeof body>>(body);
    transfer.data = request.data;
    transfer.bytes = request.bytes;
    if (!end_.bundle()->post(transfer)) return;
    request.posted = request.bytes;
  }
  const std::uint64_t limit = request.receive.limit;
  while (request.posted < request.bytes) {
    std::uint64_t bytes = request.bytes;  // all at once
    if (limit != 0) {
      const std::uint64_t end =
          std::min(request.bytes, (request.posted / kPartBytes + 1) * kPartBytes);
      if (end > limit) return;
      bytes = end - request.posted;
    }
    PieceBody body;
    body.place = request.receive.place;
    body.total = request.bytes;
    body.base = request.posted;
    transfer.kind = static_cast<std::uint16_t>(Kind::Data);
    transfer.user = std::bit_cast<std::array<std::byte, sizeof body>>(body);
    transfer.data = request.data + request.posted;
    transfer.bytes = bytes;
    if (!end_.bundle()->post(transfer)) return;
    request.posted += bytes;
  }
  --request.state->waiting;
  request.stage = Stage::Moving;
}

Status SendEnd::progressStaged() {
  for (std::size_t i = 0; i < staging_.size();) {
    SendRequest& request = *staging_[i];
    const std::uint64_t limit = request.receive.limit;
    const std::uint64_t granted = !request.named ? 0
                                  : limit == 0   ? request.bytes
                                                 : std::min(limit, request.bytes);
    if (Status status = request.staged->progress(*end_.bundle(), request.receive.place, granted);
        !status) {
      return end_.fail(status);
    }
    if (request.staged->finished()) {
      staging_.erase(staging_.begin() + static_cast<std::ptrdiff_t>(i));  // the order stays
    } else {
      ++i;
    }
  }
  return {};
}

void SendEnd::sayParts(SendRequest& request) {
  // Nothing behind a backlog: what the kernel does not take would be copied.
  while (request.said < request.bytes && end_.bundle()->controlBacklog() == 0) {
    Piece piece;
    piece.offset = request.said;
    piece.body.place = request.receive.place;
    piece.body.total = request.bytes;
    const std::uint64_t bytes =
        std::min<std::uint64_t>(request.bytes - request.said, Bundle::kMaxControlPayload);
    if (!end_.sayNow(Kind::Data, std::bit_cast<Control>(piece), request.data + request.said,
                     bytes)) {
      return;
    }
    request.said += bytes;
  }
  if (request.said < request.bytes) return;
  request.position = end_.said();
  request.stage = Stage::Small;  // all said: as a small one from here on
}

bool SendEnd::finished(const SendRequest& request) const {
  if (request.stage == Stage::Small) {
    return end_.failure().ok() && end_.taken() >= request.position;
  }
  if (request.stage == Stage::Staged) return request.staged->finished();
  if (request.stage == Stage::Writing) return end_.link()->written(numberOf(request));
  return request.stage == Stage::Moving &&
         request.moved.load(std::memory_order_acquire) == request.bytes;
}

Status SendEnd::test(Request* base, bool* done, int* sizes) {
  *done = false;
  const Turn turn(*this);
  if (!turn) return {};
  auto* const request = static_cast<SendRequest*>(base);
  // What is the peer's is so even if the queue pairs have failed since.
  Status linked;
  if (!finished(*request) && !(linked = progressLink(), finished(*request))) {
    if (!linked) return end_.fail(linked);
    if (request->stage == Stage::Queueing) tryMove(*request);
    if (request->stage == Stage::Saying) sayParts(*request);
    bool gone = false;
    // While the data sockets or queue pairs work there is little to hear, unless they cannot go on.
    const bool busy = request->stage == Stage::Moving ||
                      (request->stage == Stage::Writing && !end_.link()->set().pressing() &&
                       ++unheard_ % kTestsUnheard != 0);
    if (!busy || end_.bundle()->gone()) {
      if (Status status = progress(&gone); !status) return status;
    }
    if (!staging_.empty()) {
      if (Status status = progressStaged(); !status) return status;
    }
    // Looked at again: its last piece may have gone just before the end.
    if (!finished(*request)) return gone ? end_.fail(end_.whyGone()) : Status();
  }
  *done = true;
  if (sizes != nullptr) {
    sizes[0] = static_cast<int>(std::min<std::uint64_t>(request->bytes, INT_MAX));
  }
  if (request->stage == Stage::Staged) {
    request->staged->end();
    --request->state->waiting;
  }
  request->stage = Stage::Free;
  request->rails = nullptr;
  free_.push_back(static_cast<std::uint16_t>(numberOf(*request)));
  return {};
}

void SendEnd::heardPosted(const Control& control, const DirectPlace* direct) {
  TagState* const state = knownState(control.tag);
  if (state == nullptr || control.index >= state->next + kReceiveSlots) {
    heardBad_ = Status::error(Code::Remote,
                              fmt::format("it named receive {} of tag {}, which cannot be open",
                                          control.index, control.tag));
    return;
  }
  if (control.ahead != 0 && mayAhead_) {
    if (ahead_ == nullptr) ahead_ = state;
    if (ahead_ != state) {
      heardBad_ = Status::error(
          Code::Remote, fmt::format("it takes messages of a second tag ({}) ahead", control.tag));
      return;
    }
    namedUpTo_ = std::max(namedUpTo_, control.index + 1);
  }
  PostedReceive posted{control.index, control.bytes, control.limit, control.place, false, {}};
  if (direct != nullptr && control.place.slot < kReceiveSlots) {
    posted.isDirect = true;
    posted.direct = *direct;
  }
  if (control.index >= state->next) {
    state->posted[control.index % kReceiveSlots] = posted;
    return;
  }
  for (SendRequest& request : requests_) {
    const bool asks =
        request.stage == Stage::Asking || (request.stage == Stage::Staged && !request.named);
    if (asks && request.tag == control.tag && request.index == control.index) {
      heardBad_ = takePosted(request, posted);
      return;
    }
  }
  // Else it was a small one and has gone already.
}

void SendEnd::heardMore(const Control& control) {
  for (SendRequest& request : requests_) {
    if (request.stage == Stage::Writing && request.receive.place == control.place) {
      return end_.link()->more(numberOf(request), control.limit);
    }
    const bool named = request.stage == Stage::Queueing || request.stage == Stage::Moving ||
                       (request.stage == Stage::Staged && request.named);
    if (!named || request.receive.place != control.place || request.receive.limit == 0) continue;
    request.receive.limit = std::max(request.receive.limit, control.limit);
    if (request.stage == Stage::Queueing) tryMove(request);
    return;
  }
  // Of a message that has been asked for only now, or all of which is on its way.
}

void SendEnd::heardCredit(const Control& control) {
  TagState* const state = knownState(control.tag);
  if (state == nullptr || control.index > state->unread) {
    heardBad_ = Status::error(Code::Remote,
                              fmt::format("it gave back {} messages of tag {}, more than it has",
                                          control.index, control.tag));
    return;
  }
  state->unread -= control.index;
}

std::byte* SendEnd::ControlSink::place(const FrameHeader& header, Status* bad) {
  VerbsLink* const link = end_.end_.link();
  if (link != nullptr && VerbsLink::owns(header.kind)) return link->place(header, bad);
  if (link != nullptr && header.kind == static_cast<std::uint16_t>(Kind::Posted) &&
      header.bytes == sizeof direct_) {
    return reinterpret_cast<std::byte*>(&direct_);
  }
  *bad = Status::error(Code::Remote,
                       fmt::format("a receiving end sent {} bytes in a message of kind {}",
                                   header.bytes, header.kind));
  return nullptr;
}

void SendEnd::ControlSink::arrived(const FrameHeader& header) {
  if (!end_.heardBad_) return;
  if (end_.end_.link() != nullptr && VerbsLink::owns(header.kind)) {
    return end_.end_.link()->arrived(header);
  }
  const Control control = controlOf(header);
  switch (static_cast<Kind>(header.kind)) {
    case Kind::Posted:
      return end_.heardPosted(control, header.bytes > 0 ? &direct_ : nullptr);
    case Kind::More:
      return end_.heardMore(control);
    case Kind::Credit:
      return end_.heardCredit(control);
    default:
      end_.heardBad_ = Status::error(
          Code::Remote, fmt::format("a receiving end sent a message of kind {}", header.kind));
  }
}

std::byte* SendEnd::RefuseData::place(const FrameHeader& /*header*/, Status* bad) {
  *bad = Status::error(Code::Remote, "a receiving end sent data");
  return nullptr;
}

void SendEnd::RefuseData::arrived(const FrameHeader& /*header*/) {}

}  // namespace hoccl::net_plugin
