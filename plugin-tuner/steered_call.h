#pragma once

#include <nccl.h>

#include <array>
#include <cstdint>
#include <optional>

#include "common/gpu/buffer.h"
#include "common/gpu/driver.h"
#include "plugin-tuner/open_group.h"
#include "plugin-tuner/passed_calls.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {

/// The pairs of ranks a call moves data between.
struct Pairs {
  enum class Kind { Peer, Root, All } kind;
  int rank = 0;       ///< the peer, or the root
  bool send = false;  ///< to the peer
};

/// One intercepted call about data, from the decision where it goes to its launch. Lives in the
/// call.
class SteeredCall {
 public:
  SteeredCall(ncclComm_t handle, cudaStream_t stream);
  ~SteeredCall();
  SteeredCall(const SteeredCall&) = delete;
  SteeredCall& operator=(const SteeredCall&) = delete;

  /// Whether the call is HOCCL's; `count` elements is what each pair moves, `verb` what messages
  /// call it
  /// ("send to", "AllGather"). If so and result() is an error, the call has been answered with it.
  /// The decision depends only on what all ranks concerned see alike.
  bool takes(const char* verb, Pairs pairs, ncclDataType_t type, std::size_t count);
  [[nodiscard]] ncclResult_t result() const { return result_; }
  [[nodiscard]] SteeredComm& comm() const { return *comm_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

  /// A buffer of the call, as an operation names it.
  struct Buffer {
    BufferRef ref{};
    SpanSlot* span = nullptr;  ///< of one of a span, which is pinned
    // Of one that takes application-side copies; its reference is to the block.
    StagingPool::Block* block = nullptr;
    CUdeviceptr address = 0;
    std::uint64_t bytes = 0;
    bool host = false;
    bool noted = false;  ///< the launch knows the block
  };
  /// Finds a buffer's allocation, or staging memory for it where the mover cannot map it; on
  /// failure the call is answered with the error.
  bool exports(const void* buffer, std::uint64_t bytes, Buffer* out);
  /// A send or receive of one peer: bytes() from `offset` of the buffer on. After all exports. A
  /// mirror is of the send to that peer that was added last.
  void add(OpKind kind, Buffer* buffer, std::uint64_t offset, int peer, bool collective);
  /// bytes() of this rank to itself, by a kernel. False where that is not wanted or not to be had:
  /// they have to be sent and received.
  bool copyOwn(const Buffer& in, std::uint64_t inOffset, const Buffer& out, std::uint64_t outOffset);
  /// After the last add: counts the call and launches it, in a group with the group's end.
  ncclResult_t launch(std::uint64_t movedBytes);
  /// Of a call that is not HOCCL's: how it is counted; its communicator is null if it is not.
  [[nodiscard]] const PassedCall& passed() const { return passed_; }

 private:
  Path choose(Pairs pairs);
  bool captured();
  bool passOn(Path path, Pairs pairs);
  bool answer(const Status& status);
  Status exportTo(const void* buffer, std::uint64_t bytes, Buffer* out);
  SpanSlot* pinFor(const Buffer& buffer);
  Status stage(const void* buffer, std::uint64_t bytes, Buffer* out);
  void noteBlock(OpKind kind, Buffer* buffer);
  [[nodiscard]] bool strictRefuses(Path path, Pairs pairs) const;

  SteeredComm* comm_ = nullptr;
  cudaStream_t stream_;
  OpenGroup& open_;  ///< this thread's
  std::uint64_t bytes_ = 0;
  ncclResult_t result_ = ncclSuccess;
  const Driver* driver_ = nullptr;
  std::optional<ContextGuard> context_;
  std::array<StagingPool::Block*, 2> taken_{};  ///< until the launch knows them
  std::array<SpanSlot*, 2> pinned_{};           ///< the same
  bool staged_ = false;
  PassedCall passed_;
  bool countedOne_ = false;  ///< an operation stands for the call where direct copies are counted
};

}  // namespace hoccl
