// Memory that is freed while movers have it mapped, were they not told before. Frees go through the
// preloaded library where the loader finds it, as those of a program linked with the driver.

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <set>
#include <thread>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kSmallest = 64 << 10;

/// A function as the loader finds it first.
template <typename Function>
Function* linked(const char* name) {
  auto* found = reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
  REQUIRE(found, "{} is not to be found", name);
  return found;
}

CUresult seenFree(CUdeviceptr pointer) {
  static auto* const function = linked<CUresult(CUdeviceptr)>("cuMemFree_v2");
  return function(pointer);
}

CUresult seenAlloc(CUdeviceptr* pointer, std::size_t bytes) {
  static auto* const function = linked<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2");
  return function(pointer, bytes);
}

HocclEmuCounters counters() {
  HocclEmuCounters seen{};
  REQUIRE(cuda().sessionCounters, "this is not the emulated driver");
  REQUIRE_CU(cuda().sessionCounters(0, &seen));
  return seen;
}

/// Device memory of a size, and nothing else.
struct Memory {
  explicit Memory(std::size_t size) : bytes(size) { REQUIRE_CU(seenAlloc(&address, size)); }
  [[nodiscard]] void* data() const { return reinterpret_cast<void*>(address); }
  std::size_t bytes;
  CUdeviceptr address = 0;
};

unsigned char* pinned(std::size_t bytes) {
  void* memory = nullptr;
  REQUIRE_CU(cuda().memHostAlloc(&memory, bytes, 0));
  return static_cast<unsigned char*>(memory);
}

void send(const Memory& memory, int peer, ncclComm_t comm, CUstream stream) {
  REQUIRE_NCCL(nccl().ncclSend(memory.data(), memory.bytes, ncclUint8, peer, comm, stream));
}
void receive(const Memory& memory, int peer, ncclComm_t comm, CUstream stream) {
  REQUIRE_NCCL(nccl().ncclRecv(memory.data(), memory.bytes, ncclUint8, peer, comm, stream));
}

/// One transfer of new memory both ways.
void exchange(const Memory& out, const Memory& in, int peer, ncclComm_t comm, CUstream stream) {
  REQUIRE_NCCL(nccl().ncclGroupStart());
  send(out, peer, comm, stream);
  receive(in, peer, comm, stream);
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  awaitStream(stream, "an exchange");
}

