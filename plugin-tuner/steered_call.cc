#include "plugin-tuner/steered_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/base/log.h"
#include "common/runtime/pair_window.h"
#include "plugin-tuner/call_support.h"
#include "plugin-tuner/communicators.h"
#include "plugin-tuner/process_core.h"
#include "plugin-tuner/real_nccl.h"

namespace hoccl {

SteeredCall::SteeredCall(ncclComm_t handle, cudaStream_t stream)
    : stream_(stream), open_(openGroup()) {
  if (!insideReal()) comm_ = ProcessCore::get().comms().find(handle);
}

bool SteeredCall::answer(const Status& status) {
  result_ = refuse(*comm_, status);
  return true;
}

/// Where the call goes. Depends only on what all ranks concerned see alike, and on capture, which
/// NCCL makes a property of all ranks.
Path SteeredCall::choose(Pairs pairs) {
  if (bytes_ < ProcessCore::get().config().minBytes) return Path::NcclSmall;
  const auto rank = static_cast<std::size_t>(pairs.rank);
  const bool known =
      pairs.kind == Pairs::Kind::All || (pairs.rank >= 0 && pairs.rank < comm_->ranks);
  if (!known) return Path::NcclPair;
  if (pairs.kind == Pairs::Kind::Peer) {
    if (!comm_->steering()) return Path::NcclUnsteered;
    if (!comm_->reachable[rank]) return Path::NcclPair;
  } else {
    if (comm_->reachesAll.empty()) return Path::NcclUnsteered;
    const bool all = pairs.kind == Pairs::Kind::All ? comm_->allReachAll : comm_->reachesAll[rank];
    if (!all) return comm_->steering() ? Path::NcclPair : Path::NcclUnsteered;
    if (!comm_->steering()) return Path::NcclUnsteered;
  }
  return captured() ? Path::NcclCapture : Path::Staged;
}

/// Whether a capture records what the stream is given.
bool SteeredCall::captured() {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  CUresult asked = driver_->cuStreamIsCapturing(stream_, &capture);
  if (asked == CUDA_ERROR_INVALID_CONTEXT && !context_) {  // the thread has none at all
    context_.emplace(driver_, comm_->context);
    asked = driver_->cuStreamIsCapturing(stream_, &capture);
  }
  // The legacy stream cannot be asked while another stream is captured; that, too, is a capture.
  // Any other error is this rank's alone, and the launch will report it: passing the call to NCCL
  // would leave the others waiting on the other path.
  return asked == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT ||
         (asked == CUDA_SUCCESS && capture != CU_STREAM_CAPTURE_STATUS_NONE);
}

/// Counts a send or receive that NCCL makes between ranks that steer larger ones. False: it cannot
/// match what the peer waits in, and has been answered with that.
bool SteeredCall::passOn(Path path, Pairs pairs) {
  // Empty ones need no other side; on a communicator that has ended NCCL says what is wrong.
  if (comm_->ended) return true;
  if (path != Path::NcclSmall || pairs.kind != Pairs::Kind::Peer || bytes_ == 0) return true;
  if (!comm_->steering() || pairs.rank < 0 || pairs.rank >= comm_->ranks ||
      pairs.rank == comm_->rank || !comm_->reachable[static_cast<std::size_t>(pairs.rank)]) {
    return true;
  }
  if (captured()) {
    comm_->counts(pairs.rank, pairs.send).captured.store(1, std::memory_order_relaxed);
    return true;
  }
  const PassedCall call{comm_, pairs.rank, pairs.send, bytes_};
  if (Status status = notePassed(call, open_); !status) {
    answer(status);
    return false;
  }
  passed_ = call;
  return true;
}

/// Whether HOCCL_STRICT makes an error of the call: by kind and size it could have been steered.
bool SteeredCall::strictRefuses(Path path, Pairs pairs) const {
  const Config& config = ProcessCore::get().config();
  if (!config.strict || bytes_ < config.minBytes) return false;
  if (path != Path::NcclUnsteered && path != Path::NcclPair) return false;
  if (pairs.kind == Pairs::Kind::All) return true;
  if (pairs.rank < 0 || pairs.rank >= comm_->ranks)
    return false;  // NCCL says what is wrong with it
  return pairs.kind == Pairs::Kind::Root || pairs.rank != comm_->rank;
}

bool SteeredCall::takes(const char* verb, Pairs pairs, ncclDataType_t type, std::size_t count) {
  if (insideReal()) return false;
  if (!comm_) {
    open_.real = true;
    return false;
  }
  if (comm_->settingUp.load(std::memory_order_acquire)) {
    // An application that did not wait for its non-blocking communicator: the verdict has to come
    // first.
    result_ = finishSetups({comm_});
    if (result_ != ncclSuccess) return true;
  }
  const std::size_t element = typeBytes(type);
  bytes_ = element * count;
  if (comm_->steering()) {
    comm_->mover->prefetchLaunch();
    (void)Driver::load(&driver_);
    // A thread may call without a current context, or with another device's. That matters to the
    // streams that mean one of the current context.
    if (!namesItsContext(stream_)) context_.emplace(driver_, comm_->context);
  }
  const Path path = element == 0 ? Path::NcclPair : choose(pairs);
  if (path != Path::Staged) {
    if (strictRefuses(path, pairs)) {
      const Status unsteered = Status::error(
          Code::Unsupported,
          fmt::format("HOCCL_STRICT=1: {}{} of {} bytes is not steered: {}", verb,
                      pairs.kind == Pairs::Kind::Peer ? fmt::format(" rank {}", pairs.rank) : "",
                      bytes_,
                      path == Path::NcclUnsteered
                          ? comm_->reason
                          : "no transport connects all the ranks between which it moves data"));
      logError("rank {} of {}: {}", comm_->rank, comm_->ranks, unsteered.message());
      return answer(unsteered);
    }
    if (!passOn(path, pairs)) return true;
    comm_->count(path, bytes_);
    open_.real = true;
    return false;
  }
  if (Status status = comm_->health(); !status) {
    logError("rank {} of {}: {}", comm_->rank, comm_->ranks, status.message());
    return answer(status);
  }
  return true;
}

SteeredCall::~SteeredCall() {
  for (StagingPool::Block* block : taken_) {
    if (block) StagingPool::giveBack(block);
  }
  for (SpanSlot* span : pinned_) {
    if (span) span->unpin();
  }
}

Status SteeredCall::stage(const void* buffer, std::uint64_t bytes, Buffer* out) {
  if (!context_) context_.emplace(driver_, comm_->context);
  const ForeignMemory memory = foreignMemory(driver_, buffer);
  if (!memory.known) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("the buffer at {} is {}", buffer, memory.name));
  }
  StagingPool& pool = comm_->mover->staging();
  const bool first = !staged_ && !open_.launcher.holdsBlocks();
  HOCCL_RETURN_IF_ERROR(pool.take(
      bytes, first, [this] { return comm_->ended.load(); }, &out->block));
  *std::find(taken_.begin(), taken_.end(), nullptr) = out->block;
  if (memory.host) HOCCL_RETURN_IF_ERROR(pool.scratch(out->block));
  const StagingPool::Block& block = *out->block;
  out->ref.kind = BufferKind::Staging;
  out->ref.allocationId = block.id;
  out->ref.allocationBase = reinterpret_cast<std::uint64_t>(block.memory.data());
  out->ref.allocationBytes = block.memory.size();
  out->ref.offset =
      static_cast<std::uint64_t>(block.data - static_cast<std::byte*>(block.memory.data()));
  out->address = reinterpret_cast<CUdeviceptr>(buffer);
  out->bytes = bytes;
  out->host = memory.host;
  staged_ = true;
  return {};
}

