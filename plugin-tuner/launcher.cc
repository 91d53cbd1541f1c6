#include "plugin-tuner/launcher.h"

#include <algorithm>
#include <array>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "common/runtime/chunk_plan.h"
#include "plugin-tuner/process_core.h"

namespace hoccl {
namespace {
constexpr std::size_t kReserve = 256;

/// Events of threads that have ended, by context, for those that come: destroying them would be a
/// CUDA call outside of NCCL's (rule 1). Never destroyed, since threads end while the process does.
struct SpareEvents {
  std::mutex mutex;
  std::vector<std::pair<CUcontext, CUevent>> events;

  static SpareEvents& ofThisProcess() {
    static auto* spare = new SpareEvents;
    return *spare;
  }
  void give(const std::vector<std::pair<CUcontext, CUevent>>& more) {
    // In a forked child it may be locked for ever; an event that is lost is nothing.
    const std::unique_lock lock(mutex, std::try_to_lock);
    if (lock) events.insert(events.end(), more.begin(), more.end());
  }
  bool take(CUcontext context, CUevent* out) {
    std::lock_guard lock(mutex);
    const auto found = std::find_if(events.begin(), events.end(),
                                    [&](const auto& each) { return each.first == context; });
    if (found == events.end()) return false;
    *out = found->second;
    events.erase(found);
    return true;
  }
};

}  // namespace

Launcher::Launcher() {
  ops_.reserve(kReserve);
  streams_.reserve(16);
  slots_.reserve(16);
  ownBlocks_.reserve(16);
}

Launcher::~Launcher() {
  if (!events_.empty()) SpareEvents::ofThisProcess().give(events_);
}

void Launcher::clear() {
  for (const PendingOp& op : ops_) {
    if (op.span) op.span->unpin();
  }
  ops_.clear();
  streams_.clear();
  // What a launch that failed half-way may still be using is never used again.
  for (const StagedBlock& each : blocks_) {
    if (!each.onStream) StagingPool::giveBack(each.block);
  }
  blocks_.clear();
  copies_.clear();
  ownBlocks_.clear();
}

bool Launcher::aborted() const {
  return std::any_of(ops_.begin(), ops_.end(),
                     [](const PendingOp& op) { return op.comm->ended.load(); });
}

/// One slot per (mover, stream). All streams of one mover form one launch, which the first one
/// names.
Status Launcher::prepare() {
  if (!driver_) HOCCL_RETURN_IF_ERROR(Driver::load(&driver_));
  if (ops_.size() > 2 && ProcessCore::get().ownBlocksByKernel()) takeOwnBlocks(&ops_, &ownBlocks_);
  for (const PendingOp& op : ops_) {
    bool known = false;
    for (const StreamLaunch& launch : streams_) {
      known = known || launch.has(op);
    }
    if (known) continue;
    streams_.push_back({op.comm->mover, op.comm->waits, op.comm->context, op.stream, {}, false});
  }
  // Mover by mover, in one order for all threads, so that none waits for slots another one holds
  // while that one waits for its.
  std::sort(streams_.begin(), streams_.end(), [](const StreamLaunch& a, const StreamLaunch& b) {
    return std::less<>()(a.mover, b.mover);
  });
  for (std::size_t first = 0; first < streams_.size();) {
    slots_.clear();
    std::size_t end = first;
    for (; end < streams_.size() && streams_[end].mover == streams_[first].mover; ++end) {
      slots_.push_back(&streams_[end].slot);
    }
    if (Status status = streams_[first].mover->takeSlots(slots_, [this] { return aborted(); });
        !status) {
      streams_.resize(first);
      giveUp();
      return status;
    }
    first = end;
  }
  return {};
}

Status Launcher::enqueue(const AppCopy& copy, CUstream stream) const {
  std::byte* const staging = copy.block->data + copy.offset;
  if (!copy.host) {
    return copy.out
               ? HOCCL_CU(driver_, cuMemcpyDtoHAsync(staging, copy.buffer, copy.bytes, stream))
               : HOCCL_CU(driver_, cuMemcpyHtoDAsync(copy.buffer, staging, copy.bytes, stream));
  }
  // The driver makes a copy from host to host on the CPU, and the call waits for the stream.
  auto* const buffer = reinterpret_cast<std::byte*>(copy.buffer);
  const CUdeviceptr scratch = copy.block->scratch;
  for (std::uint64_t at = 0; at < copy.bytes;) {
    const std::uint64_t length = chunkLength(copy.bytes, at, StagingPool::kScratchBytes);
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(
        driver_, cuMemcpyHtoDAsync(scratch, (copy.out ? buffer : staging) + at, length, stream)));
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(
        driver_, cuMemcpyDtoHAsync((copy.out ? staging : buffer) + at, scratch, length, stream)));
    at += length;
  }
  return {};
}

