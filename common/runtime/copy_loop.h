#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "common/base/config.h"
#include "common/gpu/host_registration.h"
#include "common/gpu/lane.h"
#include "common/runtime/copy_imports.h"
#include "common/runtime/copy_segment.h"

namespace hoccl {

/// The loop of a mover that only copies: takes slots from the ring, submits their copies, and keeps
/// few of them in flight, so that no submission blocks. The copy lanes themselves report to the
/// application.
class CopyLoop {
 public:
  static constexpr std::size_t kLanes = 2;  ///< of a direction; docs/staging.md says why
  struct Dependencies {
    CopySegment segment;
    HostRegistration* registration = nullptr;
    CopyImports* imports = nullptr;
    int bell = -1;
    std::array<std::unique_ptr<Lane>, kLanes> out, in;
  };
  CopyLoop(Dependencies dependencies, const Config& config);

  /// Until `stop` (ring the bell behind it), and then until no copy is in flight, for a while at
  /// most.
  void run(const std::atomic<bool>& stop);

 private:
  struct Copy {
    std::uint32_t slot = 0;
    std::uint64_t turn = 0;
    std::uint32_t pieces = 0;
    CopyPiece piece[kCopyPieces]{};
  };
  struct Direction {
    std::array<std::unique_ptr<Lane>, kLanes> lanes;
    std::array<std::deque<Copy>, kLanes> inFlight;
    std::deque<Copy> waiting;
    std::vector<Copy> unmapped;  ///< whose import is not there yet
    std::size_t next = 0;        ///< lane
    [[nodiscard]] std::size_t flying() const;
  };

  bool take();
  bool retire(Direction& direction);
  bool submit(Direction& direction, bool in);
  Status submitTo(Lane& lane, const Copy& copy, const CUdeviceptr* addresses);
  void fail(const Copy& copy);
  void breakDown(const Status& status);
  void rest(bool moved);

  CopySegment segment_;
  HostRegistration* registration_;
  CopyImports* imports_;
  int bell_;
  std::size_t depth_;
  std::uint64_t spinNs_, pollMaxNs_;
  Direction out_, in_;
  std::uint64_t head_ = 0;
  bool broken_ = false;
  std::uint64_t idleSinceNs_ = 0, napNs_ = 0;
};

}  // namespace hoccl
