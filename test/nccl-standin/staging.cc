#include "staging.h"

#include <sys/mman.h>

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "driver.h"

namespace standin {
namespace {

constexpr std::size_t kBlockUnit = 64 << 10;
/// Unused pinned memory that a process keeps.
constexpr std::size_t kMaxKept = std::size_t{128} << 20;
constexpr std::size_t kGatesAtOnce = 128;

struct Pool {
  std::mutex mutex;
  std::multimap<std::size_t, Block> blocks;
  std::size_t kept = 0;  ///< bytes of `blocks`
  std::vector<Gate*> gates;
};

/// Never destroyed: calls may come while the process exits.
Pool& pool() {
  static Pool* const made = new Pool;
  return *made;
}

Outcome allocate(std::size_t bytes, Block* out) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return Outcome::error(ncclSystemError, "no host memory to stage in");
  if (Outcome pinned = Driver::get().pin(memory, bytes); !pinned) {
    munmap(memory, bytes);
    return pinned;
  }
  *out = {static_cast<char*>(memory), bytes};
  return {};
}

}  // namespace

std::uint64_t load(const std::uint64_t& word) {
  return std::atomic_ref(const_cast<std::uint64_t&>(word)).load(std::memory_order_acquire);
}

void store(std::uint64_t& word, std::uint64_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}

Outcome takeBlock(std::size_t bytes, Block* out) {
  const std::size_t wanted = (bytes + kBlockUnit - 1) / kBlockUnit * kBlockUnit;
  {
    const std::lock_guard lock(pool().mutex);
    const auto found = pool().blocks.lower_bound(wanted);
    if (found != pool().blocks.end() && found->first <= 2 * wanted) {
      *out = found->second;
      pool().kept -= out->bytes;
      pool().blocks.erase(found);
      return {};
    }
  }
  return allocate(wanted, out);
}

void give(const Block& block) {
  const std::lock_guard lock(pool().mutex);
  pool().blocks.emplace(block.bytes, block);
  pool().kept += block.bytes;
}

void trimBlocks() {
  while (true) {
    Block largest;
    {
      const std::lock_guard lock(pool().mutex);
      if (pool().kept <= kMaxKept) return;
      const auto last = std::prev(pool().blocks.end());
      largest = last->second;
      pool().kept -= largest.bytes;
      pool().blocks.erase(last);
    }
    if (!Driver::get().unpin(largest.data)) return give(largest);
    munmap(largest.data, largest.bytes);
  }
}

Outcome takeGate(Gate** out) {
  const std::lock_guard lock(pool().mutex);
  if (pool().gates.empty()) {
    Block block;
    if (Outcome made = allocate(kGatesAtOnce * sizeof(Gate), &block); !made) return made;
    for (std::size_t i = 0; i < kGatesAtOnce; ++i) {
      pool().gates.push_back(new (block.data + i * sizeof(Gate)) Gate);
    }
  }
  *out = pool().gates.back();
  pool().gates.pop_back();
  ++(*out)->sequence;
  return {};
}

void give(Gate* gate) {
  const std::lock_guard lock(pool().mutex);
  pool().gates.push_back(gate);
}

}  // namespace standin
