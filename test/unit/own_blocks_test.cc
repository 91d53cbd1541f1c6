// Which of a rank's operations with itself the application's stream copies
// (HOCCL_OWN_BLOCK=kernel).

#include "plugin-tuner/own_blocks.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/runtime/pair_window.h"
#include "common/runtime/span_slot.h"
#include "plugin-tuner/launcher.h"

namespace hoccl {
namespace {

constexpr int kSelf = 1, kPeer = 0, kRanks = 2;
constexpr std::uint64_t kBytes = 1 << 20;
constexpr CUdeviceptr kFrom = 0x10000000, kTo = 0x20000000;

CUstream stream(std::uintptr_t number) { return reinterpret_cast<CUstream>(number * 64); }
MoverClient* mover(std::uintptr_t number) { return reinterpret_cast<MoverClient*>(number * 64); }

/// A communicator with counts but without a mover, of which only the address matters here.
struct Comm : SteeredComm {
  explicit Comm(std::uintptr_t itsMover = 1) : pairs(new PairCounts[kRanks]()) {
    rank = kSelf;
    ranks = kRanks;
    mover = hoccl::mover(itsMover);
    sendSequence.assign(kRanks, 0);
    recvSequence.assign(kRanks, 0);
    pairCounts = pairs.get();
  }
  std::unique_ptr<PairCounts[]> pairs;
};

class OwnBlocks : public ::testing::Test {
 protected:
  /// As SteeredCall does it.
  void add(Comm& comm, OpKind kind, int peer, CUstream on, CUdeviceptr address,
           std::uint64_t bytes = kBytes) {
    auto& sequences = kind == OpKind::Send ? comm.sendSequence : comm.recvSequence;
    PendingOp op;
    op.comm = &comm;
    op.stream = on;
    op.address = address;
    op.descriptor.kind = kind;
    op.descriptor.peer = peer;
    op.descriptor.bytes = bytes;
    op.descriptor.pairSequence = sequences[static_cast<std::size_t>(peer)]++;
    comm.counts(peer, kind == OpKind::Send)
        .steered.store(sequences[static_cast<std::size_t>(peer)]);
    comm.count(Path::Staged, bytes);
    ops.push_back(op);
  }
  void send(Comm& comm, CUstream on, CUdeviceptr from = kFrom, std::uint64_t bytes = kBytes) {
    add(comm, OpKind::Send, kSelf, on, from, bytes);
  }
  void receive(Comm& comm, CUstream on, CUdeviceptr to = kTo, std::uint64_t bytes = kBytes) {
    add(comm, OpKind::Recv, kSelf, on, to, bytes);
  }
  void toPeer(Comm& comm, CUstream on) { add(comm, OpKind::Send, kPeer, on, kFrom); }
  void take() { takeOwnBlocks(&ops, &blocks); }
  void expectNoneTaken() {
    const std::size_t before = ops.size();
    take();
    EXPECT_EQ(ops.size(), before);
    EXPECT_TRUE(blocks.empty());
  }

