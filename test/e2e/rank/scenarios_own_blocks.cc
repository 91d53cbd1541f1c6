// What a rank sends to itself beside other operations of a group, where its stream may copy it
// (HOCCL_OWN_BLOCK=kernel): on every kind of stream, across communicators, and what goes wrong.

#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kBytes = 300001;
constexpr std::size_t kLong = 24 << 20;

void groupStart() { REQUIRE_NCCL(nccl().ncclGroupStart()); }
void groupEnd() { REQUIRE_NCCL(nccl().ncclGroupEnd()); }

/// A buffer for the rank itself and one for its peer, each way.
struct Exchange {
  explicit Exchange(const Rank& rank, std::size_t own = kLong)
      : self(rank.rank),
        peer(1 - rank.rank),
        ownOut(own, 1),
        ownIn(own, 3),
        out(kBytes, 5),
        in(kBytes, 7) {}

  void fill(std::uint64_t n, CUstream stream) {
    ownOut.fill(seedOf(self, n, 1), stream);
    out.fill(seedOf(self, n), stream);
  }
  void poisonInputs(CUstream stream) {
    ownIn.poison(stream);
    in.poison(stream);
  }
  void call(ncclComm_t comm, CUstream stream) {
    callSend(comm, stream);
    callOwn(comm, stream);
    callReceive(comm, stream);
  }
  void callOwn(ncclComm_t comm, CUstream stream) {
    REQUIRE_NCCL(nccl().ncclSend(ownOut.data(), ownOut.bytes(), ncclUint8, self, comm, stream));
    REQUIRE_NCCL(nccl().ncclRecv(ownIn.data(), ownIn.bytes(), ncclUint8, self, comm, stream));
  }
  void callSend(ncclComm_t comm, CUstream stream) {
    REQUIRE_NCCL(nccl().ncclSend(out.data(), out.bytes(), ncclUint8, peer, comm, stream));
  }
  void callReceive(ncclComm_t comm, CUstream stream) {
    REQUIRE_NCCL(nccl().ncclRecv(in.data(), in.bytes(), ncclUint8, peer, comm, stream));
  }
  /// Destroys what has been sent and fetches what has come.
  void after(CUstream stream) {
    ownOut.poison(stream);
    out.poison(stream);
    ownIn.fetch(stream);
    in.fetch(stream);
  }
  void check(std::uint64_t n, const std::string& what) const {
    ownIn.requirePattern(seedOf(self, n, 1), what + ", of the rank itself");
    in.requirePattern(seedOf(peer, n), what + ", of the peer");
  }

  int self, peer;
  Buffer ownOut, ownIn, out, in;
};

