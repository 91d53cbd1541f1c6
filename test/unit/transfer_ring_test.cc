#include "common/net/tcp/transfer_ring.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>
#include <vector>

namespace hoccl {
namespace {

struct Taken {
  std::uint64_t transfer, offset, bytes;
};

Transfer transferOf(std::uint64_t number, const std::byte* data, std::uint64_t bytes) {
  Transfer transfer;
  std::memcpy(transfer.user.data(), &number, sizeof number);
  transfer.data = data;
  transfer.bytes = bytes;
  return transfer;
}

bool takeFrom(TransferRing& ring, std::vector<Taken>* out) {
  OutFrame frame;
  if (!ring.take(&frame)) return false;
  PieceHeader piece;
  std::memcpy(&piece, frame.header.user.data(), sizeof piece);
  std::uint64_t number = 0;
  std::memcpy(&number, piece.user.data(), sizeof number);
  out->push_back({number, piece.offset, frame.header.bytes});
  return true;
}

TEST(TransferRing, GivesThePiecesInOrder) {
  const std::vector<std::byte> data(100);
  TransferRing ring(2);
  EXPECT_FALSE(ring.any());
  ASSERT_TRUE(ring.post(transferOf(0, data.data(), 100), 40));
  ASSERT_TRUE(ring.post(transferOf(1, data.data(), 10), 40));
  EXPECT_FALSE(ring.post(transferOf(2, data.data(), 10), 40)) << "full";
  EXPECT_TRUE(ring.any());
  std::vector<Taken> taken;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(takeFrom(ring, &taken));
  // The first slot is free as soon as its pieces are taken.
  ASSERT_TRUE(ring.post(transferOf(2, data.data(), 50), 40));
  while (takeFrom(ring, &taken)) {
  }
  EXPECT_FALSE(ring.any());
  const std::uint64_t expected[][3] = {{0, 0, 40}, {0, 40, 40}, {0, 80, 20},
                                       {1, 0, 10}, {2, 0, 40},  {2, 40, 10}};
  ASSERT_EQ(taken.size(), 6u);
  for (std::size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(taken[i].transfer, expected[i][0]) << i;
    EXPECT_EQ(taken[i].offset, expected[i][1]) << i;
    EXPECT_EQ(taken[i].bytes, expected[i][2]) << i;
  }
  EXPECT_EQ(ring.posted(), 6u);
}

// What one worker takes never goes back, however the others and refilled slots come between: a
// receiver that waits for an earlier transfer would find a later one before it on a socket.
TEST(TransferRing, NoWorkerGoesBack) {
  constexpr std::uint64_t kTransfers = 60'000;
  constexpr int kWorkers = 3;
  const std::vector<std::byte> data(64);
  TransferRing ring(4);
  std::atomic<std::uint64_t> left{0};
  std::atomic<bool> all{false};
  std::vector<std::vector<Taken>> taken(kWorkers);
  std::vector<std::thread> workers;
  for (int w = 0; w < kWorkers; ++w) {
    workers.emplace_back([&, w] {
      for (;;) {
        const bool last = all.load();
        if (takeFrom(ring, &taken[w])) continue;
        if (last) return;
        ::sched_yield();
      }
    });
  }
  for (std::uint64_t n = 0; n < kTransfers; ++n) {
    const std::uint64_t bytes = 1 + n % 64;
    left += (bytes + 15) / 16;
    while (!ring.post(transferOf(n, data.data(), bytes), 16)) ::sched_yield();
  }
  all = true;
  for (std::thread& worker : workers) worker.join();
  std::vector<std::uint64_t> bytes(kTransfers);
  std::uint64_t pieces = 0;
  for (const std::vector<Taken>& each : taken) {
    pieces += each.size();
    for (std::size_t i = 0; i < each.size(); ++i) {
      bytes[each[i].transfer] += each[i].bytes;
      if (i == 0) continue;
      const bool forward =
          each[i].transfer > each[i - 1].transfer ||
          (each[i].transfer == each[i - 1].transfer && each[i].offset > each[i - 1].offset);
      ASSERT_TRUE(forward) << each[i].transfer << " behind " << each[i - 1].transfer;
    }
  }
  EXPECT_EQ(pieces, left.load());
  for (std::uint64_t n = 0; n < kTransfers; ++n) ASSERT_EQ(bytes[n], 1 + n % 64) << n;
}

}  // namespace
}  // namespace hoccl
