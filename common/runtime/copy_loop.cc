#include "common/runtime/copy_loop.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "common/base/log.h"
#include "common/base/relax_cpu.h"
#include "common/base/time.h"

namespace hoccl {
namespace {

/// As in mover_loop.cc: while copies are in flight a nap would stretch them.
constexpr std::uint64_t kCopySpinFactor = 10;
constexpr std::uint64_t kFirstNapNs = 1000;
constexpr std::uint64_t kDrowsyNs = 10'000'000;
/// For copies in flight when the application ends.
constexpr std::uint64_t kLeaveMs = 1000;
/// Under this a copy into the device may go through the compute channel (rule 5).
constexpr std::uint64_t kSmallBytes = 32 << 10;

}  // namespace

std::size_t CopyLoop::Direction::flying() const {
  std::size_t count = 0;
  for (const auto& lane : inFlight) count += lane.size();
  return count;
}

CopyLoop::CopyLoop(Dependencies d, const Config& config)
    : segment_(d.segment),
      registration_(d.registration),
      imports_(d.imports),
      bell_(d.bell),
      depth_(config.laneDepth),
      spinNs_(config.spinUs * 1000),
      pollMaxNs_(config.pollMaxUs * 1000) {
  out_.lanes = std::move(d.out);
  in_.lanes = std::move(d.in);
}

void CopyLoop::run(const std::atomic<bool>& stop) {
  while (!stop.load(std::memory_order_acquire)) {
    bool moved = take();
    moved |= retire(out_);
    moved |= retire(in_);
    moved |= submit(out_, false);
    moved |= submit(in_, true);
    rest(moved);
  }
  const Deadline deadline = Deadline::afterMs(kLeaveMs);
  while (out_.flying() + in_.flying() > 0 && !deadline.passed()) {
    retire(out_);
    retire(in_);
    ::usleep(kFirstNapNs / 1000);
  }
}

bool CopyLoop::take() {
  bool any = false;
  for (std::uint32_t index = 0; segment_.pop(&head_, &index); any = true) {
    if (index >= segment_.slots()) continue;  // a torn segment
    const CopySlot& slot = segment_.slot(index);
    Copy copy;
    copy.slot = index;
    copy.turn = slot.turn;
    copy.pieces = std::min(slot.pieces, kCopyPieces);
    std::uint64_t bytes = 0;
    bool right = copy.pieces > 0;
    for (std::uint32_t i = 0; i < copy.pieces; ++i) {
      copy.piece[i] = slot.piece[i];
      right = right && copy.piece[i].bytes > 0 && copy.piece[i].bytes <= kCopySlotBytes - bytes;
      bytes += copy.piece[i].bytes;
    }
    if (!right) {
      fail(copy);
      continue;
    }
    (slot.toDevice != 0 ? in_ : out_).waiting.push_back(copy);
  }
  return any;
}

bool CopyLoop::retire(Direction& direction) {
  bool any = false;
  for (auto& lane : direction.inFlight) {
    while (!lane.empty() &&
           (broken_ || segment_.slot(lane.front().slot).done.reached(lane.front().turn))) {
      const Copy& copy = lane.front();
      for (std::uint32_t i = 0; i < copy.pieces; ++i) imports_->release(copy.piece[i]);
      // On a broken device nothing is reported by the lane any more.
      if (broken_ && !segment_.slot(copy.slot).done.reached(copy.turn)) fail(copy);
      lane.pop_front();
      any = true;
    }
  }
  return any;
}

bool CopyLoop::submit(Direction& direction, bool in) {
  bool any = false;
  if (!direction.unmapped.empty()) {
    direction.waiting.insert(direction.waiting.begin(), direction.unmapped.begin(),
                             direction.unmapped.end());
    direction.unmapped.clear();
  }
  while (!direction.waiting.empty() && direction.flying() < depth_) {
    const Copy copy = direction.waiting.front();
    direction.waiting.pop_front();
    CUdeviceptr addresses[kCopyPieces] = {};
    std::uint32_t used = 0;
    CopyImports::Use use = CopyImports::Use::Ready;
    while (!broken_ && used < copy.pieces) {
      use = imports_->use(copy.piece[used], &addresses[used]);
      if (use != CopyImports::Use::Ready) break;
      ++used;
    }
    if (broken_ || use != CopyImports::Use::Ready) {
      for (std::uint32_t i = 0; i < used; ++i) imports_->release(copy.piece[i]);
      if (!broken_ && use == CopyImports::Use::Pending) {
        direction.unmapped.push_back(copy);
        continue;
      }
      fail(copy);
      any = true;
      continue;
    }
    const std::size_t lane = direction.next++ % kLanes;
    direction.inFlight[lane].push_back(copy);
    any = true;
    if (const Status status = submitTo(*direction.lanes[lane], copy, addresses); !status) {
      breakDown(status);
      return true;
    }
    std::uint64_t bytes = 0, small = 0;
    for (std::uint32_t i = 0; i < copy.pieces; ++i) {
      bytes += copy.piece[i].bytes;
      small += copy.piece[i].bytes < kSmallBytes ? 1 : 0;
    }
    CopyHeader& header = segment_.header();
    (in ? header.copiesIn : header.copiesOut).fetch_add(1, std::memory_order_relaxed);
    (in ? header.bytesIn : header.bytesOut).fetch_add(bytes, std::memory_order_relaxed);
    if (in) header.smallIn.fetch_add(small, std::memory_order_relaxed);
  }
  return any;
}

Status CopyLoop::submitTo(Lane& lane, const Copy& copy, const CUdeviceptr* addresses) {
  std::byte* host = segment_.staging(copy.slot);
  for (std::uint32_t i = 0; i < copy.pieces; ++i) {
    LaneJob job;
    job.device = addresses[i];
    job.host = host;
    job.bytes = copy.piece[i].bytes;
    if (i + 1 == copy.pieces) {
      job.writes[0] = {registration_->deviceAddress(segment_.slot(copy.slot).done), copy.turn};
    }
    HOCCL_RETURN_IF_ERROR(lane.submit(job));
    host += job.bytes;
  }
  return {};
}

void CopyLoop::fail(const Copy& copy) {
  CopySlot& slot = segment_.slot(copy.slot);
  slot.failed.store(copy.turn, std::memory_order_release);
  slot.done.set(copy.turn);
}

void CopyLoop::breakDown(const Status& status) {
  if (broken_) return;
  broken_ = true;
  logError("the device does not copy any more: {}", status.message());
  setText(segment_.header().text, status.message());
  segment_.header().broken.store(1, std::memory_order_release);
}

/// What the loop does between rounds: goes on at once while things move, spins, naps, sleeps.
void CopyLoop::rest(bool moved) {
  if (moved) {
    idleSinceNs_ = 0;
    napNs_ = 0;
    return;
  }
  const std::uint64_t now = monotonicNs();
  if (idleSinceNs_ == 0) idleSinceNs_ = now;
  const std::size_t flying = out_.flying() + in_.flying();
  if (now - idleSinceNs_ < spinNs_ * (flying > 0 ? kCopySpinFactor : 1)) {
    relaxCpu();
    return;
  }
  const bool active = flying > 0 || !out_.unmapped.empty() || !in_.unmapped.empty();
  const bool sleep = !active && now - idleSinceNs_ > kDrowsyNs;
  CopyHeader& header = segment_.header();
  if (sleep) {
    header.moverSleeps.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the application has its half in ring()
  }
  if (!sleep || segment_.empty(head_)) {
    napNs_ = std::clamp(napNs_ * 2, kFirstNapNs, std::max(kFirstNapNs, pollMaxNs_));
    const timespec nap{0, static_cast<long>(napNs_)};
    pollfd bell{bell_, POLLIN, 0};
    if (::ppoll(&bell, 1, sleep ? nullptr : &nap, nullptr) > 0) {
      std::uint64_t rings = 0;
      [[maybe_unused]] ssize_t got = ::read(bell_, &rings, sizeof rings);
      idleSinceNs_ = 0;
      napNs_ = 0;
    }
  }
  if (sleep) header.moverSleeps.store(0, std::memory_order_relaxed);
}

}  // namespace hoccl
