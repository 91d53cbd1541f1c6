#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "common/base/status.h"
#include "tools/bench/layout.h"
#include "tools/bench/rank_device.h"

namespace hoccl::bench {

/// Where buffers come from: makes one of so many bytes.
using BufferSource = std::function<Status(std::uint64_t bytes, std::unique_ptr<Buffer>* out)>;
BufferSource deviceMemory(const Driver* driver);

/// A rank's two buffers on the GPU, and what must be in them before and after an operation. Bytes
/// depend on whose they are, for whom, on their position and on the number of the operation; behind
/// the receive buffer lies a guard that nothing may change.
class RankBuffers {
 public:
  RankBuffers(RankDevice* device, int rank) : device_(device), rank_(rank) {}

  /// Room for layouts of up to these sizes, `offset` bytes into each allocation.
  Status allocate(const BufferSource& source, std::uint64_t sendBytes, std::uint64_t receiveBytes,
                  std::uint64_t offset);
  void release();
  /// Where the layout's messages and the call's pointers count from. Null: nothing is sent.
  [[nodiscard]] void* sendBase(const RankLayout& layout) const;
  [[nodiscard]] void* receiveBase() const;

  /// Writes what operation `number` sends, and poison where it must receive.
  Status prepare(const RankLayout& layout, std::uint64_t number);
  /// Counts bytes of the receive buffer and its guard that are not as operation `number` must leave
  /// them; says on standard error where the first is.
  Status verify(const RankLayout& layout, std::uint64_t number, std::uint64_t* wrong);

 private:
  [[nodiscard]] BytePattern guardPattern(std::uint64_t number) const;

  RankDevice* device_;
  int rank_;
  std::uint64_t offset_ = 0;
  std::unique_ptr<Buffer> send_, receive_;  ///< send_: null where nothing is sent
};

}  // namespace hoccl::bench
