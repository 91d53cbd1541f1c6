// Send and receive between ranks of different nodes, every byte checked.

#include <unistd.h>

#include <memory>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

struct Shape {
  std::size_t bytes, offset;
};
/// From the smallest steered size on, odd sizes at odd places; the largest takes several chunks.
constexpr Shape kShapes[] = {
    {64 << 10, 0},       {(64 << 10) + 1, 1}, {100003, 3},        {(128 << 10) - 1, 17},
    {(1 << 20) + 13, 5}, {3000001, 4097},     {(8 << 20) - 3, 7}, {8 << 20, 255},
};
constexpr std::size_t kSmallest = 64 << 10;

/// Fills, sends and destroys the bytes behind the send on the stream.
void sendPattern(Buffer& buffer, std::uint64_t seed, int peer, ncclComm_t comm, CUstream stream) {
  buffer.fill(seed, stream);
  REQUIRE_NCCL(nccl().ncclSend(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, stream));
  buffer.poison(stream);
}

void receive(Buffer& buffer, int peer, ncclComm_t comm, CUstream stream) {
  buffer.poison(stream);
  REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), buffer.bytes(), ncclUint8, peer, comm, stream));
  buffer.fetch(stream);
}

void finish(ncclComm_t comm) {
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

void sizes(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  std::uint64_t n = 0;
  for (int sender = 0; sender < 2; ++sender) {
    for (const Shape& shape : kShapes) {
      Buffer buffer(shape.bytes, shape.offset);
      const std::uint64_t seed = seedOf(sender, n++);
      const std::string what =
          fmt::format("{} bytes at {} from rank {}", shape.bytes, shape.offset, sender);
      if (rank.rank == sender) {
        sendPattern(buffer, seed, peer, comm, stream);
        awaitStream(stream, what);
      } else {
        receive(buffer, peer, comm, stream);
        awaitStream(stream, what);
        buffer.requirePattern(seed, what);
      }
    }
  }
  // Elements of other sizes, and different types of equal bytes on the two sides.
  Buffer buffer(150000 * 4, 0);
  if (rank.rank == 0) {
    buffer.fill(seedOf(0, 99), stream);
    REQUIRE_NCCL(nccl().ncclSend(buffer.data(), 150000, ncclFloat32, 1, comm, stream));
    awaitStream(stream, "floats");
  } else {
    buffer.poison(stream);
    REQUIRE_NCCL(nccl().ncclRecv(buffer.data(), 300000, ncclBfloat16, 0, comm, stream));
    buffer.fetch(stream);
    awaitStream(stream, "halves");
    buffer.requirePattern(seedOf(0, 99), "float32 met by bfloat16");
  }
  finish(comm);
}

/// Both ways in one group, again and again on the same buffers.
void bothWays(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  std::uint64_t n = 0;
  for (const Shape& shape : kShapes) {
    Buffer out(shape.bytes, shape.offset), in(shape.bytes, shape.offset + 2);
    for (int i = 0; i < 3; ++i, ++n) {
      out.fill(seedOf(rank.rank, n), stream);
      in.poison(stream);
      REQUIRE_NCCL(nccl().ncclGroupStart());
      REQUIRE_NCCL(nccl().ncclSend(out.data(), out.bytes(), ncclUint8, peer, comm, stream));
      REQUIRE_NCCL(nccl().ncclRecv(in.data(), in.bytes(), ncclUint8, peer, comm, stream));
      REQUIRE_NCCL(nccl().ncclGroupEnd());
      out.poison(stream);
      in.fetch(stream);
      awaitStream(stream, "both ways");
      in.requirePattern(seedOf(peer, n), fmt::format("{} bytes both ways", shape.bytes));
    }
  }
  finish(comm);
  CUdevice device = 0;
  HocclEmuCounters counters{};
  if (!cuda().sessionCounters || cuda().sessionCounters(device, &counters) != CUDA_SUCCESS) return;
  say("smOps", std::to_string(smOps()));
  say("h2dUnder32KiB", std::to_string(counters.h2dUnder32KiB));
}

void ring(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer out(1000003, 9), in(1000003, 31);
  for (std::uint64_t n = 0; n < 6; ++n) {
    out.fill(seedOf(rank.rank, n), stream);
    in.poison(stream);
    REQUIRE_NCCL(nccl().ncclGroupStart());
    REQUIRE_NCCL(nccl().ncclSend(out.data(), out.bytes(), ncclUint8, rank.next(), comm, stream));
    REQUIRE_NCCL(nccl().ncclRecv(in.data(), in.bytes(), ncclUint8, rank.previous(), comm, stream));
    REQUIRE_NCCL(nccl().ncclGroupEnd());
    out.poison(stream);
    in.fetch(stream);
    awaitStream(stream, "ring");
    in.requirePattern(seedOf(rank.previous(), n), "ring");
  }
  finish(comm);
}

/// Several streams at once, everything enqueued before anything is waited for.
void streams(const Rank& rank) {
  constexpr int kStreams = 4;
  constexpr int kRounds = 8;
  ncclComm_t comm = rank.communicator();
  const int peer = 1 - rank.rank;
  std::vector<CUstream> streams;
  std::vector<std::unique_ptr<Buffer>> out, in;
  for (int s = 0; s < kStreams; ++s) streams.push_back(newStream());
  for (int round = 0; round < kRounds; ++round) {
    for (int s = 0; s < kStreams; ++s) {
      const std::size_t bytes = kSmallest + 10007 * static_cast<std::size_t>(round) + s;
      const std::uint64_t n = out.size();
      out.push_back(std::make_unique<Buffer>(bytes, n % 7));
      in.push_back(std::make_unique<Buffer>(bytes, n % 5));
      CUstream stream = streams[static_cast<std::size_t>(s)];
      if (rank.rank == 0) {
        sendPattern(*out.back(), seedOf(0, n), peer, comm, stream);
        receive(*in.back(), peer, comm, stream);
      } else {
        receive(*in.back(), peer, comm, stream);
        sendPattern(*out.back(), seedOf(1, n), peer, comm, stream);
      }
    }
  }
  for (CUstream stream : streams) awaitStream(stream, "several streams");
  for (std::size_t n = 0; n < in.size(); ++n) {
    in[n]->requirePattern(seedOf(peer, n), fmt::format("transfer {} of several streams", n));
  }
  finish(comm);
}

/// One side comes long before the other. A receive must not be released before its bytes are there,
/// a large send not before they have gone.
void late(const Rank& rank) {
  constexpr int kLateMs = 300;
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  std::uint64_t n = 0;
  // The last one is more than the slots hold, so that it cannot all go ahead of the receive.
  for (const std::size_t bytes :
       {kSmallest + 3, std::size_t{8 << 20} + 3, std::size_t{96 << 20} + 3}) {
    for (const bool senderFirst : {true, false}) {
      const std::string what =
          fmt::format("{} bytes, {} first", bytes, senderFirst ? "sender" : "receiver");
      const bool first = (rank.rank == 0) == senderFirst;
      Buffer buffer(bytes, 1);
      rank.barrier("late" + std::to_string(n));
      if (!first) ::usleep(kLateMs * 1000);
      if (rank.rank == 0) {
        sendPattern(buffer, seedOf(0, n), 1, comm, stream);
        if (senderFirst && bytes > (64 << 20)) requireBusy(stream, kLateMs / 2, what);
        awaitStream(stream, what);
      } else {
        receive(buffer, 0, comm, stream);
        if (!senderFirst) requireBusy(stream, kLateMs / 2, what);
        awaitStream(stream, what);
        buffer.requirePattern(seedOf(0, n), what);
      }
      ++n;
    }
  }
  finish(comm);
}

/// Hundreds of operations in flight from both sides; nobody waits before the last is enqueued.
void manyInFlight(const Rank& rank) {
  const std::size_t count = std::stoul(rank.argument("count", "200"));
  ncclComm_t comm = rank.communicator();
  CUstream sending = newStream(), receiving = newStream();
  const int peer = 1 - rank.rank;
  std::vector<std::unique_ptr<Buffer>> out, in;
  for (std::size_t n = 0; n < count; ++n) {
    const std::size_t bytes = kSmallest + n % 13;
    out.push_back(std::make_unique<Buffer>(bytes, n % 3));
    in.push_back(std::make_unique<Buffer>(bytes, n % 11));
  }
  rank.barrier("many");
  for (std::size_t n = 0; n < count; ++n) {
    if (rank.rank == 0) {
      sendPattern(*out[n], seedOf(0, n), peer, comm, sending);
      receive(*in[n], peer, comm, receiving);
    } else {
      receive(*in[n], peer, comm, receiving);
      sendPattern(*out[n], seedOf(1, n), peer, comm, sending);
    }
  }
  awaitStream(sending, "sends in flight", 40000);
  awaitStream(receiving, "receives in flight", 40000);
  for (std::size_t n = 0; n < count; ++n) {
    in[n]->requirePattern(seedOf(peer, n), fmt::format("transfer {} of {}", n, count));
  }
  finish(comm);
}

/// Independent flows do not hold each other up: a receive whose sender does not come for long and a
/// large send whose receiver does not, each on a communicator of its own, leave a third one going.
void independent(const Rank& rank) {
  ncclComm_t busy = rank.communicator("busy");
  ncclComm_t noSender = rank.communicator("noSender"), noReceiver = rank.communicator("noReceiver");
  CUstream stream = newStream(), held = newStream();
  const int peer = 1 - rank.rank;
  Buffer small(500001, 1);
  Buffer large(96 << 20, 3);  // more than can go ahead of its receive
  if (rank.rank == 0) {
    receive(small, 1, noSender, held);
  } else {
    sendPattern(large, seedOf(1, 1, 1), 0, noReceiver, held);
  }
  Buffer out(2000003, 1), in(2000003, 2);
  for (std::uint64_t n = 0; n < 5; ++n) {
    out.fill(seedOf(rank.rank, n), stream);
    in.poison(stream);
    REQUIRE_NCCL(nccl().ncclGroupStart());
    REQUIRE_NCCL(nccl().ncclSend(out.data(), out.bytes(), ncclUint8, peer, busy, stream));
    REQUIRE_NCCL(nccl().ncclRecv(in.data(), in.bytes(), ncclUint8, peer, busy, stream));
    REQUIRE_NCCL(nccl().ncclGroupEnd());
    in.fetch(stream);
    awaitStream(stream, "beside flows that wait");
    in.requirePattern(seedOf(peer, n), "beside flows that wait");
  }
  requireBusy(held, 1, "the flow that waits");
  rank.barrier("went by");
  if (rank.rank == 0) {
    receive(large, 1, noReceiver, stream);
    awaitStream(stream, "the late receive");
    large.requirePattern(seedOf(1, 1, 1), "the late receive");
    awaitStream(held, "the late send");
    small.requirePattern(seedOf(1, 2, 1), "the late send");
  } else {
    sendPattern(small, seedOf(1, 2, 1), 0, noSender, stream);
    awaitStream(stream, "the late send");
    awaitStream(held, "the late receive");
  }
  for (ncclComm_t comm : {noSender, noReceiver}) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  finish(busy);
}

}  // namespace

const std::vector<Scenario> kTransferScenarios = {
    {"sizes", sizes},
    {"bothWays", bothWays},
    {"ring", ring},
    {"streams", streams},
    {"late", late},
    {"manyInFlight", manyInFlight},
    {"independent", independent},
};

}  // namespace e2e
