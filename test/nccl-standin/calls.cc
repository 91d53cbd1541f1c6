#include "calls.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "call_log.h"
#include "comm.h"
#include "group.h"
#include "reduce.h"

namespace standin {
namespace {

constexpr int kAll = -1;
constexpr int kNobody = -2;

bool isReduction(Kind kind) {
  return kind == Kind::AllReduce || kind == Kind::Reduce || kind == Kind::ReduceScatter;
}

/// An operator of the application's is looked up at the call: it may be destroyed right after.
std::string resolveOperator(Operation& op) {
  if (op.reduction >= ncclNumOps) {
    const std::lock_guard lock(op.comm->belongings);
    const auto made = op.comm->operators.find(op.reduction);
    if (made == op.comm->operators.end() || made->second.type != op.type) {
      return fmt::format("no operator {} for data type {} on this communicator",
                         static_cast<int>(op.reduction), static_cast<int>(op.type));
    }
    op.scale = made->second;
    return "";
  }
  if (canReduce(op.type, op.reduction)) return "";
  return fmt::format("the stand-in cannot reduce data type {} by operator {}",
                     static_cast<int>(op.type), static_cast<int>(op.reduction));
}

/// Common to all operations. Without `hasPeer` the peer is -1.
ncclResult_t check(const char* function, Operation& op, bool hasPeer) {
  record(function, {.comm = op.comm,
                    .peer = op.peer,
                    .bytes = op.count * typeSize(op.type),
                    .dtype = op.type,
                    .stream = op.stream});
  if (const ncclResult_t ready = ensureReady(op.comm); ready != ncclSuccess) {
    return failInGroup(ready);
  }
  if (op.comm->revoked) {
    return failInGroup(report(Outcome::error(
        ncclInvalidUsage, fmt::format("{}: the communicator was revoked", function))));
  }
  std::string wrong;
  if (!typeSize(op.type)) {
    wrong = fmt::format("data type {}", static_cast<int>(op.type));
  } else if (op.peer < (hasPeer ? 0 : -1) || op.peer >= op.comm->nranks) {
    wrong = fmt::format("rank {} of {}", op.peer, op.comm->nranks);
  } else if (isReduction(op.kind)) {
    wrong = resolveOperator(op);
  }
  if (wrong.empty()) return ncclSuccess;
  return failInGroup(
      report(Outcome::error(ncclInvalidArgument, fmt::format("{}: {}", function, wrong))));
}

/// Sends to `to` and receives from `from`: a rank, kAll or kNobody. `count` elements each; with
/// kAll the n-th rank's lie at n.
ncclResult_t lower(const Operation& whole, int to, int from) {
  const std::size_t bytes = whole.count * typeSize(whole.type);
  groupBegin();
  for (int peer = 0; peer < whole.comm->nranks; ++peer) {
    Operation op = whole;
    op.peer = peer;
    if (to == kAll || to == peer) {
      op.kind = Kind::Send;
      op.in = static_cast<const char*>(whole.in) + (to == kAll ? peer * bytes : 0);
      submit(op);
    }
    if (from == kAll || from == peer) {
      op.kind = Kind::Receive;
      op.out = static_cast<char*>(whole.out) + (from == kAll ? peer * bytes : 0);
      submit(op);
    }
  }
  return groupFinish();
}

}  // namespace

ncclResult_t operate(const char* function, Operation op) {
  const bool symmetric =
      op.kind == Kind::AllReduce || op.kind == Kind::ReduceScatter || op.kind == Kind::AllGather;
  const ncclResult_t checked = check(function, op, !symmetric);
  if (checked != ncclSuccess) return checked;
  if (op.kind == Kind::AllGather) noteCopyEngines(op);
  return submit(std::move(op));
}

ncclResult_t allToAll(const char* function, const Operation& whole) {
  Operation op = whole;
  const ncclResult_t checked = check(function, op, false);
  if (checked != ncclSuccess) return checked;
  noteCopyEngines(op);
  return lower(op, kAll, kAll);
}

ncclResult_t gather(const char* function, const Operation& whole) {
  Operation op = whole;
  const ncclResult_t checked = check(function, op, true);
  if (checked != ncclSuccess) return checked;
  noteCopyEngines(op);
  return lower(op, op.peer, op.comm->rank == op.peer ? kAll : kNobody);
}

ncclResult_t scatter(const char* function, const Operation& whole) {
  Operation op = whole;
  const ncclResult_t checked = check(function, op, true);
  if (checked != ncclSuccess) return checked;
  noteCopyEngines(op);
  return lower(op, op.comm->rank == op.peer ? kAll : kNobody, op.peer);
}

}  // namespace standin