/// Behind everything before it and ahead of everything behind it, on streams of every kind; a
/// stream that is destroyed right behind the group included.
void ownPairStreams(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream blocking = nullptr, plain = newStream();
  REQUIRE_CU(cuda().streamCreate(&blocking, CU_STREAM_DEFAULT));
  Exchange exchange(rank);
  std::uint64_t n = 0;
  for (CUstream stream :
       {plain, blocking, static_cast<CUstream>(nullptr), CU_STREAM_LEGACY, CU_STREAM_PER_THREAD}) {
    for (const int depth : {1, 3}) {
      ++n;
      exchange.fill(n, stream);
      exchange.poisonInputs(stream);
      for (int i = 0; i < depth; ++i) groupStart();
      exchange.call(comm, stream);
      for (int i = 0; i < depth; ++i) groupEnd();
      exchange.after(stream);
      awaitStream(stream, "a stream of some kind");
      exchange.check(n, "stream " + std::to_string(n));
    }
  }
  // With no context current in the thread.
  std::thread([&] {
    useDevice();
    ++n;
    exchange.fill(n, plain);
    exchange.poisonInputs(plain);
    REQUIRE_CU(cuda().ctxSetCurrent(nullptr));
    groupStart();
    exchange.call(comm, plain);
    groupEnd();
    CUcontext current = nullptr;
    REQUIRE_CU(cuda().ctxGetCurrent(&current));
    REQUIRE(!current, "the call has left a context");
    useDevice();
    exchange.after(plain);
    awaitStream(plain, "a thread without a context");
    exchange.check(n, "a thread without a context");
  }).join();
  // Behind its last operation the stream waits for the gate, so that all of it is still to come.
  ++n;
  CUstream last = newStream();
  Gate gate;
  exchange.poisonInputs(last);
  gate.hold(last);
  exchange.fill(n, last);
  groupStart();
  exchange.call(comm, last);
  groupEnd();
  exchange.after(last);
  REQUIRE_CU(cuda().streamDestroy(last));
  gate.open();
  rank.barrier("destroyed");
  // The legacy stream waits for blocking ones only, so the next group of all is what shows it.
  exchange.in.fetch(plain);
  awaitStream(plain, "something else");
  ::usleep(100'000);
  Exchange other(rank);
  other.fill(n + 1, plain);
  other.poisonInputs(plain);
  groupStart();
  other.call(comm, plain);
  groupEnd();
  other.after(plain);
  awaitStream(plain, "behind a stream that has been destroyed");
  other.check(n + 1, "behind a stream that has been destroyed");
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
  exchange.check(n, "a stream that has been destroyed");
  say("pairs", std::to_string(n + 1));
  sayStats();
}

/// The smallest group there is for it: a pair and one operation more, which goes or comes.
void ownPairAndOne(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Exchange exchange(rank, kBytes);
  for (std::uint64_t n = 0; n < 4; ++n) {
    const bool sends = n % 2 == static_cast<std::uint64_t>(rank.rank);
    exchange.fill(n, stream);
    exchange.poisonInputs(stream);
    groupStart();
    exchange.callOwn(comm, stream);
    sends ? exchange.callSend(comm, stream) : exchange.callReceive(comm, stream);
    groupEnd();
    exchange.after(stream);
    awaitStream(stream, "a pair and one more");
    if (sends) {
      exchange.ownIn.requirePattern(seedOf(rank.rank, n, 1), "beside a send");
    } else {
      exchange.check(n, "beside a receive");
    }
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// One of the emulated driver's own functions.
template <typename Function>
Function* emulators(const char* name) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* function = library ? ::dlsym(library, name) : nullptr;
  REQUIRE(function, "no emulated driver that has {}", name);
  return reinterpret_cast<Function*>(function);
}

/// Threads that come and go, each with one group over two streams, leave nothing behind.
void ownPairThreads(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream streams[] = {newStream(), newStream()};
  Exchange exchange(rank, kBytes);
  const auto events = emulators<decltype(::hocclEmuEvents)>("hocclEmuEvents");
  std::size_t afterFirst = 0;
  for (std::uint64_t n = 0; n < 12; ++n) {
    std::thread([&] {
      useDevice();
      exchange.fill(n, streams[0]);
      exchange.poisonInputs(streams[0]);
      awaitStream(streams[0], "prepared");
      groupStart();
      exchange.callOwn(comm, streams[0]);
      exchange.callSend(comm, streams[0]);
      exchange.callReceive(comm, streams[1]);
      groupEnd();
      exchange.after(streams[1]);
      awaitStream(streams[1], "in a thread of its own");
      exchange.check(n, "in a thread of its own");
    }).join();
    if (n == 0) afterFirst = events();
  }
  REQUIRE(afterFirst > 0, "no event was used");
  REQUIRE(events() == afterFirst, "{} events after one thread, {} after twelve", afterFirst,
          events());
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Keeps every SM of this process's GPU busy, so that no copy within the GPU begins. Those of the
/// engines do.
void occupySms(CUstream stream, const volatile std::uint64_t* flag) {
  const auto launch = emulators<decltype(::hocclEmuLaunchWaitKernel)>("hocclEmuLaunchWaitKernel");
  CUdeviceptr address = 0;
  REQUIRE_CU(cuda().memHostGetDevicePointer(&address, const_cast<std::uint64_t*>(flag), 0));
  REQUIRE_CU(launch(stream, address, 1, 132));
}

/// The copy is late, everything of the movers is over: no stream of the group is released before.
void ownPairHeldUp(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  say("prepared", std::to_string(counters().sameDeviceD2D));
  CUstream a = newStream(), b = newStream(), busy = newStream();
  Exchange exchange(rank, kBytes);
  void* word = nullptr;
  REQUIRE_CU(cuda().memHostAlloc(&word, sizeof(std::uint64_t), CU_MEMHOSTALLOC_DEVICEMAP));
  auto* flag = static_cast<std::uint64_t*>(word);
  for (std::uint64_t n = 0; n < 4; ++n) {
    __atomic_store_n(flag, 0, __ATOMIC_RELEASE);
    exchange.fill(n, a);
    exchange.poisonInputs(a);
    awaitStream(a, "prepared");
    occupySms(busy, flag);
    groupStart();
    exchange.callOwn(comm, a);
    exchange.callSend(comm, n % 2 == 0 ? a : b);
    exchange.callReceive(comm, n % 2 == 0 ? b : a);
    groupEnd();
    exchange.after(b);
    requireBusy(b, 200, "the other stream, whose group's copy within the GPU has not begun");
    requireBusy(a, 1, "the stream that copies");
    rank.barrier("held up " + std::to_string(n));
    __atomic_store_n(flag, 1, __ATOMIC_RELEASE);
    for (CUstream stream : {a, b}) awaitStream(stream, "a copy that comes late");
    exchange.check(n, "a copy that comes late");
    awaitStream(busy, "the SMs");
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A collective, in no group, by a thread without a current context.
void ownBlockWithoutContext(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Buffer in(kBytes, 1), out(kBytes * 2, 3);
  in.fill(seedOf(rank.rank, 1), stream);
  out.poison(stream);
  awaitStream(stream, "prepared");
  std::thread([&] {
    REQUIRE_NCCL(nccl().ncclAllGather(in.data(), out.data(), kBytes, ncclUint8, comm, stream));
    CUcontext current = nullptr;
    REQUIRE_CU(cuda().ctxGetCurrent(&current));
    REQUIRE(!current, "the call has left a context");
  }).join();
  in.poison(stream);
  out.fetch(stream);
  awaitStream(stream, "a thread without a context");
  std::vector<unsigned char> wanted(kBytes);
  for (int from : {0, 1}) {
    makePattern(seedOf(from, 1), wanted.data(), kBytes);
    REQUIRE(std::memcmp(out.fetched() + static_cast<std::size_t>(from) * kBytes, wanted.data(),
                        kBytes) == 0,
            "the block of rank {} is wrong", from);
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Communicators of one rank, whose launches would consist of own blocks alone; by themselves and
/// beside another communicator's operation on the same stream.
void ownBlockOfOneRank(const Rank& rank) {
  ncclComm_t comm = rank.communicator(), alone = nullptr;
  REQUIRE_NCCL(nccl().ncclCommSplit(comm, rank.rank, 0, &alone, nullptr));
  CUstream stream = newStream();
  for (std::uint64_t n = 0; n < 8; ++n) {
    Exchange exchange(rank, kBytes);
    exchange.fill(n, stream);
    exchange.poisonInputs(stream);
    const void* from = exchange.ownOut.data();
    void* to = exchange.ownIn.data();
    groupStart();
    if (n % 2 == 1) exchange.callSend(comm, stream);
    switch (n / 2) {
      case 0:
        REQUIRE_NCCL(nccl().ncclAllGather(from, to, kBytes, ncclUint8, alone, stream));
        break;
      case 1:
        REQUIRE_NCCL(nccl().ncclAlltoAll(from, to, kBytes, ncclUint8, alone, stream));
        break;
      case 2:
        REQUIRE_NCCL(nccl().ncclBroadcast(from, to, kBytes, ncclUint8, 0, alone, stream));
        break;
      default:
        REQUIRE_NCCL(nccl().ncclSend(from, kBytes, ncclUint8, 0, alone, stream));
        REQUIRE_NCCL(nccl().ncclRecv(to, kBytes, ncclUint8, 0, alone, stream));
    }
    if (n % 2 == 1) exchange.callReceive(comm, stream);
    groupEnd();
    exchange.after(stream);
    awaitStream(stream, "of one rank");
    exchange.ownIn.requirePattern(seedOf(rank.rank, n, 1), "of one rank");
    if (n % 2 == 1) exchange.check(n, "of one rank beside another communicator");
  }
  sayStats();
  for (ncclComm_t each : {alone, comm}) REQUIRE_NCCL(nccl().ncclCommDestroy(each));
}

/// Two communicators and two streams of one group: what each sends to itself comes from what the
/// other stream did before, and is there for what the other one does next.
void ownPairsOfTwoCommunicators(const Rank& rank) {
  ncclComm_t comms[] = {rank.communicator("first"), rank.communicator("second")};
  CUstream streams[] = {newStream(), newStream()};
  Exchange exchanges[] = {Exchange(rank), Exchange(rank)};
  for (std::uint64_t n = 0; n < 4; ++n) {
    for (std::size_t i : {0, 1}) exchanges[i].poisonInputs(streams[i]);
    for (CUstream stream : streams) awaitStream(stream, "poison");
    for (std::size_t i : {0, 1}) exchanges[i].fill(2 * n + i, streams[1 - i]);
    groupStart();
    for (std::size_t i : {0, 1}) exchanges[i].call(comms[i], streams[i]);
    groupEnd();
    for (std::size_t i : {0, 1}) exchanges[i].after(streams[1 - i]);
    for (CUstream stream : streams) awaitStream(stream, "crossed");
    for (std::size_t i : {0, 1}) exchanges[i].check(2 * n + i, "crossed");
  }
  sayStats();
  for (ncclComm_t comm : comms) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// The driver refuses the copy: the memory is gone when the group ends. The end says so, no stream
/// stands still, nothing is used up, and another communicator goes on.
void ownPairRefused(const Rank& rank) {
  ncclComm_t other = rank.communicator("other");
  CUstream streams[] = {newStream(), newStream()};
  const int peer = 1 - rank.rank;
  for (std::uint64_t n = 0; n < 12; ++n) {
    ncclComm_t comm = nullptr;
    REQUIRE_NCCL(nccl().ncclCommSplit(other, 1, rank.rank, &comm, nullptr));
    Buffer out(kBytes), in(kBytes), ownOut(kBytes);
    out.fill(seedOf(rank.rank, n), streams[0]);
    ownOut.fill(seedOf(rank.rank, n, 1), streams[0]);
    in.poison(streams[0]);
    awaitStream(streams[0], "prepared");
    CUdeviceptr gone = 0;
    REQUIRE_CU(cuda().memAlloc(&gone, kBytes));
    CUstream second = streams[n % 2];
    groupStart();
    REQUIRE_NCCL(nccl().ncclSend(out.data(), kBytes, ncclUint8, peer, comm, streams[0]));
    REQUIRE_NCCL(nccl().ncclRecv(in.data(), kBytes, ncclUint8, peer, comm, second));
    REQUIRE_NCCL(nccl().ncclSend(ownOut.data(), kBytes, ncclUint8, rank.rank, comm, second));
    REQUIRE_NCCL(
        nccl().ncclRecv(reinterpret_cast<void*>(gone), kBytes, ncclUint8, rank.rank, comm, second));
    REQUIRE_CU(cuda().memFree(gone));
    const ncclResult_t end = nccl().ncclGroupEnd();
    REQUIRE(end != ncclSuccess && end != ncclInProgress, "the end of the group passed");
    const std::string error = nccl().ncclGetLastError(comm);
    REQUIRE(error.find("cuMemcpyDtoDAsync") != std::string::npos, "the error says '{}'", error);
    REQUIRE(awaitError(comm, 5000) != ncclSuccess, "the communicator goes on");
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    for (CUstream stream : streams) awaitStream(stream, "a group that was refused", 5000);
    Exchange exchange(rank, kBytes);
    exchange.fill(n, second);
    exchange.poisonInputs(second);
    groupStart();
    exchange.call(other, second);
    groupEnd();
    exchange.after(second);
    awaitStream(second, "behind a group that was refused");
    exchange.check(n, "behind a group that was refused");
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(other));
}

/// Aborted while the stream has not come to the group, and then it comes.
void ownPairAborted(const Rank& rank) {
  ncclComm_t other = rank.communicator("other");
  CUstream streams[] = {newStream(), newStream()};
  for (std::uint64_t n = 0; n < 8; ++n) {
    ncclComm_t comm = nullptr;
    REQUIRE_NCCL(nccl().ncclCommSplit(other, 1, rank.rank, &comm, nullptr));
    Exchange exchange(rank, kBytes), second(rank, kBytes);
    Gate gate;
    gate.hold(streams[n % 2]);
    for (std::size_t i : {0, 1}) (i == 0 ? exchange : second).fill(n, streams[i]);
    groupStart();
    exchange.call(comm, streams[0]);
    second.call(comm, streams[1]);
    groupEnd();
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    if (n % 4 == 3) rank.barrier("aborted" + std::to_string(n));
    gate.open();
    for (CUstream stream : streams) awaitStream(stream, "aborted", 5000);
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(other));
}

/// The source is freed right behind the call: a free waits for what the streams do with it.
void ownPairFreed(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  for (std::uint64_t n = 0; n < 20; ++n) {
    auto exchange = std::make_unique<Exchange>(rank, kLong / 4);
    Buffer source(kLong / 4);
    exchange->fill(n, stream);
    exchange->poisonInputs(stream);
    auto own = std::make_unique<Buffer>(kLong / 4, 9);
    own->fill(seedOf(rank.rank, n, 2), stream);
    source.poison(stream);
    groupStart();
    exchange->call(comm, stream);
    REQUIRE_NCCL(nccl().ncclSend(own->data(), own->bytes(), ncclUint8, rank.rank, comm, stream));
    REQUIRE_NCCL(
        nccl().ncclRecv(source.data(), source.bytes(), ncclUint8, rank.rank, comm, stream));
    groupEnd();
    source.fetch(stream);
    own.reset();
    exchange->after(stream);
    awaitStream(stream, "freed right behind the call");
    source.requirePattern(seedOf(rank.rank, n, 2), "freed right behind the call");
    exchange->check(n, "beside memory that is freed");
  }
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

}  // namespace

const std::vector<Scenario> kOwnBlockScenarios = {
    {"ownPairStreams", ownPairStreams},
    {"ownPairAndOne", ownPairAndOne},
    {"ownBlockOfOneRank", ownBlockOfOneRank},
    {"ownPairHeldUp", ownPairHeldUp},
    {"ownPairThreads", ownPairThreads},
    {"ownBlockWithoutContext", ownBlockWithoutContext},
    {"ownPairsOfTwoCommunicators", ownPairsOfTwoCommunicators},
    {"ownPairRefused", ownPairRefused},
    {"ownPairAborted", ownPairAborted},
    {"ownPairFreed", ownPairFreed},
};

}  // namespace e2e
