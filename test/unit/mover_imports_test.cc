// Imports over their life in a whole mover: who asks for one to be dropped gets its answer when it
// is unmapped, not before and not because of others; idle ones go.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/time.h"
#include "common/runtime/import_drops.h"
#include "test/unit/fake_driver.h"
#include "test/unit/fake_memory.h"
#include "test/unit/fakes.h"
#include "test/unit/mover_harness.h"

namespace hoccl {
namespace {

using test::contains;
using test::DeviceBuffer;
using test::fakeImports;
using test::freshAllocation;
using test::kPatienceMs;
using test::TestMover;
using test::Two;
using test::waitUntil;
using Answer = ImportDrops::Answer;
using Options = TestMover::Options;
using Ticket = TestMover::Ticket;

constexpr std::uint64_t kBytes = 64 << 10;
/// For what must not happen: long enough for a mover that would do it.
constexpr std::uint64_t kSettleMs = 100;

/// The application's side of drops to one mover.
struct Drops {
  explicit Drops(TestMover& mover) : mover(mover), drops(mover.segment) {}
  DropRequest ask(OpKind kind, std::uint64_t allocation = 0) {
    OpDescriptor descriptor{};
    descriptor.kind = kind;
    descriptor.buffer.allocationId = allocation;
    DropRequest request;
    EXPECT_TRUE(drops.take(&descriptor, &request));
    mover.push(descriptor);
    mover.ring();
    return request;
  }
  Answer await(const DropRequest& request, std::uint64_t ms = kPatienceMs) {
    return drops.await(request, Deadline::afterMs(ms));
  }
  TestMover& mover;
  ImportDrops drops;
};

/// Two buffers and identities for transfers from a to b.
struct Transfer {
  DeviceBuffer from{kBytes, 0}, to{kBytes, 0};
  std::uint64_t fromId = freshAllocation(), toId = freshAllocation();
  [[nodiscard]] Ticket send(Two& two, std::uint64_t sequence) {
    return two.a->launch({{OpKind::Send, 0, 1, kBytes, sequence, refTo(from, fromId)}});
  }
  [[nodiscard]] Ticket receive(Two& two, std::uint64_t sequence) {
    return two.b->launch({{OpKind::Recv, 0, 0, kBytes, sequence, refTo(to, toId)}});
  }
  /// Both, until the movers have let go of them: a lane's `finish` shows before the mover has seen it
  /// and given the import back.
  void run(Two& two, std::uint64_t sequence) {
    const Ticket sent = send(two, sequence), received = receive(two, sequence);
    awaitRelease(*two.a, sent);
    awaitRelease(*two.b, received);
  }
  static void awaitRelease(const TestMover& mover, const Ticket& ticket) {
    EXPECT_TRUE(mover.waitFor(ticket));
    EXPECT_TRUE(
        waitUntil([&] {
      return mover.segment.launch(ticket.streams.front().first)
          .released.reached(ticket.streams.front().second);
    }));
  }
};

TEST(Rule8, ADropIsAnsweredWhenTheImportIsUnmapped) {
  Two two;
  Transfer transfer;
  transfer.run(two, 0);
  const std::uint32_t closed = fakeImports().closed.load();
  Drops drops(*two.a);
  const DropRequest request = drops.ask(OpKind::Drop, transfer.fromId);
  ASSERT_EQ(drops.await(request), Answer::Done);
  EXPECT_EQ(fakeImports().closed.load(), closed + 1);
  EXPECT_EQ(drops.drops.unmapped(request), 1u);
  // It comes again as a new import, and the bytes still get there.
  const std::uint64_t imports = two.a->segment.header().imports.load();
  transfer.run(two, 1);
  EXPECT_EQ(two.a->segment.header().imports.load(), imports + 1);
}

TEST(Rule8, ADropOfWhatIsNotMappedIsAnsweredAtOnce) {
  Two two;
  const std::uint32_t closed = fakeImports().closed.load();
  Drops drops(*two.a);
  const DropRequest request = drops.ask(OpKind::Drop, freshAllocation());
  EXPECT_EQ(drops.await(request), Answer::Done);
  EXPECT_EQ(drops.drops.unmapped(request), 0u);
  EXPECT_EQ(fakeImports().closed.load(), closed);
}

TEST(Rule8, ADropWaitsForTheOperationsOnThatAllocationAndForNoOthers) {
  Two two;
  Transfer pending, idle;
  idle.run(two, 0);
  const Ticket received = pending.receive(two, 1);  // its send comes late
  Drops drops(*two.b);
  const DropRequest held = drops.ask(OpKind::Drop, pending.toId);
  const DropRequest free = drops.ask(OpKind::Drop, idle.toId);
  EXPECT_EQ(drops.await(free), Answer::Done) << "an operation on another allocation held it up";
  EXPECT_EQ(drops.await(held, kSettleMs), Answer::TimedOut);
  EXPECT_TRUE(waitUntil([&] { return !drops.drops.pending(held).empty(); }));
  const std::string why = drops.drops.pending(held);
  EXPECT_TRUE(contains(why,
                       "1 operation, the first a receive of 65536 bytes from rank 0 (host hostA, "
                       "process 111): the peer has sent nothing"))
      << why;
  EXPECT_EQ(drops.drops.pending(free), "");
  const Ticket sent = pending.send(two, 1);
  EXPECT_EQ(drops.await(held), Answer::Done);
  EXPECT_TRUE(two.b->finished(received)) << "unmapped under a pending operation";
  EXPECT_TRUE(two.a->waitFor(sent));
}

TEST(Rule8, ADropWaitsForUnmapsThatAreUnderWay) {
  Two two;
  Transfer transfer, blocker;
  transfer.run(two, 0);
  fakeImports().held.store(true);
  // The control thread hangs in this one's mapping, so what is asked of it after stays undone.
  const Ticket sent = blocker.send(two, 1);
  const std::uint32_t closed = fakeImports().closed.load();
  Drops drops(*two.a);
  const DropRequest request = drops.ask(OpKind::Drop, transfer.fromId);
  EXPECT_EQ(drops.await(request, kSettleMs), Answer::TimedOut) << "answered before the unmap";
  // It is out of the cache by now, but still mapped.
  const DropRequest again = drops.ask(OpKind::Drop, transfer.fromId);
  EXPECT_EQ(drops.await(again, kSettleMs), Answer::TimedOut);
  EXPECT_EQ(fakeImports().closed.load(), closed);
  fakeImports().held.store(false);
  EXPECT_EQ(drops.await(request), Answer::Done);
  EXPECT_EQ(drops.await(again), Answer::Done);
  EXPECT_EQ(fakeImports().closed.load(), closed + 1);
  const Ticket received = blocker.receive(two, 1);
  EXPECT_TRUE(two.a->waitFor(sent));
  EXPECT_TRUE(two.b->waitFor(received));
}

TEST(Rule8, ADropOfAnImportThatIsBeingMappedWaitsForBoth) {
  Two two;
  Transfer transfer;
  fakeImports().held.store(true);
  const Ticket sent = transfer.send(two, 0);
  Drops drops(*two.a);
  const DropRequest request = drops.ask(OpKind::Drop, transfer.fromId);
  EXPECT_EQ(drops.await(request, kSettleMs), Answer::TimedOut);
  fakeImports().held.store(false);
  const Ticket received = transfer.receive(two, 0);
  EXPECT_EQ(drops.await(request), Answer::Done);
  EXPECT_EQ(drops.drops.unmapped(request), 1u);
  EXPECT_TRUE(two.a->finished(sent));
  EXPECT_TRUE(two.b->waitFor(received));
}

TEST(Rule8, AFailedImportIsDroppedWithoutAnUnmap) {
  Two two;
  DeviceBuffer buffer(kBytes, 0);
  const std::uint64_t id = freshAllocation();
  const Ticket sent =
      two.a->launch({{OpKind::Send, 0, 1, kBytes, 0, refTo(buffer, id, CUDA_ERROR_MAP_FAILED)}});
  EXPECT_TRUE(two.a->waitFor(sent));
  const std::uint32_t closed = fakeImports().closed.load();
  Drops drops(*two.a);
  EXPECT_EQ(drops.await(drops.ask(OpKind::Drop, id)), Answer::Done);
  EXPECT_EQ(drops.await(drops.ask(OpKind::DropIdle)), Answer::Done);
  EXPECT_EQ(fakeImports().closed.load(), closed);
}

TEST(Rule8, AllIdleImportsGoOnRequestAndUsedOnesStay) {
  Two two;
  std::vector<std::unique_ptr<Transfer>> transfers;
  for (std::uint64_t i = 0; i < 5; ++i) {
    transfers.push_back(std::make_unique<Transfer>());
    transfers.back()->run(two, i);
  }
  Transfer pending;
  const Ticket received = pending.receive(two, 5);
  Drops drops(*two.b);
  const DropRequest request = drops.ask(OpKind::DropIdle);
  ASSERT_EQ(drops.await(request), Answer::Done);
  EXPECT_EQ(drops.drops.unmapped(request), 5u);
  const DropRequest again = drops.ask(OpKind::DropIdle);
  ASSERT_EQ(drops.await(again), Answer::Done);
  EXPECT_EQ(drops.drops.unmapped(again), 0u);
  EXPECT_FALSE(two.b->finished(received));
  const Ticket sent = pending.send(two, 5);
  EXPECT_TRUE(two.b->waitFor(received));
  EXPECT_TRUE(two.a->waitFor(sent));
}

TEST(Rule8, IdleImportsGoByThemselvesAndTheMoverSleepsThen) {
  Options options;
  options.importIdleMs = 50;
  Two two(options);
  Transfer transfer;
  transfer.run(two, 0);
  for (TestMover* mover : {two.a.get(), two.b.get()}) {
    const SegmentHeader& header = mover->segment.header();
    EXPECT_TRUE(waitUntil([&] { return header.unmaps.load() == 1; }));
    EXPECT_TRUE(waitUntil([&] { return header.moverSleeps.load() == 1; }));
    ::usleep(50'000);
    const std::uint64_t wakeups = header.loopWakeups.load();
    ::usleep(200'000);
    EXPECT_LE(header.loopWakeups.load(), wakeups + 1) << "rule 11: an idle mover uses no CPU";
  }
  transfer.run(two, 1);
}

TEST(Rule8, ImportsInUseAreNotIdle) {
  Options options;
  options.importIdleMs = 20;
  Two two(options);
  Transfer transfer;
  const Ticket received = transfer.receive(two, 0);
  EXPECT_TRUE(waitUntil([&] { return two.b->segment.header().imports.load() == 1; }));
  ::usleep(100'000);
  EXPECT_EQ(two.b->segment.header().unmaps.load(), 0u);
  const Ticket sent = transfer.send(two, 0);
  EXPECT_TRUE(two.b->waitFor(received));
  EXPECT_TRUE(two.a->waitFor(sent));
}

TEST(ImportDrops, AMoverThatIsSilentIsNotWaitedForAgainAndAgain) {
  Options options;
  options.startLoop = false;
  Two two(options);
  Drops drops(*two.a);
  std::vector<DropRequest> requests;
  for (int i = 0; i < 5; ++i) requests.push_back(drops.ask(OpKind::Drop, freshAllocation()));
  EXPECT_EQ(drops.await(requests[0], 50), Answer::TimedOut);
  const std::uint64_t before = monotonicNs();
  for (int i = 1; i < 5; ++i) EXPECT_EQ(drops.await(requests[i]), Answer::TimedOut);
  EXPECT_LT(monotonicNs() - before, kPatienceMs * 1'000'000 / 4);
  two.a->startLoop();
  two.b->startLoop();
  for (const DropRequest& request : requests) {
    EXPECT_TRUE(waitUntil([&] { return drops.await(request) == Answer::Done; }));
  }
}

TEST(ImportDrops, SlotsAreTakenAgainOnlyOnceAnsweredAndFlagsOnlyGrow) {
  Two two;
  Transfer pending;
  const Ticket received = pending.receive(two, 0);
  Drops drops(*two.b);
  std::vector<DropRequest> stuck;
  for (std::uint32_t i = 0; i < kDropSlots; ++i) {
    stuck.push_back(drops.ask(OpKind::Drop, pending.toId));
  }
  OpDescriptor descriptor{};
  DropRequest none;
  EXPECT_FALSE(drops.drops.take(&descriptor, &none)) << "all slots wait";
  EXPECT_EQ(none.sequence, 0u);
  const Ticket sent = pending.send(two, 0);
  for (const DropRequest& request : stuck) EXPECT_EQ(drops.await(request), Answer::Done);
  for (int i = 0; i < 1000; ++i) {
    const DropRequest request = drops.ask(OpKind::Drop, freshAllocation());
    ASSERT_EQ(drops.await(request), Answer::Done) << i;
  }
  EXPECT_TRUE(two.b->waitFor(received));
  EXPECT_TRUE(two.a->waitFor(sent));
}

}  // namespace
}  // namespace hoccl
