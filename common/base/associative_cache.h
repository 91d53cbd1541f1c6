#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hoccl {

/// A small table of what was looked up before. Each key has its place in one set of `kWays`, so
/// that keys that share a set only push each other out when there are more of them than ways; the
/// one put there first goes first. Neither allocates nor locks. `Key{}` means an empty place; a key
/// has operator== and `std::uint64_t hash() const`, in whose upper bits the keys differ
/// (spreadBits).
template <typename Key, typename Value, std::size_t kSets, std::size_t kWays>
class AssociativeCache {
  static_assert(kSets > 1 && (kSets & (kSets - 1)) == 0, "a power of two");

 public:
  /// Null where the key is not known. Good until the next insert.
  Value* find(const Key& key) {
    Set& set = setOf(key);
    for (std::size_t way = 0; way < kWays; ++way) {
      if (set.keys[way] == key) return &set.values[way];
    }
    return nullptr;
  }

  /// The value takes the key's place, or that of the longest known of its set.
  Value& insert(const Key& key, const Value& value) {
    Value* place = find(key);
    if (!place) {
      Set& set = setOf(key);
      set.keys[set.next] = key;
      place = &set.values[set.next];
      set.next = (set.next + 1) % kWays;
    }
    *place = value;
    return *place;
  }

 private:
  struct Set {
    std::array<Key, kWays> keys{};
    std::array<Value, kWays> values{};
    std::size_t next = 0;
  };
  Set& setOf(const Key& key) { return sets_[key.hash() >> 32 & (kSets - 1)]; }

  std::array<Set, kSets> sets_{};
};

/// Fibonacci hashing: the upper half differs wherever the bits of two values do.
inline std::uint64_t spreadBits(std::uint64_t value) { return value * 0x9e3779b97f4a7c15ull; }

}  // namespace hoccl
