// Sends and receives that NCCL makes because of their size. Their count is what tells that one of
// them was meant to meet a steered operation of the peer.

#include "plugin-tuner/passed_calls.h"

#include <fmt/format.h>
#include <unistd.h>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/runtime/pair_counts.h"
#include "plugin-tuner/call_support.h"
#include "plugin-tuner/open_group.h"
#include "plugin-tuner/process_core.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {
namespace {

/// Has the mover fail the communicator here and at the peer.
void tellMover(const PassedCall& call, std::uint64_t passed) {
  SteeredComm& comm = *call.comm;
  OpDescriptor descriptor{};
  descriptor.kind = OpKind::Disagree;
  descriptor.communicator = comm.moverIndex;
  descriptor.generation = comm.moverGeneration;
  descriptor.peer = call.peer;
  descriptor.launchSlot = call.send ? 0 : 1;
  descriptor.bytes = call.bytes;
  descriptor.pairSequence =
      comm.counts(call.peer, call.send).steered.load(std::memory_order_relaxed);
  descriptor.passed = passed;
  comm.mover->push(descriptor);
  comm.mover->ring();
}

/// The mover's words, which know the peer's host and size; a bounded wait.
Status disagreement(const PassedCall& call, std::uint64_t passed) {
  SteeredComm& comm = *call.comm;
  tellMover(call, passed);
  const Deadline deadline = Deadline::afterMs(ProcessCore::get().config().timeoutMs);
  while (!deadline.passed() && !comm.ended) {
    if (Status status = comm.health(); !status) return status;
    ::usleep(100);
  }
  if (comm.ended) return abortedStatus();
  const Status status = Status::error(
      Code::InvalidArgument,
      fmt::format("a {} rank {} of {} bytes, below HOCCL_MIN_BYTES, meets a steered {} there: the "
                  "two ranks' counts differ",
                  call.send ? "send to" : "receive from", call.peer, call.bytes,
                  call.send ? "receive" : "send"));
  comm.fail(status);
  logError("rank {} of {}: {}", comm.rank, comm.ranks, status.message());
  return status;
}

}  // namespace

Status notePassed(const PassedCall& call, OpenGroup& open) {
  PairDirection& counts = call.comm->counts(call.peer, call.send);
  const std::uint64_t passed = ++call.comm->passed(call.peer, call.send);
  if (open.depth > 0) {
    open.passed.push_back(call);
    return {};
  }
  counts.passed.fetch_add(1, std::memory_order_seq_cst);
  if (!passesAwaited(counts, passed)) return {};
  --call.comm->passed(call.peer, call.send);
  counts.passed.fetch_sub(1, std::memory_order_seq_cst);
  return disagreement(call, passed);
}

void takeBack(const PassedCall& call, OpenGroup& open) {
  --call.comm->passed(call.peer, call.send);
  if (open.depth > 0) {
    open.passed.pop_back();
  } else {
    call.comm->counts(call.peer, call.send).passed.fetch_sub(1, std::memory_order_seq_cst);
  }
}

Status publishAll(const std::vector<PassedCall>& calls, SteeredComm** where) {
  const PassedCall* first = nullptr;
  std::uint64_t itsPassed = 0;
  for (const PassedCall& call : calls) {
    PairDirection& counts = call.comm->counts(call.peer, call.send);
    const std::uint64_t passed = counts.passed.fetch_add(1, std::memory_order_seq_cst) + 1;
    if (first || call.comm->ended || !passesAwaited(counts, passed)) continue;
    first = &call;
    itsPassed = passed;
  }
  if (!first) return {};
  takeBackAll(calls, true);
  *where = first->comm;
  return disagreement(*first, itsPassed);
}

void takeBackAll(const std::vector<PassedCall>& calls, bool published) {
  for (const PassedCall& call : calls) {
    --call.comm->passed(call.peer, call.send);
    if (!published) continue;
    call.comm->counts(call.peer, call.send).passed.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace hoccl
