#include "tools/bench/rank_transfers.h"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <vector>

#include "common/base/time.h"

namespace hoccl::bench {
namespace {

// Past the end of the receive buffer; poisoned like it and looked at for overruns.
constexpr std::uint64_t kGuardBytes = 4096;
// Transfers enqueued back to back for one sample of the launch cost after idling.
constexpr int kLaunchBurst = 4;

}  // namespace

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
  int version = 0;
  HOCCL_BENCH_NCCL(ncclGetVersion(&version));
  (*answer)["nccl"] = version;
  (*answer)["library"] = nccl_.library;
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
  HOCCL_BENCH_NCCL(ncclCommInitRank(&communicator_, plan_.ranks, id, plan_.rank));
  const std::uint64_t bytes = plan_.maxBytes + plan_.offset;
  if (plan_.sendTo >= 0) HOCCL_RETURN_IF_ERROR(send_.allocate(device_->driver(), bytes));
  if (plan_.receiveFrom >= 0)
    HOCCL_RETURN_IF_ERROR(receive_.allocate(device_->driver(), bytes + kGuardBytes));
  return {};
}

BytePattern RankTransfers::sent(std::uint64_t number) const {
  return BytePattern::of(plan_.rank, number);
}

BytePattern RankTransfers::expected(std::uint64_t number) const {
  return BytePattern::of(plan_.receiveFrom, number);
}

Status RankTransfers::prepare(std::uint64_t bytes, std::uint64_t number) {
  if (plan_.sendTo >= 0)
    HOCCL_RETURN_IF_ERROR(device_->upload(send_.at(plan_.offset), bytes, sent(number), false));
  if (plan_.receiveFrom >= 0)
    HOCCL_RETURN_IF_ERROR(
        device_->upload(receive_.at(plan_.offset), bytes + kGuardBytes, expected(number), true));
  return {};
}

Status RankTransfers::issue(std::uint64_t bytes) {
  const std::size_t count = bytes / plan_.elementBytes;
  const auto type = static_cast<ncclDataType_t>(plan_.dataType);
  const auto stream = device_->stream();
  const void* from = reinterpret_cast<const void*>(send_.at(plan_.offset));
  void* to = reinterpret_cast<void*>(receive_.at(plan_.offset));
  const bool both = plan_.sendTo >= 0 && plan_.receiveFrom >= 0;
  if (both) HOCCL_BENCH_NCCL(ncclGroupStart());
  if (plan_.sendTo >= 0)
    HOCCL_BENCH_NCCL(ncclSend(from, count, type, plan_.sendTo, communicator_, stream));
  if (plan_.receiveFrom >= 0)
    HOCCL_BENCH_NCCL(ncclRecv(to, count, type, plan_.receiveFrom, communicator_, stream));
  if (both) HOCCL_BENCH_NCCL(ncclGroupEnd());
  return {};
}

Status RankTransfers::drain() {
  // A little less than the bench waits, so that this rank's own account of the failure comes first.
  return device_->drain(plan_.timeoutMs - plan_.timeoutMs / 10, [this]() -> Status {
    ncclResult_t state = ncclSuccess;
    HOCCL_BENCH_NCCL(ncclCommGetAsyncError(communicator_, &state));
    if (state == ncclSuccess || state == ncclInProgress) return {};
    return nccl_.error("a pending transfer", state, communicator_);
  });
}

Status RankTransfers::transfer(std::uint64_t bytes, int count, nlohmann::json* answer) {
  HOCCL_RETURN_IF_ERROR(start_->meet(static_cast<unsigned>(plan_.ranks), plan_.timeoutMs));
  const std::uint64_t begin = monotonicNs();
  for (int i = 0; i < count; ++i) HOCCL_RETURN_IF_ERROR(issue(bytes));
  HOCCL_RETURN_IF_ERROR(drain());
  (*answer)["ns"] = monotonicNs() - begin;
  return {};
}

Status RankTransfers::verify(std::uint64_t bytes, std::uint64_t number, nlohmann::json* answer) {
  std::uint64_t wrong = 0, first = 0;
  if (plan_.receiveFrom >= 0) {
    const BytePattern right = expected(number);
    HOCCL_RETURN_IF_ERROR(
        device_->countWrong(receive_.at(plan_.offset), bytes, right, &wrong, &first));
    std::array<std::uint8_t, kGuardBytes> guard;
    const Driver* driver = device_->driver();
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(
        driver, cuMemcpyDtoH(guard.data(), receive_.at(plan_.offset) + bytes, guard.size())));
    for (std::uint64_t i = 0; i < kGuardBytes; ++i) {
      if (guard[i] == static_cast<std::uint8_t>(~right.at(bytes + i))) continue;
      if (wrong++ == 0) first = bytes + i;
    }
    if (wrong > 0)
      std::fprintf(
          stderr,
          "hoccl bench: rank %d: %llu wrong bytes of %llu from rank %d, the first at %llu\n",
          plan_.rank, static_cast<unsigned long long>(wrong),
          static_cast<unsigned long long>(bytes), plan_.receiveFrom,
          static_cast<unsigned long long>(first));
  }
  (*answer)["wrong"] = wrong;
  return {};
}

Status RankTransfers::launch(std::uint64_t bytes, int count, nlohmann::json* answer) {
  HOCCL_RETURN_IF_ERROR(start_->meet(static_cast<unsigned>(plan_.ranks), plan_.timeoutMs));
  std::vector<std::uint64_t> first, following;
  for (int i = 0; i < count; ++i) {
    // The first after a wait also pays for caches that have gone cold, and perhaps for waking the
    // mover; the ones behind it do not.
    std::uint64_t before = monotonicNs();
    for (int k = 0; k < kLaunchBurst; ++k) {
      HOCCL_RETURN_IF_ERROR(issue(bytes));
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
    (*answer)["steering"] = {{"staged", steering.staged},
                             {"nccl", steering.nccl},
                             {"transport", steering.transport},
                             {"reasons", steering.reasons}};
  const EmulatorCounters emulator = device_->emulatorCounters();
  (*answer)["emulator"] = nullptr;
  if (emulator.known)
    (*answer)["emulator"] = {{"kernels", emulator.kernels}, {"lateNs", emulator.lateNs}};
  return {};
}

Status RankTransfers::close() {
  if (communicator_) HOCCL_BENCH_NCCL(ncclCommDestroy(communicator_));
  communicator_ = nullptr;
  send_.release();
  receive_.release();
  return {};
}

}  // namespace hoccl::bench
