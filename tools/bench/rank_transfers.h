#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "common/base/status.h"
#include "tools/bench/nccl_api.h"
#include "tools/bench/rank_device.h"
#include "tools/bench/start_page.h"

namespace hoccl::bench {

/// One rank's part in a run.
struct RankPlan {
  int rank = 0, ranks = 0;
  int sendTo = -1, receiveFrom = -1;  ///< -1: does not send, does not receive
  int dataType = 0;                   ///< ncclDataType_t
  unsigned elementBytes = 1;
  std::uint64_t maxBytes = 0, offset = 0, timeoutMs = 0;
  bool wantSteering = false;
  std::string ncclLibrary;
};

/// A rank's communicator, buffers and transfers. Every method is one command of the bench and
/// leaves its results in `answer`.
class RankTransfers {
 public:
  RankTransfers(RankDevice* device, StartPage* start, RankPlan plan)
      : device_(device), start_(start), plan_(std::move(plan)) {}
  RankTransfers(const RankTransfers&) = delete;
  RankTransfers& operator=(const RankTransfers&) = delete;

  /// Loads NCCL. Answers "nccl" (version), "library".
  Status open(nlohmann::json* answer);
  /// Answers "id", the unique id in hexadecimal.
  Status uniqueId(nlohmann::json* answer);
  /// Creates the communicator and allocates the buffers.
  Status connect(const std::string& id);
  /// Fills the send buffer for transfer `number` and poisons the receive buffer.
  Status prepare(std::uint64_t bytes, std::uint64_t number);
  /// `count` transfers back to back, all ranks starting together. Answers "ns".
  Status transfer(std::uint64_t bytes, int count, nlohmann::json* answer);
  /// Answers "wrong": bytes that are not what transfer `number` had to bring, or were written past
  /// it.
  Status verify(std::uint64_t bytes, std::uint64_t number, nlohmann::json* answer);
  /// `count` bursts of transfers. Answers the time inside the NCCL calls: "launchIdleNs" of each
  /// first, onto an idle stream, and "launchNs" of those right behind it.
  Status launch(std::uint64_t bytes, int count, nlohmann::json* answer);
  /// Answers "steering" (staged, nccl, transport, reasons) and "emulator" (kernels, lateNs), null
  /// where unknown.
  Status counts(nlohmann::json* answer);
  Status close();

 private:
  Status issue(std::uint64_t bytes);
  Status drain();
  [[nodiscard]] BytePattern sent(std::uint64_t number) const;
  [[nodiscard]] BytePattern expected(std::uint64_t number) const;

  RankDevice* device_;
  StartPage* start_;
  RankPlan plan_;
  NcclApi nccl_;
  ncclComm_t communicator_ = nullptr;
  DeviceBuffer send_, receive_;
};

}  // namespace hoccl::bench
