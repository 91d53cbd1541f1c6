#include "common/net/verbs/mender.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <utility>

#include "common/net/verbs/work_request.h"

namespace hoccl {

Status Mender::open() {
  event_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return event_ ? Status() : Status::fromErrno("eventfd of a verbs connection", errno);
}

void Mender::place(Order order) {
  order_ = std::move(order);
  state_.store(kOrdered, std::memory_order_release);
  const std::uint64_t one = 1;
  [[maybe_unused]] ssize_t put = ::write(event_.get(), &one, sizeof one);
}

bool Mender::take(Order* out) {
  if (state_.load(std::memory_order_acquire) != kDone) return false;
  *out = std::move(order_);
  order_ = Order();
  state_.store(kIdle, std::memory_order_release);
  return true;
}

void Mender::work(const VerbsSettings& settings, const QueuePairShape& shape) {
  std::uint64_t rings = 0;
  [[maybe_unused]] ssize_t got = ::read(event_.get(), &rings, sizeof rings);
  if (state_.load(std::memory_order_acquire) != kOrdered) return;
  const Rail& rail = *order_.path->rail;
  Status& status = order_.status;
  if (order_.kind != Order::Kind::Connect) {
    order_.old = QueuePair();
    status = QueuePair::create(rail.nic, rail.completions, settings, shape, &order_.pair);
    if (status) {
      const int error =
          postReceives(order_.pair, order_.path->index, order_.generation, shape.receiveDepth);
      if (error != 0) status = Status::fromErrno("no receives can be posted", error);
    }
  }
  if (status && order_.kind != Order::Kind::Make) {
    status = order_.pair.connect(settings, order_.peer);
  }
  state_.store(kDone, std::memory_order_release);
}

}  // namespace hoccl
