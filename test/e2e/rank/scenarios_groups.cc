// Groups: what is steered and what stays with NCCL in one, and the order in which it takes effect.

#include <unistd.h>

#include <array>
#include <cstring>
#include <numeric>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kSteered = 300001;
constexpr std::size_t kSmall = 1003;

void send(Buffer& buffer, int peer, ncclComm_t comm, CUstream stream) {
  REQUIRE_NCCL(nccl().ncclSend(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, stream));
}
void receive(Buffer& buffer, int peer, ncclComm_t comm, CUstream stream) {
  REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, stream));
}
void groupStart() { REQUIRE_NCCL(nccl().ncclGroupStart()); }
void groupEnd() { REQUIRE_NCCL(nccl().ncclGroupEnd()); }

void check(Buffer& buffer, CUstream stream, std::uint64_t seed, const std::string& what) {
  buffer.fetch(stream);
  awaitStream(stream, what);
  buffer.requirePattern(seed, what);
}

/// A steered send and receive, a small send and receive and an AllReduce in one group.
void mixed(const Rank& rank) {
  constexpr int kNumbers = 257;
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream(), second = newStream();
  const int peer = 1 - rank.rank;
  for (const bool twoStreams : {false, true}) {
    CUstream other = twoStreams ? second : stream;
    Buffer out(kSteered, 1), in(kSteered, 3), smallOut(kSmall, 5), smallIn(kSmall, 7);
    Buffer numbers(kNumbers * sizeof(float)), sums(kNumbers * sizeof(float));
    std::array<float, kNumbers> values{};
    std::iota(values.begin(), values.end(), static_cast<float>(rank.rank));
    out.fill(seedOf(rank.rank, 1), stream);
    in.poison(stream);
    smallOut.fill(seedOf(rank.rank, 2), other);
    smallIn.poison(other);
    numbers.put(values.data(), other);
    sums.poison(other);
    groupStart();
    send(smallOut, peer, comm, other);
    send(out, peer, comm, stream);
    REQUIRE_NCCL(nccl().ncclAllReduce(numbers.data(), sums.data(), kNumbers, ncclFloat32, ncclSum,
                                      comm, other));
    receive(in, peer, comm, stream);
    receive(smallIn, peer, comm, other);
    groupEnd();
    out.poison(stream);
    check(in, stream, seedOf(peer, 1), "steered in a mixed group");
    check(smallIn, other, seedOf(peer, 2), "small in a mixed group");
    sums.fetch(other);
    awaitStream(other, "AllReduce in a mixed group");
    for (int i = 0; i < kNumbers; ++i) {
      float sum = 0;
      std::memcpy(&sum, sums.fetched() + i * sizeof sum, sizeof sum);
      REQUIRE(sum == static_cast<float>(2 * i + 1), "sum {} is {}", i, sum);
    }
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Rank 0 stays inside the real ncclGroupEnd (the stand-in blocks there) until rank 1 answers its
/// small operation. Rank 1 answers only once the steered half has got through; so the steered start
/// must be on the stream before the real ncclGroupEnd, and the steered wait must not, since the
/// stand-in waits for the stream before it moves the small one.
void order(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer steered(kSteered, 1), small(kSmall, 1);
  // Starts come before the real ncclGroupEnd.
  if (rank.rank == 0) {
    steered.fill(seedOf(0, 1), stream);
    small.fill(seedOf(0, 2), stream);
    groupStart();
    send(steered, 1, comm, stream);
    send(small, 1, comm, stream);
    groupEnd();
    awaitStream(stream, "starts first");
  } else {
    steered.poison(stream);
    receive(steered, 0, comm, stream);
    check(steered, stream, seedOf(0, 1), "starts come before the real ncclGroupEnd");
    small.poison(stream);
    receive(small, 0, comm, stream);
    check(small, stream, seedOf(0, 2), "the small one behind");
  }
  rank.barrier("half");
  // Waits come after it.
  if (rank.rank == 0) {
    steered.poison(stream);
    small.fill(seedOf(0, 3), stream);
    groupStart();
    receive(steered, 1, comm, stream);
    send(small, 1, comm, stream);
    groupEnd();
    check(steered, stream, seedOf(1, 4), "waits come after the real ncclGroupEnd");
  } else {
    small.poison(stream);
    receive(small, 0, comm, stream);
    check(small, stream, seedOf(0, 3), "the small one first");
    steered.fill(seedOf(1, 4), stream);
    send(steered, 0, comm, stream);
    awaitStream(stream, "the steered answer");
  }
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A group's streams start together and end together: what one of them does before the group is
/// done for the send on the other, and what one receives is there for what the other does next.
void crossedStreams(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream a = newStream(), b = newStream();
  const int peer = 1 - rank.rank;
  Buffer out(kSteered, 1), in(kSteered, 3);
  out.poison(a);
  awaitStream(a, "poison");
  Gate gate;
  gate.hold(b);
  out.fill(seedOf(rank.rank, 1), b);
  in.poison(b);
  groupStart();
  send(out, peer, comm, a);
  receive(in, peer, comm, b);
  groupEnd();
  in.fetch(a);
  requireBusy(a, 20, "a stream of a group whose other stream has not come");
  gate.open();
  awaitStream(a, "the stream that has sent");
  in.requirePattern(seedOf(peer, 1), "received on the other stream");
  awaitStream(b, "the stream that has received");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// The same of what a rank sends to itself, which its stream may copy: it waits for the other
/// stream, and the other one for it, though nothing of the movers is under way any more.
void ownBlockOnStreams(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream a = newStream(), b = newStream();
  const int peer = 1 - rank.rank;
  constexpr std::size_t kLong = 48 << 20;
  Buffer out(kSteered, 1), in(kSteered, 3), ownOut(kLong, 5), ownIn(kLong, 7);
  for (Buffer* each : {&out, &ownOut, &ownIn, &in}) each->poison(a);
  awaitStream(a, "poison");
  Gate gate;
  gate.hold(b);
  out.fill(seedOf(rank.rank, 1), b);
  ownOut.fill(seedOf(rank.rank, 2), b);
  groupStart();
  send(out, peer, comm, a);
  send(ownOut, rank.rank, comm, a);
  receive(ownIn, rank.rank, comm, a);
  receive(in, peer, comm, b);
  groupEnd();
  ownIn.fetch(b);
  requireBusy(a, 20, "a stream of a group whose other stream has not come");
  gate.open();
  awaitStream(b, "the stream that has received");
  ownIn.requirePattern(seedOf(rank.rank, 2), "of the rank to itself, on the other stream");
  in.fetch(b);
  awaitStream(b, "what the peer sent");
  in.requirePattern(seedOf(peer, 1), "from the peer");
  awaitStream(a, "the stream that has sent");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Two streams in one group start when both have come, and end together.
void twoStreams(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream a = newStream(), b = newStream();
  Buffer onA(kSteered, 1), onB(kSteered + 2, 3);
  Gate gate;
  if (rank.rank == 0) {
    onA.fill(seedOf(0, 1), a);
    onB.fill(seedOf(0, 2), b);
    gate.hold(b);
    groupStart();
    send(onA, 1, comm, a);
    send(onB, 1, comm, b);
    groupEnd();
    onA.poison(a);
    onB.poison(b);
    requireBusy(a, 300, "stream A, while B has not come");
    rank.post("held");
    rank.await("seen held");
    gate.open();
    awaitStream(a, "both streams started");
    awaitStream(b, "both streams started");
    rank.barrier("started");
    // Now the receiver's group: A's bytes come long before B's.
    onA.fill(seedOf(0, 3), a);
    send(onA, 1, comm, a);
    awaitStream(a, "first half");
    rank.post("first half");
    rank.await("still together");
    onB.fill(seedOf(0, 4), b);
    send(onB, 1, comm, b);
    awaitStream(b, "second half");
  } else {
    onA.poison(a);
    onB.poison(b);
    receive(onA, 0, comm, a);
    receive(onB, 0, comm, b);
    rank.await("held");
    REQUIRE(!streamIdle(a) && !streamIdle(b), "a group started with one of its streams missing");
    rank.post("seen held");
    check(onA, a, seedOf(0, 1), "stream A");
    check(onB, b, seedOf(0, 2), "stream B");
    rank.barrier("started");
    onA.poison(a);
    onB.poison(b);
    groupStart();
    receive(onA, 0, comm, a);
    receive(onB, 0, comm, b);
    groupEnd();
    rank.await("first half");
    requireBusy(a, 300, "stream A of a group whose stream B has not ended");
    rank.post("still together");
    check(onA, a, seedOf(0, 3), "stream A");
    check(onB, b, seedOf(0, 4), "stream B");
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Two communicators in one group, steered and small operations on each.
void twoCommunicators(const Rank& rank) {
  ncclComm_t first = rank.communicator("first"), second = rank.communicator("second");
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  Buffer out(kSteered, 1), in(kSteered, 3), smallOut(kSmall, 5), smallIn(kSmall, 7);
  for (std::uint64_t n = 0; n < 3; ++n) {
    out.fill(seedOf(rank.rank, n), stream);
    smallOut.fill(seedOf(rank.rank, n, 1), stream);
    in.poison(stream);
    smallIn.poison(stream);
    groupStart();
    if (rank.rank == 0) {
      send(out, peer, first, stream);
      receive(in, peer, second, stream);
      send(smallOut, peer, second, stream);
      receive(smallIn, peer, first, stream);
    } else {
      receive(smallIn, peer, second, stream);
      send(out, peer, second, stream);
      send(smallOut, peer, first, stream);
      receive(in, peer, first, stream);
    }
    groupEnd();
    check(in, stream, seedOf(peer, n), "steered over two communicators");
    check(smallIn, stream, seedOf(peer, n, 1), "small over two communicators");
  }
  sayStats();
  for (ncclComm_t comm : {first, second}) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Nothing happens before the outermost end; empty groups and an end too many are as with NCCL.
void nested(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  Buffer out(kSteered, 1), in(kSteered, 3), smallOut(kSmall, 0), smallIn(kSmall, 0);
  groupStart();
  groupEnd();
  groupStart();
  groupStart();
  groupEnd();
  groupEnd();
  out.fill(seedOf(rank.rank, 1), stream);
  smallOut.fill(seedOf(rank.rank, 2), stream);
  in.poison(stream);
  smallIn.poison(stream);
  awaitStream(stream, "prepared");
  groupStart();
  groupStart();
  send(out, peer, comm, stream);
  groupStart();
  receive(smallIn, peer, comm, stream);
  groupEnd();
  groupEnd();
  in.fetch(stream);
  awaitStream(stream, "nothing enqueued yet");  // no wait on the stream before the outermost end
  in.requirePoison("an inner ncclGroupEnd started the group");
  groupStart();
  receive(in, peer, comm, stream);
  send(smallOut, peer, comm, stream);
  groupEnd();
  groupEnd();
  check(in, stream, seedOf(peer, 1), "nested");
  check(smallIn, stream, seedOf(peer, 2), "nested, small");
  REQUIRE(nccl().ncclGroupEnd() == ncclInvalidUsage, "an end too many passed");
  // And the count of groups is right afterwards: this one is not in a group.
  out.fill(seedOf(rank.rank, 3), stream);
  in.poison(stream);
  groupStart();
  send(out, peer, comm, stream);
  receive(in, peer, comm, stream);
  groupEnd();
  check(in, stream, seedOf(peer, 3), "after an end too many");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// More operations in one group than anything is sized for, on more streams than usual.
void large(const Rank& rank) {
  const std::size_t count = std::stoul(rank.argument("count", "300"));
  constexpr std::size_t kBytes = (64 << 10) + 1;
  ncclComm_t comm = rank.communicator();
  const int peer = 1 - rank.rank;
  std::vector<CUstream> streams;
  for (int i = 0; i < 20; ++i) streams.push_back(newStream());
  Buffer out(count * kBytes, 1), in(count * kBytes, 3);
  out.fill(seedOf(rank.rank, 1), streams[0]);
  in.poison(streams[0]);
  awaitStream(streams[0], "prepared");
  groupStart();
  for (std::size_t n = 0; n < count; ++n) {
    CUstream stream = streams[n % streams.size()];
    REQUIRE_NCCL(nccl().ncclSend(static_cast<char*>(out.data()) + n * kBytes, kBytes, ncclUint8,
                                 peer, comm, stream));
    REQUIRE_NCCL(nccl().ncclRecv(static_cast<char*>(in.data()) + n * kBytes, kBytes, ncclUint8,
                                 peer, comm, stream));
  }
  groupEnd();
  for (CUstream stream : streams) awaitStream(stream, "a large group", 40000);
  check(in, streams[0], seedOf(peer, 1), "a large group");
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A group one of whose calls failed: with NCCL nothing of it happens and the end says so.
void failedCall(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  Buffer out(kSteered, 1), in(kSteered, 3);
  out.fill(seedOf(rank.rank, 1), stream);
  in.poison(stream);
  groupStart();
  send(out, peer, comm, stream);
  const ncclResult_t bad =
      nccl().ncclSend(out.data(), kSmall, static_cast<ncclDataType_t>(99), peer, comm, stream);
  receive(in, peer, comm, stream);
  const ncclResult_t end = nccl().ncclGroupEnd();
  REQUIRE(bad != ncclSuccess && end != ncclSuccess, "call {}, end {}", static_cast<int>(bad),
          static_cast<int>(end));
  in.fetch(stream);
  awaitStream(stream, "a group that failed", 5000);
  in.requirePoison("a group whose end failed moved data");
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
}

}  // namespace

const std::vector<Scenario> kGroupScenarios = {
    {"mixed", mixed},
    {"order", order},
    {"twoStreams", twoStreams},
    {"twoCommunicators", twoCommunicators},
    {"crossedStreams", crossedStreams},
    {"ownBlockOnStreams", ownBlockOnStreams},
    {"nested", nested},
    {"large", large},
    {"failedCall", failedCall},
};

}  // namespace e2e