/// Allocate, operate, check, free, again and again; the sizes change, the addresses come back.
void rounds(const Rank& rank) {
  constexpr std::size_t kSizes[] = {kSmallest, kSmallest + 1, 100003, kSmallest + 4096, 130001};
  constexpr std::size_t kLargest = 130001;
  const int count = std::atoi(rank.argument("rounds", "1000").c_str());
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  unsigned char *out = pinned(kLargest), *in = pinned(kLargest);
  std::vector<unsigned char> wanted(kLargest);
  std::set<CUdeviceptr> places;
  const int peer = 1 - rank.rank;
  for (int n = 0; n < count; ++n) {
    const std::size_t bytes = kSizes[static_cast<std::size_t>(n) % std::size(kSizes)];
    const Memory memory(bytes);
    places.insert(memory.address);
    const bool sends = n % 2 == rank.rank;
    if (sends) {
      makePattern(seedOf(rank.rank, static_cast<std::uint64_t>(n)), out, bytes);
      REQUIRE_CU(cuda().copyToDevice(memory.address, out, bytes, stream));
      send(memory, peer, comm, stream);
      awaitStream(stream, "a send");
    } else {
      std::memset(in, 0xa5, bytes);
      REQUIRE_CU(cuda().copyToDevice(memory.address, in, bytes, stream));
      receive(memory, peer, comm, stream);
      REQUIRE_CU(cuda().copyToHost(in, memory.address, bytes, stream));
      awaitStream(stream, "a receive");
      makePattern(seedOf(peer, static_cast<std::uint64_t>(n)), wanted.data(), bytes);
      REQUIRE(std::memcmp(in, wanted.data(), bytes) == 0, "round {}: wrong bytes", n);
    }
    REQUIRE_CU(seenFree(memory.address));
    if (n == count / 10) {
      rank.postMine("early");
      rank.await("early-seen");
    }
  }
  rank.postMine("late");
  rank.await("late-seen");
  say("places", std::to_string(places.size()));
  say("freedWhileMapped", std::to_string(counters().freedWhileMapped));
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Rank 0's receive waits for a send that comes late, or never, while another thread frees: the
/// memory of another operation that is over (`what`=other) or that of the receive itself
/// (`what`=own).
void pending(const Rank& rank) {
  const bool own = rank.argument("what", "own") == "own";
  const bool never = rank.argument("never", "0") == "1";
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const Memory first(kSmallest), second(kSmallest), late(kSmallest);
  exchange(first, second, 1 - rank.rank, comm, stream);
  if (rank.rank == 0) {
    receive(late, 1, comm, stream);
    std::thread freer([&] {
      useDevice();
      REQUIRE_CU(seenFree(own ? late.address : first.address));
    });
    ::usleep(1'200'000);  // more than the time-out the test sets
    REQUIRE(!streamIdle(stream), "the receive was released without its bytes");
    rank.post("go");
    if (never) {
      REQUIRE_NCCL(nccl().ncclCommAbort(comm));
      awaitStream(stream, "the aborted receive");
    } else {
      awaitStream(stream, "the late receive");
    }
    freer.join();
  } else {
    rank.await("go");
    if (never) {
      REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    } else {
      send(late, 0, comm, stream);
      awaitStream(stream, "the late send");
    }
  }
  rank.barrier("over");
  say("freedWhileMapped", std::to_string(counters().freedWhileMapped));
  if (!never) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Frees that nobody sees: `before`=nothing, or what makes the mover let go by itself before.
void unseen(const Rank& rank) {
  const std::string before = rank.argument("before", "nothing");
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const Memory out(kSmallest), in(kSmallest);
  exchange(out, in, 1 - rank.rank, comm, stream);
  if (before == "outOfMemory") {
    CUdeviceptr none = 0;
    const CUresult result = seenAlloc(&none, std::size_t{1} << 50);
    REQUIRE(result == CUDA_ERROR_OUT_OF_MEMORY, "cuMemAlloc of 1 PiB returned {}",
            static_cast<int>(result));
  } else if (before == "idle") {
    ::usleep(600'000);
  }
  REQUIRE_CU(cuda().memFree(out.address));
  REQUIRE_CU(cuda().memFree(in.address));
  // Others in their place: a stale import would show as wrong bytes or an error.
  for (std::uint64_t n = 0; n < 4; ++n) {
    Buffer next(kSmallest, 0);
    if (n % 2 == static_cast<std::uint64_t>(rank.rank)) {
      next.fill(seedOf(rank.rank, n), stream);
      REQUIRE_NCCL(
          nccl().ncclSend(next.data(), next.bytes(), ncclUint8, 1 - rank.rank, comm, stream));
      awaitStream(stream, "a send after an unseen free");
    } else {
      next.poison(stream);
      REQUIRE_NCCL(
          nccl().ncclRecv(next.data(), next.bytes(), ncclUint8, 1 - rank.rank, comm, stream));
      next.fetch(stream);
      awaitStream(stream, "a receive after an unseen free");
      next.requirePattern(seedOf(1 - rank.rank, n), "after an unseen free");
    }
    if (n == 0) {
      rank.barrier("counted");
      say("freedWhileMapped", std::to_string(counters().freedWhileMapped));
      rank.barrier("said");
    }
  }
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A forked child frees what it has inherited: its parent's movers keep the memory.
void forkedChild(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const Memory out(kSmallest), in(kSmallest);
  exchange(out, in, 1 - rank.rank, comm, stream);
  auto* cudaFree = linked<int(void*)>("cudaFree");
  const pid_t child = ::fork();
  REQUIRE(child >= 0, "fork: {}", std::strerror(errno));
  if (child == 0) {
    ::alarm(5);
    // No CUDA run time is here, so this is all that the preloaded library does.
    ::_exit(cudaFree(out.data()) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0,
          "the child's status is {:#x}", status);
  exchange(out, in, 1 - rank.rank, comm, stream);
  REQUIRE_CU(seenFree(out.address));
  REQUIRE_CU(seenFree(in.address));
  rank.barrier("over");
  say("freedWhileMapped", std::to_string(counters().freedWhileMapped));
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// No communicator: the preloaded library passes everything on and loads nothing.
void withoutCommunicator(const Rank&) {
  cuda();
  const Memory memory(kSmallest);
  auto* free = linked<CUresult(CUdeviceptr)>("cuMemFree_v2");
  REQUIRE(free != cuda().memFree, "the preloaded library does not come first");
  REQUIRE_CU(free(memory.address));
  REQUIRE(free(memory.address) == CUDA_ERROR_INVALID_VALUE, "freed twice");
  REQUIRE_CU(free(0));
  REQUIRE(linked<int(void*)>("cudaFree")(nullptr) == CUDA_ERROR_NOT_INITIALIZED,
          "there is no CUDA run time here");

  // Entry-point look-ups give what the loader gives, and leave other functions alone.
  using LookUp = CUresult(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  auto* lookUp = linked<LookUp>("cuGetProcAddress_v2");
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  REQUIRE(library, "{}", ::dlerror());
  struct Wanted {
    const char* asked;
    const char* symbol;
    bool wrapped;
  };
  for (const Wanted& w :
       {Wanted{"cuMemFree", "cuMemFree_v2", true}, Wanted{"cuMemUnmap", "cuMemUnmap", true},
        Wanted{"cuMemAlloc", "cuMemAlloc_v2", true},
        Wanted{"cuGetProcAddress", "cuGetProcAddress_v2", true},
        Wanted{"cuMemRelease", "cuMemRelease", false},
        Wanted{"cuMemGetInfo", "cuMemGetInfo_v2", false}}) {
    void* found = nullptr;
    CUdriverProcAddressQueryResult status{};
    REQUIRE_CU(lookUp(w.asked, &found, 12000, 0, &status));
    void* own = ::dlsym(library, w.symbol);
    REQUIRE(own && found == (w.wrapped ? ::dlsym(RTLD_DEFAULT, w.symbol) : own),
            "the look-up of {} gives something else", w.asked);
    REQUIRE((found != own) == w.wrapped, "{}", w.asked);
  }
  void* none = nullptr;
  REQUIRE(lookUp("cuNoSuchFunction", &none, 12000, 0, nullptr) != CUDA_SUCCESS && !none,
          "a function that is not there was found");

  std::ifstream maps("/proc/self/maps");
  const std::string text{std::istreambuf_iterator<char>(maps), {}};
  REQUIRE(text.find("libhoccl.so") == std::string::npos, "the core was loaded");
}

}  // namespace

const std::vector<Scenario> kFreesScenarios = {
    {"freesRounds", rounds},
    {"freesPending", pending},
    {"freesUnseen", unseen},
    {"freesForkedChild", forkedChild},
    {"freesWithoutCommunicator", withoutCommunicator},
};

}  // namespace e2e
