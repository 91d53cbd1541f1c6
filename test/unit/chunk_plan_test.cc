#include "common/runtime/chunk_plan.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace hoccl {
namespace {

const std::vector<std::uint64_t> kSlotSizes = {128 << 10, (128 << 10) + 1,  192 << 10,
                                               1 << 20,   (1 << 20) + 4097, 8 << 20,
                                               64 << 20,  1ull << 30};

/// Odd sizes, powers of two and their neighbours, multiples of the slot and their neighbours.
std::vector<std::uint64_t> sizesFor(std::uint64_t slot) {
  std::set<std::uint64_t> sizes;
  auto around = [&](std::uint64_t middle) {
    for (std::int64_t d :
         {-65537, -65536, -65535, -4097, -4096, -1, 0, 1, 4095, 4096, 65535, 65536}) {
      const auto size = static_cast<std::int64_t>(middle) + d;
      if (size >= static_cast<std::int64_t>(kMinChunkBytes)) {
        sizes.insert(static_cast<std::uint64_t>(size));
      }
    }
  };
  for (std::uint64_t power = kMinChunkBytes; power <= 1ull << 34; power *= 2) around(power);
  for (std::uint64_t n = 1; n <= 40; ++n) around(n * slot);
  std::mt19937_64 rng(7);
  for (int i = 0; i < 2000; ++i) {
    const std::uint64_t most = 1ull << (17 + i % 17);
    sizes.insert(std::uniform_int_distribution<std::uint64_t>(kMinChunkBytes, most)(rng));
  }
  return {sizes.begin(), sizes.end()};
}

TEST(Rule5, NoChunkIsUnder64KiBOrOverTheSlotAndAllSumUp) {
  for (std::uint64_t slot : kSlotSizes) {
    const std::vector<std::uint64_t> sizes = sizesFor(slot);
    ASSERT_GT(sizes.size(), 2000u);
    for (std::uint64_t bytes : sizes) {
      const std::uint64_t chunk = chunkBytesFor(bytes, slot);
      ASSERT_GE(chunk, 2 * kMinChunkBytes) << bytes << " in slots of " << slot;
      ASSERT_LE(chunk, slot) << bytes;
      std::uint64_t offset = 0, chunks = 0;
      while (offset < bytes) {
        const std::uint64_t length = chunkLength(bytes, offset, chunk);
        ASSERT_GE(length, kMinChunkBytes) << bytes << " in slots of " << slot << " at " << offset;
        ASSERT_LE(length, slot) << bytes << " at " << offset;
        offset += length;
        ++chunks;
      }
      ASSERT_EQ(offset, bytes);
      // No more chunks than whole ones and a tail.
      ASSERT_LE(chunks, bytes / chunk + 1) << bytes << " in slots of " << slot;
    }
  }
}

TEST(ChunkPlan, LargerTransfersHaveLargerChunksUpToTheSlot) {
  std::uint64_t before = 0;
  for (std::uint64_t bytes = 64 << 10; bytes <= 1ull << 34; bytes *= 2) {
    const std::uint64_t chunk = chunkBytesFor(bytes, 8 << 20);
    EXPECT_GE(chunk, before);
    before = chunk;
  }
  EXPECT_EQ(before, 8u << 20);
  EXPECT_EQ(chunkBytesFor(64 << 10, 8 << 20), 128u << 10);
}

TEST(ChunkPlan, ATransferOfOneChunkIsNotCut) {
  for (std::uint64_t bytes : {65536u, 65537u, 131071u, 131072u}) {
    EXPECT_EQ(chunkLength(bytes, 0, chunkBytesFor(bytes, 8 << 20)), bytes);
  }
}

}  // namespace
}  // namespace hoccl