Status Launcher::copyOut(const StreamLaunch& launch) {
  for (const StagedCopy& each : copies_) {
    if (!each.copy.out || !launch.has(each)) continue;
    HOCCL_RETURN_IF_ERROR(enqueue(each.copy, launch.stream));
    for (StagedBlock& staged : blocks_) staged.onStream |= staged.block == each.copy.block;
  }
  return {};
}

Status Launcher::copyOwnBlocks(const StreamLaunch& launch) {
  const ContextGuard guard(driver_, launch.context);
  for (const OwnBlock& each : ownBlocks_) {
    if (!launch.has(each) || each.to == each.from) continue;
    HOCCL_RETURN_IF_ERROR(
        HOCCL_CU(driver_, cuMemcpyDtoDAsync(each.to, each.from, each.bytes, launch.stream)));
    ProcessCore::get().countOwnBlock();
  }
  return {};
}

/// When the start is on the stream: by what the launch's blocks will be free.
void Launcher::noteLaunch(const StreamLaunch& launch) {
  for (StagedBlock& each : blocks_) {
    if (!launch.has(each)) continue;
    each.onStream = true;
    if (each.comesIn) continue;
    each.block->sequence = launch.slot.sequence;
    each.block->launch.store(&launch.mover->segment().launch(launch.slot.index),
                             std::memory_order_release);
  }
}

Status Launcher::copyIn(const StreamLaunch& launch) {
  const ContextGuard guard(driver_, launch.context);
  for (const StagedCopy& each : copies_) {
    if (each.copy.out || !launch.has(each)) continue;
    HOCCL_RETURN_IF_ERROR(enqueue(each.copy, launch.stream));
  }
  for (const StagedBlock& each : blocks_) {
    if (!each.comesIn || !launch.has(each)) continue;
    HOCCL_RETURN_IF_ERROR(
        HOCCL_CU(driver_, cuStreamWriteValue64(launch.stream, each.block->doneAddress,
                                               each.block->turn, CU_STREAM_WRITE_VALUE_DEFAULT)));
  }
  return {};
}

Status Launcher::copyAllIn() {
  if (copies_.empty() && ownBlocks_.empty()) return {};
  for (const StreamLaunch& launch : streams_) HOCCL_RETURN_IF_ERROR(copyIn(launch));
  return streams_.size() > 1 ? joinStreams(false) : Status();
}

bool Launcher::copies(const StreamLaunch& launch, bool out) const {
  return std::any_of(
             copies_.begin(), copies_.end(),
             [&](const StagedCopy& each) { return each.copy.out == out && launch.has(each); }) ||
         std::any_of(ownBlocks_.begin(), ownBlocks_.end(),
                     [&](const OwnBlock& each) { return launch.has(each); });
}

/// One for each context does: a wait means the event as it was recorded last before it.
Status Launcher::event(CUcontext context, CUevent* out) {
  for (const auto& [its, event] : events_) {
    if (its != context) continue;
    *out = event;
    return {};
  }
  if (!SpareEvents::ofThisProcess().take(context, out)) {
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuEventCreate(out, CU_EVENT_DISABLE_TIMING)));
  }
  events_.emplace_back(context, *out);
  return {};
}

/// The streams of a group start together and end together, and so has what is copied on them: a
/// stream that copies out waits for all others of its mover, all others wait for one that has
/// copied in, and both hold for one with an own block.
Status Launcher::joinStreams(bool before) {
  for (const StreamLaunch& from : streams_) {
    const ContextGuard guard(driver_, from.context);
    CUevent reached = nullptr;
    for (const StreamLaunch& to : streams_) {
      if (&to == &from || to.mover != from.mover || !copies(before ? to : from, before)) continue;
      if (!reached) {
        HOCCL_RETURN_IF_ERROR(event(from.context, &reached));
        HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuEventRecord(reached, from.stream)));
      }
      HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver_, cuStreamWaitEvent(to.stream, reached, 0)));
    }
  }
  return {};
}