Status SteeredCall::exportTo(const void* buffer, std::uint64_t bytes, Buffer* out) {
  ExportedBuffer exported;
  HOCCL_RETURN_IF_ERROR(exportBuffer(driver_, comm_->context, buffer, bytes, &exported));
  if (exported.segments) {
    if (ProcessCore::get().config().spans == "off") {
      return Status::error(Code::Unsupported,
                           "the buffer is memory of cuMemCreate, and HOCCL_SPANS is off");
    }
    HOCCL_RETURN_IF_ERROR(comm_->mover->spans().take(reinterpret_cast<CUdeviceptr>(buffer), bytes,
                                                     exported.allocationId, &out->ref, &out->span));
    *std::find(pinned_.begin(), pinned_.end(), nullptr) = out->span;
    return {};
  }
  out->ref.kind = BufferKind::Device;
  out->ref.allocationId = exported.allocationId;
  out->ref.allocationBase = exported.base;
  out->ref.allocationBytes = exported.allocationBytes;
  out->ref.offset = exported.offset;
  std::memcpy(out->ref.ipcHandle, exported.handle, sizeof out->ref.ipcHandle);
  return {};
}

bool SteeredCall::exports(const void* buffer, std::uint64_t bytes, Buffer* out) {
  const ProcessCore& core = ProcessCore::get();
  Status status;
  bool stages = core.appCopiesOnly();
  if (!stages) {
    out->address = reinterpret_cast<CUdeviceptr>(buffer);
    status = exportTo(buffer, bytes, out);
    if (status) return true;
    stages = status.code() == Code::Unsupported && core.config().appCopies != "never";
    if (status.code() == Code::Unsupported && !stages) {
      status = status.inContext("HOCCL_APP_COPIES=never");
    }
  }
  if (stages) status = stage(buffer, bytes, out);
  if (status) return true;
  logError("rank {} of {}: {}", comm_->rank, comm_->ranks, status.message());
  answer(status);
  return false;
}