  std::vector<PendingOp> ops;
  std::vector<OwnBlock> blocks;
};

TEST_F(OwnBlocks, APairBesideAnotherOperationOfItsStream) {
  Comm comm;
  comm.sendSequence[kSelf] = comm.recvSequence[kSelf] = 7;
  toPeer(comm, stream(1));
  receive(comm, stream(1), kTo + 5);
  send(comm, stream(1), kFrom + 3);
  take();
  ASSERT_EQ(ops.size(), 1u);
  EXPECT_EQ(ops[0].descriptor.peer, kPeer);
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks[0].comm, &comm);
  EXPECT_EQ(blocks[0].stream, stream(1));
  EXPECT_EQ(blocks[0].from, kFrom + 3);
  EXPECT_EQ(blocks[0].to, kTo + 5);
  EXPECT_EQ(blocks[0].bytes, kBytes);
  // The next operations get their numbers, and the mover hears of no gap.
  EXPECT_EQ(comm.sendSequence[kSelf], 7u);
  EXPECT_EQ(comm.recvSequence[kSelf], 7u);
  EXPECT_EQ(comm.counts(kSelf, true).steered, 7u);
  EXPECT_EQ(comm.counts(kSelf, false).steered, 7u);
  EXPECT_EQ(comm.sendSequence[kPeer], 1u);
  EXPECT_EQ(comm.moved(Path::OwnBlock).ops, 2u);
  EXPECT_EQ(comm.moved(Path::OwnBlock).bytes, 2 * kBytes);
  EXPECT_EQ(comm.moved(Path::Staged).ops, 1u);
  EXPECT_EQ(comm.moved(Path::Staged).bytes, kBytes);
}

TEST_F(OwnBlocks, SendsAndReceivesMeetInTheOrderOfTheCalls) {
  Comm comm;
  for (CUdeviceptr n : {0, 1, 2}) send(comm, stream(1), kFrom + n, kBytes + n);
  toPeer(comm, stream(1));
  for (CUdeviceptr n : {0, 1, 2}) receive(comm, stream(1), kTo + n, kBytes + n);
  take();
  ASSERT_EQ(ops.size(), 1u);
  ASSERT_EQ(blocks.size(), 3u);
  for (CUdeviceptr n : {0, 1, 2}) {
    EXPECT_EQ(blocks[n].from, kFrom + n);
    EXPECT_EQ(blocks[n].to, kTo + n);
    EXPECT_EQ(blocks[n].bytes, kBytes + n);
  }
}

TEST_F(OwnBlocks, NotWhereTheStreamHasNothingElse) {
  Comm comm, other;
  toPeer(comm, stream(2));
  send(comm, stream(1));
  receive(comm, stream(1));
  send(other, stream(1));  // would be gone as well
  receive(other, stream(1));
  expectNoneTaken();
}

TEST_F(OwnBlocks, NotWhereOneOfTheirStreamsHasNothingElse) {
  Comm comm;
  toPeer(comm, stream(1));
  for (std::uintptr_t each : {1, 2}) {
    send(comm, stream(each));
    receive(comm, stream(each));
  }
  expectNoneTaken();
}

/// No operation comes of it any more for which the mover would have to keep the span.
TEST_F(OwnBlocks, HoldNoSpan) {
  SpanSlot span{};
  span.open();  // with one pin
  span.pinAgain();
  const std::uint64_t noted = span.word - 2;
  Comm comm;
  toPeer(comm, stream(1));
  send(comm, stream(1));
  receive(comm, stream(1));
  for (PendingOp& op : ops) {
    if (op.descriptor.peer == kSelf) op.span = &span;
  }
  EXPECT_TRUE(span.pinned(noted));
  take();
  EXPECT_EQ(blocks.size(), 1u);
  EXPECT_FALSE(span.pinned(noted));
}

TEST_F(OwnBlocks, NotBesideAnotherMoversOperation) {
  for (const bool besideOwn : {false, true}) {
    ops.clear();
    Comm comm(1), other(2);
    toPeer(other, stream(1));
    send(comm, stream(1));
    receive(comm, stream(1));
    if (!besideOwn) {
      expectNoneTaken();
      continue;
    }
    toPeer(comm, stream(1));
    take();
    EXPECT_EQ(ops.size(), 2u);
    EXPECT_EQ(blocks.size(), 1u);
  }
}

TEST_F(OwnBlocks, NotFromOneStreamToAnother) {
  Comm comm;
  for (std::uintptr_t each : {1, 2}) toPeer(comm, stream(each));
  send(comm, stream(1));
  receive(comm, stream(2));
  expectNoneTaken();
}

TEST_F(OwnBlocks, NotOfDifferentSizes) {
  Comm comm;
  toPeer(comm, stream(1));
  send(comm, stream(1), kFrom, kBytes);
  receive(comm, stream(1), kTo, kBytes + 1);
  expectNoneTaken();
}

TEST_F(OwnBlocks, NotWithApplicationSideCopies) {
  for (const bool ofTheSend : {false, true}) {
    ops.clear();
    Comm comm;
    toPeer(comm, stream(1));
    send(comm, stream(1), ofTheSend ? 0 : kFrom);
    receive(comm, stream(1), ofTheSend ? kTo : 0);
    expectNoneTaken();
  }
}

TEST_F(OwnBlocks, NotWhereOneHasItsCounterpartInAnotherGroup) {
  for (const bool more : {false, true}) {
    ops.clear();
    Comm comm;
    comm.sendSequence[kSelf] = 1;  // the mover has a send already
    toPeer(comm, stream(1));
    receive(comm, stream(1));
    if (more) receive(comm, stream(1));
    send(comm, stream(1));
    expectNoneTaken();
  }
}

TEST_F(OwnBlocks, AllOfACommunicatorsOrNone) {
  Comm comm, other;
  toPeer(comm, stream(1));
  send(comm, stream(1));
  receive(comm, stream(1));
  send(other, stream(1), kFrom + 1);
  receive(other, stream(1), kTo + 1);
  send(comm, stream(1));  // has no counterpart
  take();
  ASSERT_EQ(ops.size(), 4u);
  for (const PendingOp& op : ops) EXPECT_EQ(op.comm, &comm);
  ASSERT_EQ(blocks.size(), 1u);
  EXPECT_EQ(blocks[0].from, kFrom + 1);
  EXPECT_EQ(comm.sendSequence[kSelf], 2u);
  EXPECT_EQ(other.sendSequence[kSelf], 0u);
}

/// They have numbers of their own, and a mover counts on them.
TEST_F(OwnBlocks, NotThoseOfACollective) {
  Comm comm;
  toPeer(comm, stream(1));
  send(comm, stream(1));
  receive(comm, stream(1));
  for (PendingOp& op : ops) {
    if (op.descriptor.peer == kSelf) op.descriptor.pairSequence |= kCollectiveSequence;
  }
  expectNoneTaken();
}

/// The launch path takes a time that grows with a group's operations, not with their square.
TEST_F(OwnBlocks, OfAGroupOfManyTakesNoTimeToSpeakOf) {
  constexpr std::size_t kMany = 1000;
  for (const bool unmatched : {false, true}) {
    ops.clear();
    blocks.clear();
    Comm comm;
    for (std::size_t n = 0; n < kMany; ++n) send(comm, stream(1));
    for (std::size_t n = 0; n < kMany; ++n) receive(comm, stream(1));
    if (unmatched) receive(comm, stream(1));
    toPeer(comm, stream(1));
    const auto began = std::chrono::steady_clock::now();
    take();
    const auto took = std::chrono::steady_clock::now() - began;
    EXPECT_EQ(blocks.size(), unmatched ? 0 : kMany);
    EXPECT_LT(std::chrono::duration_cast<std::chrono::milliseconds>(took).count(), 100);
  }
}

/// What preparing asks of the driver.
struct Asked {
  struct Copy {
    CUdeviceptr to, from;
    std::size_t bytes;
  };
  std::vector<Copy> copies;
  CUdeviceptr memory = 0;
  std::size_t bytes = 0;
  int streams = 0;
  CUresult allocation = CUDA_SUCCESS, copy = CUDA_SUCCESS, state = CUDA_SUCCESS;
} asked;

const Driver* fakeDriver() {
  static Driver driver;
  driver.cuMemAlloc = [](CUdeviceptr* out, std::size_t bytes) {
    *out = asked.memory = kFrom;
    asked.bytes = bytes;
    return asked.allocation;
  };
  driver.cuStreamCreate = [](CUstream*, unsigned) {
    ++asked.streams;
    return CUDA_SUCCESS;
  };
  driver.cuStreamDestroy = [](CUstream) {
    --asked.streams;
    return CUDA_SUCCESS;
  };
  driver.cuStreamQuery = [](CUstream) { return asked.state; };
  driver.cuMemcpyDtoDAsync = [](CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream) {
    asked.copies.push_back({to, from, bytes});
    return asked.copy;
  };
  driver.cuGetErrorName = [](CUresult, const char** name) {
    *name = "CUDA_ERROR_OUT_OF_MEMORY";
    return CUDA_SUCCESS;
  };
  driver.cuGetErrorString = driver.cuGetErrorName;
  return &driver;
}

/// By which kernel the driver copies can depend on how the two places are aligned: none of them may
/// be new to it while a transfer is pending.
TEST(PrepareOwnBlocks, CopiesInEveryAlignmentOnceWithinItsMemory) {
  asked = {};
  const Status status = prepareOwnBlocks(fakeDriver(), 100);
  ASSERT_TRUE(status) << status.message();
  for (const std::size_t unit : {16, 8, 4, 2, 1}) {
    const auto aligned = [&](std::size_t value) {
      return value % unit == 0 && (unit == 16 || value % (2 * unit) != 0);
    };
    bool together = false, apart = false;
    for (const Asked::Copy& each : asked.copies) {
      together |= aligned(each.to) && aligned(each.from);
      apart |= aligned(each.to | each.from) && (each.to - each.from) % 16 != 0;
    }
    EXPECT_TRUE(together) << unit;
    EXPECT_TRUE(apart || unit == 16) << unit;
  }
  for (const Asked::Copy& each : asked.copies) {
    EXPECT_GE(each.bytes, 32u << 10);
    EXPECT_GE(each.from, asked.memory);
    EXPECT_LE(each.from + each.bytes, each.to) << "they overlap";
    EXPECT_LE(each.to + each.bytes, asked.memory + asked.bytes);
  }
  EXPECT_EQ(asked.streams, 0);
}

TEST(PrepareOwnBlocks, WhatFailsNamesTheVariable) {
  for (const int which : {0, 1, 2}) {
    asked = {};
    if (which == 0) asked.allocation = CUDA_ERROR_OUT_OF_MEMORY;
    if (which == 1) asked.copy = CUDA_ERROR_OUT_OF_MEMORY;
    if (which == 2) asked.state = CUDA_ERROR_NOT_READY;
    const Status status = prepareOwnBlocks(fakeDriver(), 20);
    ASSERT_FALSE(status) << which;
    EXPECT_NE(status.message().find("HOCCL_OWN_BLOCK=kernel"), std::string::npos)
        << status.message();
    if (which == 2) EXPECT_EQ(status.code(), Code::Timeout);
  }
}

}  // namespace
}  // namespace hoccl