Status Launcher::issue(StreamLaunch& launch, bool start, bool wait, CUcontext current) {
  std::optional<ContextGuard> guard;
  if (launch.context != current) guard.emplace(driver_, launch.context);
  if (start && !blocks_.empty()) HOCCL_RETURN_IF_ERROR(copyOut(launch));
  std::array<CUstreamBatchMemOpParams, 2> operations{};
  unsigned count = 0;
  const auto submit = [&]() -> Status {
    if (count == 0) return {};
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(
        driver_, cuStreamBatchMemOp(launch.stream, std::exchange(count, 0), operations.data(), 0)));
    launch.issued = true;
    return {};
  };
  if (start) {
    auto& write = operations[count++].writeValue;
    write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    write.address = launch.mover->startAddress(launch.slot);
    write.value64 = launch.slot.sequence;
    write.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    if (!ownBlocks_.empty()) {
      HOCCL_RETURN_IF_ERROR(submit());
      HOCCL_RETURN_IF_ERROR(copyOwnBlocks(launch));
    }
  }
  WaitKind kind = WaitKind::MemoryOp;
  const CUdeviceptr finish = launch.mover->finishAddress(launch.slot);
  if (wait) {
    kind = launch.waits->choose(launch.stream,
                                &launch.mover->segment().launch(launch.slot.index).finish,
                                launch.slot.sequence);
  }
  if (wait && kind == WaitKind::MemoryOp) {
    auto& await = operations[count++].waitValue;
    await.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    await.address = finish;
    await.value64 = launch.slot.sequence;
    await.flags = CU_STREAM_WAIT_VALUE_GEQ;
  }
  HOCCL_RETURN_IF_ERROR(submit());
  if (start && !blocks_.empty()) noteLaunch(launch);
  if (!wait) return {};
  if (kind != WaitKind::MemoryOp) {
    if (!guard) guard.emplace(driver_, launch.context);
    HOCCL_RETURN_IF_ERROR(launch.waits->enqueue(kind, launch.stream, finish, launch.slot.sequence));
  }
  return {};
}

void Launcher::giveUp() {
  for (StreamLaunch& launch : streams_) {
    if (launch.issued) {
      launch.mover->letGo(launch.slot);
    } else {
      launch.mover->giveBack(launch.slot);
    }
  }
}

Status Launcher::begin(bool waitToo, CUcontext current) {
  HOCCL_RETURN_IF_ERROR(prepare());
  // One call for both where there is one stream. Else all starts first: streams share the GPU's
  // channels, and a start behind another stream's wait would never run.
  waiting_ = waitToo && streams_.size() == 1;
  if ((!copies_.empty() || !ownBlocks_.empty()) && streams_.size() > 1) {
    if (Status status = joinStreams(true); !status) {
      giveUp();
      return status;
    }
  }
  claim();
  for (StreamLaunch& launch : streams_) {
    if (Status status = issue(launch, true, waiting_, current); !status) {
      handOverNothing();
      giveUp();
      return status;
    }
  }
  handOver();
  // Behind the wait, and so not before the mover knows of the launch: a call blocks where a channel
  // is full.
  return waiting_ ? copyAllIn() : Status();
}

Status Launcher::launch(CUcontext current) {
  HOCCL_RETURN_IF_ERROR(begin(true, current));
  return waiting_ ? Status() : wait();
}

Status Launcher::start() { return begin(false, nullptr); }

Status Launcher::wait() {
  Status first;
  for (StreamLaunch& launch : streams_) {
    if (Status status = issue(launch, false, true, nullptr); !status && first) first = status;
  }
  return first ? copyAllIn() : first;
}

/// Not before copies of the application, which can take as long as its stream.
void Launcher::claim() {
  place_.reset();
  std::uint64_t place = 0;
  if (ops_.size() == 1 && blocks_.empty() && ops_.front().comm->mover->claim(&place)) {
    place_ = place;
  }
}

void Launcher::handOverNothing() {
  if (!place_) return;
  OpDescriptor nothing{};
  nothing.kind = OpKind::Nothing;
  ops_.front().comm->mover->push(nothing, *place_);
}

void Launcher::handOver() {
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    const StreamLaunch& lead = streams_[i];
    bool isLead = true;
    std::uint32_t streams = 0, ops = 0;
    for (std::size_t k = 0; k < streams_.size(); ++k) {
      if (streams_[k].mover != lead.mover) continue;
      isLead = isLead && k >= i;
      ++streams;
    }
    if (!isLead) continue;
    for (const PendingOp& op : ops_) ops += op.comm->mover == lead.mover ? 1 : 0;
    auto address = [&](OpDescriptor* descriptor) {
      descriptor->launchSlot = lead.slot.index;
      descriptor->launchSequence = lead.slot.sequence;
      descriptor->launchOps = ops;
      descriptor->launchStreams = streams;
    };
    for (std::size_t k = i + 1; k < streams_.size(); ++k) {
      if (streams_[k].mover != lead.mover) continue;
      OpDescriptor extra{};
      extra.kind = OpKind::ExtraStream;
      extra.pairSequence = streams_[k].slot.index;
      extra.bytes = streams_[k].slot.sequence;
      address(&extra);
      lead.mover->push(extra);
    }
    for (PendingOp& op : ops_) {
      if (op.comm->mover != lead.mover) continue;
      address(&op.descriptor);
      if (place_) {
        lead.mover->push(op.descriptor, *place_);
      } else {
        lead.mover->push(op.descriptor);
      }
      op.span = nullptr;
    }
    lead.mover->ring();
  }
}

}  // namespace hoccl
