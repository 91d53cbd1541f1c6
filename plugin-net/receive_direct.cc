// A receiving end whose memory NICs reach: what they bring, its flush, small messages that the CPU
// cannot put there, and the attendant's turns.

#include <memory>

#include "common/base/time.h"
#include "plugin-net/receive_connection.h"

namespace hoccl::net_plugin {
namespace {

/// A loopback queue pair that is full has room again in microseconds.
constexpr std::uint64_t kFlushRoomNs = 1'000'000'000;

}  // namespace

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
  if (end_.link() == nullptr || prepared_.load(std::memory_order_relaxed)) return {};
  std::unique_ptr<Loopback> made;
  if (Status s = Loopback::create(*ground_, end_.link()->set().rails().size(), &made); !s) return s;
  const Turn turn(*this, true);
  if (!end_.failure()) return end_.failure();
  loopback_ = std::move(made);
  end_.alsoStop(loopback_.get());
  prepared_.store(true, std::memory_order_relaxed);
  return {};
}

Status ReceiveEnd::flush(std::span<void* const> data, const int* sizes,
                         std::span<const Memory* const> memory, Request** out) {
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
  // NCCL takes a null request for "there is nothing to flush", so this cannot come later.
  const Turn turn(*this, true);
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

bool ReceiveEnd::uneasy() const { return end_.failure().ok() && end_.link()->set().pressing(); }

}  // namespace hoccl::net_plugin
