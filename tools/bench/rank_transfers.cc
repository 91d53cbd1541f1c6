#include "tools/bench/rank_transfers.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "common/base/time.h"
#include "tools/bench/symmetric_buffer.h"

namespace hoccl::bench {

#define HOCCL_BENCH_NCCL(call)                                                     \
  do {                                                                             \
    const ncclResult_t result_ = nccl_.call;                                       \
    if (result_ != ncclSuccess) return nccl_.error(#call, result_, communicator_); \
  } while (false)

Status RankTransfers::open(nlohmann::json* answer) {
  HOCCL_RETURN_IF_ERROR(NcclApi::load(plan_.ncclLibrary, &nccl_));
  if (plan_.wantSteering && !nccl_.steered())
    return Status::error(Code::InvalidConfig,
                         fmt::format("ncclSend comes from {}, not from the preloaded steering "
                                     "library: LD_PRELOAD had no effect",
                                     nccl_.sendFrom));
  if (plan_.symmetric && !nccl_.windows())
    return Status::error(
        Code::Unsupported,
        fmt::format("NCCL in {} has no symmetric windows: its collectives by copy engines came "
                    "with 2.28.3",
                    nccl_.library));
  int version = 0;
  HOCCL_BENCH_NCCL(ncclGetVersion(&version));
  (*answer)["nccl"] = version;
  (*answer)["library"] = nccl_.library;
  issuer_.nccl = &nccl_;
  issuer_.stream = device_->stream();
  issuer_.type = static_cast<ncclDataType_t>(plan_.dataType);
  issuer_.plan = plan_.operation;
  issuer_.grouped = plan_.grouped;
  (*answer)["ownFunction"] = issuer_.ownFunction();
  return {};
}

Status RankTransfers::uniqueId(nlohmann::json* answer) {
  ncclUniqueId id{};
  HOCCL_BENCH_NCCL(ncclGetUniqueId(&id));
  std::string text;
  for (const char byte : id.internal)
    text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  (*answer)["id"] = text;
  return {};
}

Status RankTransfers::connect(const std::string& text) {
  ncclUniqueId id{};
  if (text.size() != 2 * sizeof id.internal)
    return Status::error(Code::Internal, "a unique id of the wrong length");
  for (std::size_t i = 0; i < sizeof id.internal; ++i)
    id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  HOCCL_BENCH_NCCL(ncclCommInitRank(&communicator_, plan_.operation.ranks, id, plan_.rank));
  issuer_.communicator = communicator_;
  std::uint64_t sendBytes = 0, receiveBytes = 0;
  const bool hasInPlace = factsOf(plan_.operation.operation).inPlace;
  for (int rank = 0; rank < plan_.operation.ranks; ++rank) {
    // Symmetric windows have the same size everywhere, whether the rank sends or receives anything
    // or not: where one rank gave NCCL another address, it alone would take the kernels.
    if (rank != plan_.rank && !plan_.symmetric) continue;
    for (const bool inPlace : {false, true}) {
      if (inPlace && !hasInPlace) continue;
      const RankLayout largest = layoutOf(plan_.operation, rank, {plan_.maxBytes, inPlace});
      sendBytes = std::max(sendBytes, largest.sendBytes);
      receiveBytes = std::max(receiveBytes, largest.receiveBytes);
    }
  }
  return buffers_.allocate(
      plan_.symmetric ? symmetricMemory(&nccl_, communicator_) : deviceMemory(device_->driver()),
      sendBytes, receiveBytes, plan_.offset);
}

RankLayout RankTransfers::layout(const Shape& shape) const {
  return layoutOf(plan_.operation, plan_.rank, shape);
}

Status RankTransfers::prepare(const Shape& shape, std::uint64_t number) {
  return buffers_.prepare(layout(shape), number);
}

Status RankTransfers::issue(const RankLayout& layout) {
  return issuer_.issue(layout, buffers_.sendBase(layout), buffers_.receiveBase());
}

Status RankTransfers::drain() {
  // A little less than the bench waits, so that this rank's own account of the failure comes first.
  const std::uint64_t bound = plan_.timeoutMs - plan_.timeoutMs / 10;
  return device_->drain(device_->stream(), bound, [this]() -> Status {
    ncclResult_t state = ncclSuccess;
    HOCCL_BENCH_NCCL(ncclCommGetAsyncError(communicator_, &state));
    if (state == ncclSuccess || state == ncclInProgress) return {};
    return nccl_.error("a pending transfer", state, communicator_);
  });
}

Status RankTransfers::transfer(const Shape& shape, int count, nlohmann::json* answer) {
  const RankLayout layout = this->layout(shape);
  HOCCL_RETURN_IF_ERROR(start_->meet(plan_.meeting, plan_.timeoutMs));
  const std::uint64_t begin = monotonicNs();
  for (int i = 0; i < count; ++i) HOCCL_RETURN_IF_ERROR(issue(layout));
  HOCCL_RETURN_IF_ERROR(drain());
  (*answer)["ns"] = monotonicNs() - begin;
  return {};
}

Status RankTransfers::verify(const Shape& shape, std::uint64_t number, nlohmann::json* answer) {
  std::uint64_t wrong = 0;
  HOCCL_RETURN_IF_ERROR(buffers_.verify(layout(shape), number, &wrong));
  (*answer)["wrong"] = wrong;
  return {};
}

Status RankTransfers::launch(const Shape& shape, int burst, int count, nlohmann::json* answer) {
  const RankLayout layout = this->layout(shape);
  HOCCL_RETURN_IF_ERROR(start_->meet(plan_.meeting, plan_.timeoutMs));
  std::vector<std::uint64_t> first, following;
  for (int i = 0; i < count; ++i) {
    // The first after a wait also pays for caches that have gone cold, and perhaps for waking the
    // mover; the ones behind it do not.
    std::uint64_t before = monotonicNs();
    for (int k = 0; k < burst; ++k) {
      HOCCL_RETURN_IF_ERROR(issue(layout));
      const std::uint64_t now = monotonicNs();
      (k == 0 ? first : following).push_back(now - before);
      before = now;
    }
    HOCCL_RETURN_IF_ERROR(drain());
  }
  (*answer)["launchNs"] = following;
  (*answer)["launchIdleNs"] = first;
  return {};
}

Status RankTransfers::counts(nlohmann::json* answer) {
  SteeringCounts steering;
  HOCCL_RETURN_IF_ERROR(readSteeringCounts(&steering));
  (*answer)["steering"] = nullptr;
  if (steering.known)
    (*answer)["steering"] = {{"staged", steering.staged},       {"app-copies", steering.appCopies},
                             {"direct", steering.direct},       {"nccl", steering.nccl},
                             {"transport", steering.transport}, {"reasons", steering.reasons}};
  const EmulatorCounters emulator = device_->emulatorCounters();
  (*answer)["emulator"] = nullptr;
  if (emulator.known)
    (*answer)["emulator"] = {{"kernels", emulator.kernels}, {"lateNs", emulator.lateNs}};
  return {};
}

Status RankTransfers::close() {
  if (plan_.symmetric) buffers_.release();  // the windows are the communicator's
  if (communicator_) HOCCL_BENCH_NCCL(ncclCommDestroy(communicator_));
  communicator_ = nullptr;
  buffers_.release();
  return {};
}

}  // namespace hoccl::bench
