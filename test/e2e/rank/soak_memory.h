#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "test/e2e/rank/rank.h"
#include "test/e2e/rank/soak_plan.h"

namespace e2e::soak {

/// Everything on a stream up to where it was made. Handles go back to a pool with the last owner.
using Mark = std::shared_ptr<CUevent_st>;
Mark markOf(CUstream stream);
bool passed(const Mark& mark);
void await(CUstream stream, const Mark& mark);

/// A stretch of pinned memory; goes back to its pool with the last owner.
using Page = std::shared_ptr<unsigned char>;

/// Pages of two sizes.
class Pages {
 public:
  Pages();
  /// Null when none of that size is free.
  Page take(std::size_t bytes);

 private:
  struct Pool {
    std::size_t bytes = 0;
    std::vector<unsigned char*> free;
  };
  Pool small_, large_;
};

/// A place for one buffer with guards around it, used by one operation of a group.
struct Cell {
  CUdeviceptr address = 0;
  CUstream stream = nullptr;  ///< that used it last
  Mark last;                  ///< where that use ended; none yet: null
  std::uint64_t group = 0;    ///< that has it, plus one
};

/// Device memory in allocations of one or several cells, some of which go and come anew. They are
/// made and freed through the preloaded library, as by a program linked with the driver.
class Cells {
 public:
  static constexpr std::size_t kMargin = 8192;  ///< for guards and offsets on each side
  static constexpr std::size_t kBytes = Plan::kLargestBuffer + 2 * kMargin;

  explicit Cells(Random& random);
  ~Cells();
  Cells(const Cells&) = delete;
  Cells& operator=(const Cells&) = delete;
  /// One that this group does not have yet.
  Cell& take(std::uint64_t group, Random& random);
  /// Frees one allocation, with whatever is still pending on it, and makes another.
  void replaceOne(Random& random);
  [[nodiscard]] std::uint64_t replaced() const { return replaced_; }

 private:
  struct Allocation {
    CUdeviceptr address = 0;
    std::unique_ptr<DeviceMemory> segments;  ///< of E2E_MEMORY=mapped
    std::vector<Cell> cells;
  };
  static void make(Allocation& allocation, std::size_t cells, std::size_t extra);
  static void release(Allocation& allocation);
  std::vector<Allocation> allocations_;
  std::uint64_t replaced_ = 0;
};

/// What was fetched of a buffer, and what it has to be.
struct Check {
  Mark fetched;
  Page seen;
  std::vector<Page> inputs;  ///< not needed any more once it is fetched
  std::size_t before = 0, after = 0, block = 0;
  std::vector<std::vector<std::uint64_t>> expected;  ///< as in Share
  std::string what;
};

/// Checks that are to be made once their streams have come through, first come, first checked.
class Checks {
 public:
  /// `fail` gets what is wrong with an operation; does not return.
  explicit Checks(std::function<void(const std::string&)> fail) : fail_(std::move(fail)) {}
  void add(Check check) { pending_.push_back(std::move(check)); }
  /// All that can be made now.
  void make();
  /// At least one, or, with `all`, all; waits for them, with a bound.
  void await(bool all, int patienceMs);
  [[nodiscard]] bool empty() const { return pending_.empty(); }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

 private:
  void makeFirst();
  [[nodiscard]] std::string pending() const;
  std::function<void(const std::string&)> fail_;
  std::deque<Check> pending_;
  std::vector<unsigned char> wanted_, part_;
  std::uint64_t bytes_ = 0;
};

constexpr unsigned char kPoison = 0xa5;
/// A buffer's worth of poison, pinned.
const unsigned char* poisonPage();
unsigned char* pinnedMemory(std::size_t bytes);

}  // namespace e2e::soak