/// A pin for one more operation: the buffer's own for the first one.
SpanSlot* SteeredCall::pinFor(const Buffer& buffer) {
  if (!buffer.span) return nullptr;
  const auto own = std::find(pinned_.begin(), pinned_.end(), buffer.span);
  if (own != pinned_.end()) {
    *own = nullptr;
  } else {
    buffer.span->pinAgain();  // before the first one's operation is handed over
  }
  return buffer.span;
}

/// Hands the block over to the launch, with the copy that fills it for sends.
void SteeredCall::noteBlock(OpKind kind, Buffer* buffer) {
  if (std::exchange(buffer->noted, true)) return;
  std::replace(taken_.begin(), taken_.end(), buffer->block,
               static_cast<StagingPool::Block*>(nullptr));
  Launcher& launcher = open_.launcher;
  launcher.add(comm_, stream_, buffer->block);
  if (kind != OpKind::Send) return;
  launcher.add(comm_, stream_,
               AppCopy{buffer->block, buffer->address, 0, buffer->bytes, true, buffer->host});
}

void SteeredCall::add(OpKind kind, Buffer* buffer, std::uint64_t offset, int peer,
                      bool collective) {
  PendingOp& op = open_.launcher.add();
  op.comm = comm_;
  op.stream = stream_;
  OpDescriptor& d = op.descriptor;
  d.kind = kind;
  d.communicator = comm_->moverIndex;
  d.generation = comm_->moverGeneration;
  d.peer = peer;
  d.bytes = bytes_;
  const bool counted = !staged_ && peer != comm_->rank && kind != OpKind::Mirror;
  if (counted) d.counted = std::exchange(countedOne_, true) ? 2 : 3;
  const auto index = static_cast<std::size_t>(peer);
  if (kind == OpKind::Mirror) {
    d.pairSequence = (comm_->collectiveSendSequence[index] - 1) | kCollectiveSequence;
  } else if (collective) {
    auto& sequences =
        kind == OpKind::Send ? comm_->collectiveSendSequence : comm_->collectiveRecvSequence;
    d.pairSequence = sequences[index]++ | kCollectiveSequence;
  } else {
    const bool send = kind == OpKind::Send;
    auto& sequences = send ? comm_->sendSequence : comm_->recvSequence;
    d.pairSequence = sequences[index]++;
    d.passed = comm_->passed(peer, send);
    comm_->counts(peer, send).steered.store(sequences[index], std::memory_order_release);
  }
  d.buffer = buffer->ref;
  d.buffer.offset += offset;
  op.span = pinFor(*buffer);
  if (!buffer->block) {
    op.address = buffer->address + offset;
    return;
  }
  noteBlock(kind, buffer);
  if (kind != OpKind::Send) {
    open_.launcher.add(
        comm_, stream_,
        AppCopy{buffer->block, buffer->address + offset, offset, bytes_, false, buffer->host});
  }
}

bool SteeredCall::copyOwn(const Buffer& in, std::uint64_t inOffset, const Buffer& out,
                          std::uint64_t outOffset) {
  // A launch of one's own block alone would have nothing for the mover to end.
  if (!ProcessCore::get().ownBlocksByKernel() || in.block || out.block || comm_->ranks == 1)
    return false;
  open_.launcher.add(
      OwnBlock{comm_, stream_, out.address + outOffset, in.address + inOffset, bytes_});
  return true;
}

ncclResult_t SteeredCall::launch(std::uint64_t movedBytes) {
  comm_->count(staged_ ? Path::AppCopies : Path::Staged, movedBytes);
  if (open_.depth > 0) return ncclSuccess;
  if (Status status = open_.launcher.launch(comm_->context); !status) {
    result_ = refuse(*comm_, launchFailed(status));
  }
  open_.launcher.clear();
  // Aborted by another thread while this one waited for room.
  if (result_ == ncclSuccess && comm_->ended) result_ = refuse(*comm_, abortedStatus());
  return result_;
}

}  // namespace hoccl
