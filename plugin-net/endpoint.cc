#include "plugin-net/endpoint.h"

#include <time.h>

#include "common/base/log.h"
#include "common/base/time.h"

namespace hoccl::net_plugin {
namespace {

/// What a peer says to an end that closes: places, and what concerns queue pairs.
struct Discard final : FrameSink {
  std::byte* place(const FrameHeader& header, Status* /*bad*/) override {
    payload.resize(header.bytes);  // at most Bundle::kMaxControlPayload
    return payload.data();
  }
  void arrived(const FrameHeader& /*header*/) override {}
  std::vector<std::byte> payload;
};

}  // namespace

Status Endpoint::makeLink(std::shared_ptr<const VerbsGround> ground, const VerbsSettings& settings,
                          const PathExtent& extent, bool connecting) {
  LinkChannel& channel = *this;
  auto link = std::make_unique<VerbsLink>(channel, std::move(ground), settings, connecting);
  if (Status status = link->make(extent); !status) return status;
  link_ = std::move(link);
  return {};
}

bool Endpoint::tell(std::uint16_t kind, const void* payload, std::size_t bytes) {
  if (!bundle_ || !bundle_->sendControl(kind, {}, payload, bytes)) return false;
  said_ += sizeof(FrameHeader) + bytes;
  return true;
}

bool Endpoint::sayNow(Kind kind, const Control& control, const void* payload, std::size_t bytes) {
  if (!flush()) return false;
  if (!bundle_->sendControl(static_cast<std::uint16_t>(kind), pack(control), payload, bytes)) {
    return false;
  }
  said_ += sizeof(FrameHeader) + bytes;
  return true;
}

void Endpoint::say(Kind kind, const Control& control, const DirectPlace* place) {
  if (bundle_->endingSinceNs() != 0) return;  // nobody listens any more
  if (sayNow(kind, control, place, place != nullptr ? sizeof *place : 0)) return;
  outbox_.push_back({kind, control, place != nullptr ? *place : DirectPlace(), place != nullptr});
}

bool Endpoint::flush() {
  if (!outbox_.empty() && bundle_->endingSinceNs() != 0) outbox_.clear();
  while (!outbox_.empty()) {
    const Waiting& first = outbox_.front();
    const std::size_t bytes = first.placed ? sizeof first.place : 0;
    if (!bundle_->sendControl(static_cast<std::uint16_t>(first.kind), pack(first.control),
                              &first.place, bytes)) {
      return false;
    }
    said_ += sizeof(FrameHeader) + bytes;
    outbox_.pop_front();
  }
  return true;
}

void Endpoint::receive(FrameSink& sink, bool* gone) {
  const bool goneBefore = bundle_->gone();  // first: what it said before can be taken afterwards
  (void)flush();
  const bool came = bundle_->receiveControl(sink);
  *gone = goneBefore && !came && bundle_->controlOver();
}

Status Endpoint::whyGone() const {
  const Status why = bundle_->status();
  return why.ok() ? Status::error(Code::Remote, "the peer is gone") : why;
}

Status Endpoint::fail(const Status& status) {
  if (!failure_) return failure_;
  failure_ = status.inContext(fmt::format("{} {}", role_, peer_));
  logError("{}", failure_.message());
  stopNics();
  bundle_.reset();
  return failure_;
}

void Endpoint::stopNics() {
  if (link_) link_->stop();
  if (loopback_ != nullptr) loopback_->stop();
}

void Endpoint::shut(bool linger) {
  if (!bundle_) {
    stopNics();
    return;
  }
  const Deadline deadline = Deadline::afterMs(kLingerMs);
  (void)flush();
  if (linger) bundle_->sayEnd();
  Discard discard;
  while (linger && !bundle_->gone() && !bundle_->drained() && !deadline.passed()) {
    const timespec pause{0, 100000};
    ::nanosleep(&pause, nullptr);
    (void)bundle_->receiveControl(discard);
  }
  stopNics();
  bundle_.reset();
}

}  // namespace hoccl::net_plugin
