#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "common/base/status.h"
#include "tools/bench/issue.h"
#include "tools/bench/layout.h"
#include "tools/bench/nccl_api.h"
#include "tools/bench/rank_buffers.h"
#include "tools/bench/rank_device.h"
#include "tools/bench/start_page.h"

namespace hoccl::bench {

/// One rank's part in a run.
struct RankPlan {
  int rank = 0;
  OperationPlan operation;
  unsigned meeting = 0;  ///< ranks of this host, which start together
  bool grouped = false;
  int dataType = 0;  ///< ncclDataType_t
  std::uint64_t maxBytes = 0, offset = 0, timeoutMs = 0;
  bool wantSteering = false;
  bool symmetric = false;  ///< buffers in symmetric windows
  std::string ncclLibrary;
};

/// A rank's communicator, buffers and transfers. Every method is one command of the bench and
/// leaves its results in `answer`.
class RankTransfers {
 public:
  RankTransfers(RankDevice* device, StartPage* start, RankPlan plan)
      : device_(device), start_(start), plan_(std::move(plan)), buffers_(device, plan_.rank) {}
  RankTransfers(const RankTransfers&) = delete;
  RankTransfers& operator=(const RankTransfers&) = delete;

  /// Loads NCCL. Answers "nccl" (version), "library", "ownFunction" (whether NCCL's function for
  /// the operation is called).
  Status open(nlohmann::json* answer);
  /// Answers "id", the unique id in hexadecimal.
  Status uniqueId(nlohmann::json* answer);
  /// Creates the communicator and allocates the buffers.
  Status connect(const std::string& id);
  /// Fills what transfer `number` sends and poisons what it receives.
  Status prepare(const Shape& shape, std::uint64_t number);
  /// `count` transfers back to back, all ranks starting together. Answers "ns".
  Status transfer(const Shape& shape, int count, nlohmann::json* answer);
  /// Answers "wrong": bytes that are not what transfer `number` had to bring, or were written past
  /// it.
  Status verify(const Shape& shape, std::uint64_t number, nlohmann::json* answer);
  /// `count` bursts of `burst` transfers. Answers the time inside the NCCL calls: "launchIdleNs" of
  /// each first, onto an idle stream, and "launchNs" of those right behind it.
  Status launch(const Shape& shape, int burst, int count, nlohmann::json* answer);
  /// Answers "steering" (staged, nccl, transport, reasons) and "emulator" (kernels, lateNs), null
  /// where unknown.
  Status counts(nlohmann::json* answer);
  Status close();

 private:
  [[nodiscard]] RankLayout layout(const Shape& shape) const;
  [[nodiscard]] unsigned ranks() const { return static_cast<unsigned>(plan_.operation.ranks); }
  Status issue(const RankLayout& layout);
  Status drain();

  RankDevice* device_;
  StartPage* start_;
  RankPlan plan_;
  NcclApi nccl_;
  ncclComm_t communicator_ = nullptr;
  Issuer issuer_;
  RankBuffers buffers_;
};

}  // namespace hoccl::bench
