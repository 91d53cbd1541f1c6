#include "tools/bench/issue.h"

#include "common/gpu/driver.h"

namespace hoccl::bench {
namespace {

Status outcome(const Issuer& issuer, const char* call, ncclResult_t result) {
  if (result == ncclSuccess) return {};
  return issuer.nccl->error(call, result, issuer.communicator);
}

}  // namespace

bool Issuer::ownFunction() const {
  switch (plan.operation) {
    case Operation::SendRecv:
    case Operation::AlltoAllv:
      return false;
    case Operation::AllGather:
    case Operation::Broadcast:
      return true;
    case Operation::AlltoAll:
      return !grouped && nccl->alltoAll;
    case Operation::Gather:
      return !grouped && nccl->gather;
    case Operation::Scatter:
      return !grouped && nccl->scatter;
  }
  return false;
}

Status Issuer::group(const RankLayout& layout, const char* from, char* to) const {
  const bool several = layout.sends.size() + layout.receives.size() > 1;
  if (several) HOCCL_RETURN_IF_ERROR(outcome(*this, "ncclGroupStart", nccl->ncclGroupStart()));
  // Like PyTorch, neither side issues a block without bytes.
  for (const Message& message : layout.sends) {
    const std::size_t count = message.bytes / plan.elementBytes;
    if (count == 0) continue;
    HOCCL_RETURN_IF_ERROR(outcome(
        *this, "ncclSend",
        nccl->ncclSend(from + message.offset, count, type, message.peer, communicator, stream)));
  }
  for (const Message& message : layout.receives) {
    const std::size_t count = message.bytes / plan.elementBytes;
    if (count == 0) continue;
    HOCCL_RETURN_IF_ERROR(outcome(
        *this, "ncclRecv",
        nccl->ncclRecv(to + message.offset, count, type, message.peer, communicator, stream)));
  }
  return several ? outcome(*this, "ncclGroupEnd", nccl->ncclGroupEnd()) : Status();
}

Status Issuer::issue(const RankLayout& layout, const void* sendBase, void* receiveBase) const {
  const auto* sendBytes = static_cast<const char*>(sendBase);
  auto* receiveBytes = static_cast<char*>(receiveBase);
  if (!ownFunction()) return group(layout, sendBytes, receiveBytes);
  const void* in = sendBase ? sendBytes + layout.sendAt : nullptr;
  void* out = receiveBytes + layout.receiveAt;
  const std::size_t count = layout.callBytes / plan.elementBytes;
  switch (plan.operation) {
    case Operation::AllGather:
      return outcome(*this, "ncclAllGather",
                     nccl->ncclAllGather(in, out, count, type, communicator, stream));
    case Operation::Broadcast:
      return outcome(*this, "ncclBroadcast",
                     nccl->ncclBroadcast(in, out, count, type, plan.root, communicator, stream));
    case Operation::AlltoAll:
      return outcome(*this, "ncclAlltoAll",
                     nccl->alltoAll(in, out, count, type, communicator, stream));
    case Operation::Gather:
      return outcome(*this, "ncclGather",
                     nccl->gather(in, out, count, type, plan.root, communicator, stream));
    case Operation::Scatter:
      return outcome(*this, "ncclScatter",
                     nccl->scatter(in, out, count, type, plan.root, communicator, stream));
    case Operation::SendRecv:
    case Operation::AlltoAllv:
      break;
  }
  return Status::error(Code::Internal, "an operation without a function of its own");
}

}  // namespace hoccl::bench
