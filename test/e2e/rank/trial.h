#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "test/e2e/rank/rank.h"

namespace e2e {

using Bytes = std::vector<unsigned char>;

/// Device memory with guard zones around it. Every put and fetch has pinned memory of its own, so
/// that any number of them may be queued; what is enqueued runs in the order of its stream.
class Region {
 public:
  /// `bytes` of payload, `offset` bytes off the alignment of an allocation.
  explicit Region(std::size_t bytes, std::size_t offset = 0);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  [[nodiscard]] unsigned char* data() const {
    return reinterpret_cast<unsigned char*>(device_ + kGuard + offset_);
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  /// Everything, guard zones too, becomes kPoison.
  void poison(CUstream stream);
  /// These bytes of the payload become `image`.
  void put(const Bytes& image, std::size_t at, CUstream stream);
  /// Fetches everything; returns which fetch it is.
  std::size_t fetch(CUstream stream);
  /// After that fetch has run: the payload is `image`, the guard zones are poison.
  void require(const Bytes& image, std::size_t which, const std::string& what) const;

  static constexpr unsigned char kPoison = 0xa5;

 private:
  static constexpr std::size_t kGuard = 4096;
  [[nodiscard]] std::size_t total() const { return bytes_ + offset_ + 2 * kGuard; }
  unsigned char* area(std::size_t bytes);

  std::size_t bytes_, offset_;
  DeviceMemory memory_;
  CUdeviceptr device_ = 0;
  unsigned char* poison_ = nullptr;
  std::vector<unsigned char*> areas_, fetched_;
};

enum class Kind { AllGather, AlltoAll, Gather, Scatter, Broadcast, Bcast };
const char* nameOf(Kind kind);
constexpr Kind kAllKinds[] = {Kind::AllGather, Kind::AlltoAll,  Kind::Gather,
                              Kind::Scatter,   Kind::Broadcast, Kind::Bcast};
constexpr bool hasRoot(Kind kind) { return kind != Kind::AllGather && kind != Kind::AlltoAll; }

struct Shape {
  Kind kind = Kind::AllGather;
  std::size_t block = 0;  ///< bytes of one rank's block
  int root = 0;
  bool inPlace = false;
  bool withConfig = false;  ///< the form with a configuration (NCCL 2.31); not of Bcast
};

/// One collective on one stream: input and poison, the call, bytes destroyed and fetched right
/// behind it, and the check. `round` tells the bytes of one from another's.
class Trial {
 public:
  Trial(const Shape& shape, int rank, int ranks);

  void prepare(std::uint64_t round, CUstream stream);
  ncclResult_t call(ncclComm_t comm, CUstream stream);
  /// Right behind the call, or behind the end of its group.
  void after(CUstream stream);
  /// Once the stream has come through: every byte of every round since the last check.
  void check();
  /// All of it.
  void run(ncclComm_t comm, std::uint64_t round, CUstream stream);
  /// Nothing has touched the output since prepare(): checks instead of check().
  void checkUntouched();
  [[nodiscard]] std::string what() const;

 private:
  struct Expected {
    std::size_t inFetch, outFetch;
    Bytes in, out;
    std::uint64_t round;
  };
  [[nodiscard]] bool reads() const;
  [[nodiscard]] bool writes() const;
  [[nodiscard]] unsigned char* input() const;
  [[nodiscard]] unsigned char* output() const;

  Shape shape_;
  int rank_, ranks_;
  std::uint64_t round_ = 0;
  Region in_, out_;  ///< in place only `out_` (Scatter: `in_`) is used
  Bytes inImage_, outImage_;
  std::vector<Expected> expected_;
};

/// Every rank's element n is rank + n; checks the sums. Stays with NCCL.
class Sum {
 public:
  Sum(int rank, int ranks) : rank_(rank), ranks_(ranks), in_(kBytes), out_(kBytes) {}
  void prepare(CUstream stream);
  void call(ncclComm_t comm, CUstream stream);
  void after(CUstream stream) { which_ = out_.fetch(stream); }
  void check() const;

 private:
  static constexpr int kNumbers = 257;
  static constexpr std::size_t kBytes = kNumbers * sizeof(float);
  int rank_, ranks_;
  Region in_, out_;
  std::size_t which_ = 0;
};

int rankOf(ncclComm_t comm);
int ranksOf(ncclComm_t comm);
/// An AllGather and a send to the next with a receive from the previous, over `comm`; checked.
void traffic(ncclComm_t comm, std::uint64_t tag, CUstream stream, std::size_t bytes = 100003);

/// All ranks have come here and none has gone on: the SM operations of all devices are told as
/// `name`.
void saySmOps(const Rank& rank, const std::string& name);

}  // namespace e2e
