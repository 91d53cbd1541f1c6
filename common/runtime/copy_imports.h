#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "common/base/fd.h"
#include "common/gpu/driver.h"
#include "common/runtime/copy_segment.h"

namespace hoccl {

/// The mover's mappings for copies. The control thread maps and unmaps; the loop looks up and
/// counts its copies. No locks: an import is used only when it has been counted and then still
/// found mapped, and is unmapped only when it has been closed and then found without copies.
class CopyImports {
 public:
  CopyImports(const Driver* driver, CopySegment segment);

  // --- Control thread.
  void handle(const CopyMessage& message, std::vector<UniqueFd> fds);

  // --- Loop.
  enum class Use { Ready, Pending, Refused };
  /// Ready: counted, and `address` is where the piece lies; `release` follows.
  Use use(const CopyPiece& piece, CUdeviceptr* address);
  void release(const CopyPiece& piece);

 private:
  enum State : std::uint32_t { Free, Mapping, Mapped, Closed };
  struct Import {
    std::atomic<std::uint32_t> state{Free};
    std::atomic<std::uint32_t> copies{0};
    std::atomic<std::uint64_t> id{0};  ///< complete before `state` is Mapped, as what follows
    CUdeviceptr address = 0;
    std::uint64_t bytes = 0;
    bool segment = false;
  };
  void map(const CopyMessage& message, const std::vector<UniqueFd>& fds);
  void drop(std::uint64_t id);
  Status mapSegment(int fd, Import* import);
  Status unmap(const Import& import);
  [[nodiscard]] Import& at(std::uint64_t id) { return imports_[id % kMaxCopyImports]; }

  const Driver* driver_;
  CopySegment segment_;
  std::unique_ptr<Import[]> imports_ = std::make_unique<Import[]>(kMaxCopyImports);
  /// Of the messages taken: an import whose message lies behind it is pending, not unknown.
  std::atomic<std::uint64_t> newest_{0};
};

}  // namespace hoccl
