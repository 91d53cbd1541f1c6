// Sends and receives of every rank with every rank, with itself, and of very many bytes.

#include <algorithm>
#include <chrono>
#include <cstring>

#include "test/e2e/rank/trial.h"

namespace e2e {
namespace {

constexpr std::size_t kSmall = 1003;
constexpr std::size_t kSteered = 70001;  // over HOCCL_MIN_BYTES, and odd

void groupStart() { REQUIRE_NCCL(nccl().ncclGroupStart()); }
void groupEnd() { REQUIRE_NCCL(nccl().ncclGroupEnd()); }

/// What rank `from` sends to rank `to` in an AlltoAllv of that skew: nothing, little or much, and
/// the same to itself.
std::size_t skewed(int from, int to, int ranks) {
  switch ((from * ranks + to * 3) % 5) {
    case 0:
      return 0;
    case 1:
      return kSmall;
    case 2:
      return kSteered;
    case 3:
      return 7 * kSteered;
    default:
      return 65537;
  }
}

/// AlltoAllv as PyTorch makes it: a group of sends and receives of one buffer each, in place of
/// none. `zeros` says whether a pair without bytes is called at all.
void allToAllV(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  std::uint64_t staged = 0, small = 0;
  for (std::uint64_t round = 0; round < 4; ++round) {
    const bool zeros = round % 2 == 0;
    std::size_t sendBytes = 0, receiveBytes = 0;
    Bytes sent, wanted;
    for (int peer = 0; peer < rank.ranks; ++peer) {
      const std::size_t out = skewed(rank.rank, peer, rank.ranks);
      const std::size_t in = skewed(peer, rank.rank, rank.ranks);
      sent.resize(sendBytes + out);
      makePattern(seedOf(rank.rank, static_cast<std::uint64_t>(peer), round),
                  sent.data() + sendBytes, out);
      wanted.resize(receiveBytes + in);
      makePattern(seedOf(peer, static_cast<std::uint64_t>(rank.rank), round),
                  wanted.data() + receiveBytes, in);
      sendBytes += out;
      receiveBytes += in;
    }
    Region out(sendBytes, 1), in(receiveBytes, 3);
    out.poison(stream);
    out.put(sent, 0, stream);
    in.poison(stream);
    std::size_t sendAt = 0, receiveAt = 0;
    groupStart();
    for (int peer = 0; peer < rank.ranks; ++peer) {
      const std::size_t send = skewed(rank.rank, peer, rank.ranks);
      const std::size_t receive = skewed(peer, rank.rank, rank.ranks);
      if (send || zeros) {
        REQUIRE_NCCL(nccl().ncclSend(out.data() + sendAt, send, ncclUint8, peer, comm, stream));
        ++(send >= 65536 ? staged : small);
      }
      if (receive || zeros) {
        REQUIRE_NCCL(
            nccl().ncclRecv(in.data() + receiveAt, receive, ncclUint8, peer, comm, stream));
        ++(receive >= 65536 ? staged : small);
      }
      sendAt += send;
      receiveAt += receive;
    }
    groupEnd();
    out.poison(stream);
    const std::size_t which = in.fetch(stream);
    awaitStream(stream, "AlltoAllv");
    in.require(wanted, which, fmt::format("AlltoAllv, round {}", round));
  }
  say("staged", std::to_string(staged));
  say("small", std::to_string(small));
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A rank's sends to itself: alone in a group, in both orders; several at once; beside its peers'.
void toItself(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream(), second = newStream();
  const std::size_t sizes[] = {65536, kSteered, (9u << 20) + 5};
  std::uint64_t round = 0;
  for (const std::size_t bytes : sizes) {
    for (const bool receiveFirst : {false, true}) {
      for (const bool twoStreams : {false, true}) {
        for (const bool withPeers : {false, true}) {
          ++round;
          CUstream other = twoStreams ? second : stream;
          Region out(bytes, 1), in(bytes, 3), toNext(kSteered, 5), fromPrevious(kSteered, 7);
          Bytes own(bytes), mine(kSteered), theirs(kSteered);
          makePattern(seedOf(rank.rank, round), own.data(), bytes);
          makePattern(seedOf(rank.rank, round, 1), mine.data(), kSteered);
          makePattern(seedOf(rank.previous(), round, 1), theirs.data(), kSteered);
          for (Region* each : {&out, &toNext}) each->poison(stream);
          for (Region* each : {&in, &fromPrevious}) each->poison(other);
          out.put(own, 0, stream);
          toNext.put(mine, 0, stream);
          auto send = [&](const Region& from, int peer) {
            REQUIRE_NCCL(nccl().ncclSend(from.data(), from.bytes(), ncclUint8, peer, comm, stream));
          };
          auto receive = [&](const Region& to, int peer) {
            REQUIRE_NCCL(nccl().ncclRecv(to.data(), to.bytes(), ncclUint8, peer, comm, other));
          };
          groupStart();
          if (withPeers && receiveFirst) receive(fromPrevious, rank.previous());
          if (receiveFirst) receive(in, rank.rank);
          send(out, rank.rank);
          if (!receiveFirst) receive(in, rank.rank);
          if (withPeers) send(toNext, rank.next());
          if (withPeers && !receiveFirst) receive(fromPrevious, rank.previous());
          groupEnd();
          out.poison(stream);
          toNext.poison(stream);
          const std::size_t a = in.fetch(other), b = fromPrevious.fetch(other);
          awaitStream(other, "to itself");
          awaitStream(stream, "to itself");
          in.require(own, a, fmt::format("to itself, {} bytes, round {}", bytes, round));
          if (withPeers) fromPrevious.require(theirs, b, "beside a send to itself");
        }
      }
    }
  }
  // Several at once: first come, first served, among equals.
  constexpr std::size_t kMany = 12;
  Region out(kMany * kSteered, 1), in(kMany * kSteered, 3);
  Bytes image(kMany * kSteered);
  makePattern(seedOf(rank.rank, 999), image.data(), image.size());
  out.poison(stream);
  out.put(image, 0, stream);
  in.poison(stream);
  groupStart();
  for (std::size_t i = 0; i < kMany; ++i) {
    REQUIRE_NCCL(
        nccl().ncclSend(out.data() + i * kSteered, kSteered, ncclUint8, rank.rank, comm, stream));
  }
  for (std::size_t i = 0; i < kMany; ++i) {
    REQUIRE_NCCL(
        nccl().ncclRecv(in.data() + i * kSteered, kSteered, ncclUint8, rank.rank, comm, stream));
  }
  groupEnd();
  const std::size_t which = in.fetch(stream);
  awaitStream(stream, "many to itself");
  in.require(image, which, "many to itself");
  saySmOps(rank, "smOps");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// One transfer beyond 4 GiB; windows of it are looked at, as the rest is never touched by the
/// host.
void beyond4GiB(const Rank& rank) {
  using Clock = std::chrono::steady_clock;
  constexpr std::size_t kGiB = std::size_t{1} << 30, kBytes = 4 * kGiB + 12345678;
  constexpr std::size_t kWindow = 1 << 20;
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  CUdeviceptr memory = 0;
  REQUIRE_CU(cuda().memAlloc(&memory, kBytes + 2 * kWindow));
  const std::size_t windows[] = {0,
                                 kGiB - kWindow / 2,
                                 2 * kGiB - kWindow / 2 + 1,
                                 3 * kGiB + 7,
                                 4 * kGiB - kWindow / 2 + 3,
                                 4 * kGiB + kWindow + 1,
                                 kBytes - kWindow};
  const CUdeviceptr payload = memory + kWindow + 1;
  void* pinned = nullptr;
  REQUIRE_CU(cuda().memHostAlloc(&pinned, kWindow, 0));
  auto* bytes = static_cast<unsigned char*>(pinned);
  auto write = [&](CUdeviceptr to, std::size_t count) {
    REQUIRE_CU(cuda().copyToDevice(to, bytes, count, stream));
    awaitStream(stream, "a window written");
  };
  auto readBack = [&](CUdeviceptr from, std::size_t count) {
    REQUIRE_CU(cuda().copyToHost(bytes, from, count, stream));
    awaitStream(stream, "a window read");
  };
  std::memset(bytes, Region::kPoison, kWindow);
  write(payload - 4096, 4096);
  write(payload + kBytes, 4096);
  for (const std::size_t at : windows) {
    if (rank.rank == 0) {
      makePattern(at, bytes, kWindow);
    } else {
      std::memset(bytes, Region::kPoison, kWindow);
    }
    write(payload + at, kWindow);
  }
  rank.barrier("filled");
  const auto began = Clock::now();
  if (rank.rank == 0) {
    REQUIRE_NCCL(
        nccl().ncclSend(reinterpret_cast<void*>(payload), kBytes, ncclUint8, 1, comm, stream));
  } else {
    REQUIRE_NCCL(
        nccl().ncclRecv(reinterpret_cast<void*>(payload), kBytes, ncclUint8, 0, comm, stream));
  }
  awaitStream(stream, "more than 4 GiB", 150000);
  say("ms",
      std::to_string(
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - began).count()));
  Bytes wanted(kWindow);
  for (const std::size_t at : windows) {
    makePattern(at, wanted.data(), kWindow);
    readBack(payload + at, kWindow);
    REQUIRE(std::memcmp(bytes, wanted.data(), kWindow) == 0, "the window at {} is wrong", at);
  }
  for (const CUdeviceptr guard : {payload - 4096, payload + kBytes}) {
    readBack(guard, 4096);
    REQUIRE(std::all_of(bytes, bytes + 4096, [](unsigned char b) { return b == Region::kPoison; }),
            "a byte beside the buffer was written");
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

}  // namespace

const std::vector<Scenario> kPeerScenarios = {
    {"allToAllV", allToAllV},
    {"toItself", toItself},
    {"beyond4GiB", beyond4GiB},
};

}  // namespace e2e
