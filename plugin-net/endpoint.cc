#include "plugin-net/endpoint.h"

#include <time.h>

#include "common/base/log.h"
#include "common/base/time.h"

namespace hoccl::net_plugin {
namespace {

/// What a peer says to an end that closes.
struct Discard final : FrameSink {
  std::byte* place(const FrameHeader& /*header*/, Status* bad) override {
    *bad = Status::error(Code::Remote, "a payload for an end that closes");
    return nullptr;
  }
  void arrived(const FrameHeader& /*header*/) override {}
};

}  // namespace

bool Endpoint::sayNow(Kind kind, const Control& control, const void* payload, std::size_t bytes) {
  if (!flush()) return false;
  if (!bundle_->sendControl(static_cast<std::uint16_t>(kind), pack(control), payload, bytes)) {
    return false;
  }
  said_ += sizeof(FrameHeader) + bytes;
  return true;
}

void Endpoint::say(Kind kind, const Control& control) {
  if (bundle_->endingSinceNs() != 0) return;  // nobody listens any more
  if (!sayNow(kind, control, nullptr, 0)) outbox_.push_back({kind, control});
}

bool Endpoint::flush() {
  if (!outbox_.empty() && bundle_->endingSinceNs() != 0) outbox_.clear();
  while (!outbox_.empty()) {
    const Waiting& first = outbox_.front();
    if (!bundle_->sendControl(static_cast<std::uint16_t>(first.kind), pack(first.control), nullptr,
                              0)) {
      return false;
    }
    said_ += sizeof(FrameHeader);
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
  bundle_.reset();
  return failure_;
}

void Endpoint::shut(bool linger) {
  if (!bundle_) return;
  const Deadline deadline = Deadline::afterMs(kLingerMs);
  (void)flush();
  if (linger) bundle_->sayEnd();
  Discard discard;
  while (linger && !bundle_->gone() && !bundle_->drained() && !deadline.passed()) {
    const timespec pause{0, 100000};
    ::nanosleep(&pause, nullptr);
    (void)bundle_->receiveControl(discard);
  }
  bundle_.reset();
}

}  // namespace hoccl::net_plugin
