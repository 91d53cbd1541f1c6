// Virtual memory management as PyTorch's expandable_segments use it: one range of addresses,
// segments mapped into it and unmapped from it one by one, buffers that reach over several.

#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kSegment = 2 << 20;
constexpr std::size_t kSmallest = 64 << 10;

/// A driver function as the preloaded library wraps it, or the driver's own.
template <typename Function>
Function* found(const char* name, bool seen) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  void* symbol = seen ? ::dlsym(RTLD_DEFAULT, name) : ::dlsym(library, name);
  REQUIRE(symbol, "{} is not to be found", name);
  return reinterpret_cast<Function*>(symbol);
}

std::size_t bytesFree() {
  std::size_t free = 0, total = 0;
  REQUIRE_CU(found<CUresult(std::size_t*, std::size_t*)>("cuMemGetInfo_v2", false)(&free, &total));
  return free;
}

/// A reserved range, into which segments are mapped.
class Range {
 public:
  explicit Range(std::size_t segments) : handles_(segments) {
    REQUIRE_CU(cuda().memAddressReserve(&base_, bytes(), 0, 0, 0));
  }
  ~Range() {
    for (std::size_t i = 0; i < handles_.size(); ++i) {
      if (handles_[i]) unmap(i);
    }
    cuda().memAddressFree(base_, bytes());
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  void map(std::size_t i, bool exportable = true) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    if (exportable) {
      properties.requestedHandleTypes = shareableAs(i);
    }
    CUmemGenericAllocationHandle handle = 0;
    REQUIRE_CU(cuda().memCreate(&handle, kSegment, &properties, 0));
    REQUIRE_CU(cuda().memMap(at(i), kSegment, 0, handle, 0));
    CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    REQUIRE_CU(cuda().memSetAccess(at(i), kSegment, &access, 1));
    handles_[i] = handle;
  }
  void mapAll() {
    for (std::size_t i = 0; i < handles_.size(); ++i) map(i);
  }
  void unmap(std::size_t i, bool seen = true) {
    REQUIRE_CU(found<CUresult(CUdeviceptr, std::size_t)>("cuMemUnmap", seen)(at(i), kSegment));
    REQUIRE_CU(cuda().memRelease(*handles_[i]));
    handles_[i].reset();
  }
  [[nodiscard]] CUdeviceptr at(std::size_t i) const { return base_ + i * kSegment; }
  [[nodiscard]] std::size_t bytes() const { return handles_.size() * kSegment; }

 private:
  CUdeviceptr base_ = 0;
  std::vector<std::optional<CUmemGenericAllocationHandle>> handles_;
};

/// Host memory for what goes into a part of a range and comes out of it.
struct Image {
  explicit Image(std::size_t size, std::size_t from = 0) : bytes(size), begin(from) {
    void* memory = nullptr;
    REQUIRE_CU(cuda().memHostAlloc(&memory, size, 0));
    data = static_cast<unsigned char*>(memory);
  }
  ~Image() { cuda().memFreeHost(data); }
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;
  std::size_t bytes;
  std::size_t begin;  ///< of the part in the range
  unsigned char* data = nullptr;
};

/// Both ranks: rank `sender` sends `bytes` at `offset` of its range to the other, which checks
/// these and all others of the image's part. All of that is written anew before.
void transfer(const Rank& rank, const Range& range, Image& image, int sender, std::size_t offset,
              std::size_t bytes, std::uint64_t n, ncclComm_t comm, CUstream stream) {
  const std::string what = fmt::format("transfer {}: {} bytes at {}", n, bytes, offset);
  void* const buffer = reinterpret_cast<void*>(range.at(0) + offset);
  const CUdeviceptr part = range.at(0) + image.begin;
  const int peer = 1 - rank.rank;
  std::memset(image.data, 0xa5, image.bytes);
  if (rank.rank == sender) {
    makePattern(seedOf(sender, n, 11), image.data + (offset - image.begin), bytes);
    REQUIRE_CU(cuda().copyToDevice(part, image.data, image.bytes, stream));
    REQUIRE_NCCL(nccl().ncclSend(buffer, bytes, ncclUint8, peer, comm, stream));
    awaitStream(stream, what);
    return;
  }
  REQUIRE_CU(cuda().copyToDevice(part, image.data, image.bytes, stream));
  REQUIRE_NCCL(nccl().ncclRecv(buffer, bytes, ncclUint8, peer, comm, stream));
  awaitStream(stream, what);
  std::memset(image.data, 0, image.bytes);
  REQUIRE_CU(cuda().copyToHost(image.data, part, image.bytes, stream));
  awaitStream(stream, what);
  std::vector<unsigned char> wanted(image.bytes, 0xa5);
  makePattern(seedOf(sender, n, 11), wanted.data() + (offset - image.begin), bytes);
  REQUIRE(std::memcmp(image.data, wanted.data(), image.bytes) == 0, "{}: wrong bytes", what);
}

/// Offsets and sizes around the seams between segments.
void sizes(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Range range(5);
  range.mapAll();
  Image image(range.bytes());
  std::uint64_t n = 0;
  for (const std::size_t offset : {std::size_t{0}, std::size_t{1}, kSegment - 1, kSegment,
                                   kSegment + 4097, 2 * kSegment - 65535}) {
    for (const std::size_t bytes :
         {kSmallest, kSmallest + 1, kSegment, kSegment + 3, 3 * kSegment - 4097}) {
      transfer(rank, range, image, static_cast<int>(n % 2), offset, bytes, n, comm, stream);
      ++n;
    }
  }
  rank.barrier("over");
  say("transfers", std::to_string(n));
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Map, operate, unmap, again and again, at the same addresses: `which`=all segments or one in the
/// middle; `seen`=0: unmapped behind HOCCL's back; `part`=seam: buffers of two segments, a little
/// of each.
void remap(const Rank& rank) {
  const int rounds = std::atoi(rank.argument("rounds", "20").c_str());
  const bool all = rank.argument("which", "all") == "all";
  const bool seen = rank.argument("seen", "1") == "1";
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const bool seam = rank.argument("part", "all") == "seam";
  const std::size_t segments = seam ? 2 : 3;
  Range range(segments);
  range.mapAll();
  constexpr std::size_t kPart = 256 << 10;
  Image image(seam ? kPart : range.bytes(), seam ? kSegment - kPart / 2 : 0);
  std::size_t early = 0;
  std::vector<double> unmapping;  // ms, of each round
  for (int n = 0; n < rounds; ++n) {
    const std::size_t offset = image.begin + static_cast<std::size_t>(n) % 7 * 1001;
    transfer(rank, range, image, n % 2, offset, image.bytes - 8000, static_cast<std::uint64_t>(n),
             comm, stream);
    if (n == rounds / 10) early = bytesFree();
    if (n == rounds - 1) say("flat", bytesFree() == early ? "yes" : "no");
    const auto began = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < segments; ++i) {
      if (all || i == 1) range.unmap(i, seen);
    }
    unmapping.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began)
            .count());
    for (std::size_t i = 0; i < segments; ++i) {
      if (all || i == 1) range.map(i);
    }
  }
  rank.barrier("over");
  std::sort(unmapping.begin(), unmapping.end());
  say("unmapMs", fmt::format("{:.3f} {:.3f}", unmapping[unmapping.size() / 2], unmapping.back()));
  say("freedWhileMapped", std::to_string(counters().freedWhileMapped));
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Rank 0's receive into two segments waits for a send that comes late, or never, while another
/// thread unmaps one: of the two (`what`=own), or one of another buffer (`what`=other).
void pending(const Rank& rank) {
  const bool own = rank.argument("what", "own") == "own";
  const bool never = rank.argument("never", "0") == "1";
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Range range(4), after(1);
  range.mapAll();
  after.mapAll();
  Image image(range.bytes());
  for (std::uint64_t n = 0; n < 2; ++n) {  // the segments 0 and 1, then 2 and 3
    transfer(rank, range, image, 1, n * 2 * kSegment + 5, 2 * kSegment - 9, n, comm, stream);
  }
  void* const late = reinterpret_cast<void*>(range.at(2) + 5);
  constexpr std::size_t kBytes = 2 * kSegment - 9;
  if (rank.rank == 0) {
    REQUIRE_NCCL(nccl().ncclRecv(late, kBytes, ncclUint8, 1, comm, stream));
    std::atomic<bool> unmapped{false};
    std::thread freer([&] {
      useDevice();
      range.unmap(own ? 3 : 1);
      unmapped = true;
    });
    ::usleep(1'200'000);  // more than the time-out the test sets, where it sets one
    REQUIRE(!streamIdle(stream), "the receive was released without its bytes");
    say("unmappedEarly", unmapped ? "yes" : "no");
    rank.post("go");
    if (never) REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    awaitStream(stream, never ? "the aborted receive" : "the late receive");
    freer.join();
  } else {
    rank.await("go");
    if (never) {
      REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    } else {
      REQUIRE_NCCL(nccl().ncclSend(late, kBytes, ncclUint8, 0, comm, stream));
      awaitStream(stream, "the late send");
    }
  }
  rank.barrier("over");
  say("freedWhileMapped", std::to_string(counters().freedWhileMapped));
  sayStats();
  if (!never) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Unmaps that nobody sees: `before`=nothing, or what makes the mover let go by itself before.
void unseen(const Rank& rank) {
  const std::string before = rank.argument("before", "nothing");
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Range range(2);
  range.mapAll();
  Image image(range.bytes());
  transfer(rank, range, image, 0, 7, kSegment + 100, 0, comm, stream);
  if (before == "outOfMemory") {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    CUmemGenericAllocationHandle none = 0;
    auto* create = found<decltype(::cuMemCreate)>("cuMemCreate", true);
    const CUresult result = create(&none, std::size_t{1} << 50, &properties, 0);
    REQUIRE(result == CUDA_ERROR_OUT_OF_MEMORY, "cuMemCreate of 1 PiB returned {}",
            static_cast<int>(result));
  } else if (before == "idle") {
    ::usleep(600'000);
  }
  for (std::size_t i : {0, 1}) range.unmap(i, false);
  rank.barrier("unmapped");
  say("freedWhileMapped", std::to_string(counters().freedWhileMapped));
  rank.barrier("said");
  range.mapAll();
  transfer(rank, range, image, 1, 7, kSegment + 100, 1, comm, stream);
  rank.barrier("over");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// One segment among others that cannot be exported.
void unexportable(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Range range(4);
  for (std::size_t i = 0; i < 4; ++i) range.map(i, i != 2);
  Image image(range.bytes());
  for (std::uint64_t n = 0; n < 8; ++n) {
    const bool over = n % 4 >= 2;  // the seam to it
    transfer(rank, range, image, static_cast<int>(n % 2), over ? kSegment + 3 : 3, kSegment + 5, n,
             comm, stream);
  }
  rank.barrier("over");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// While the process has no file descriptor left nothing can be handed to the mover: the
/// application copies. Afterwards the same buffer is mapped.
void noDescriptors(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Range plain(2), range(2);
  for (std::size_t i : {0, 1}) plain.map(i, false);
  range.mapAll();
  Image plainImage(plain.bytes()), image(range.bytes());
  // What the application copies over is there before.
  transfer(rank, plain, plainImage, 0, 3, kSegment + 5, 0, comm, stream);
  rank.barrier("warm");
  std::vector<int> taken;
  if (rank.rank == 0) {
    rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit");
    limit.rlim_cur = 512;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit");
    for (int fd = ::dup(0); fd >= 0; fd = ::dup(0)) taken.push_back(fd);
  }
  for (std::uint64_t n = 1; n < 5; ++n) {
    if (n == 3) {
      for (int fd : taken) ::close(fd);
    }
    transfer(rank, range, image, 0, 3, kSegment + 5, n, comm, stream);
  }
  rank.barrier("over");
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Many buffers over few segments, used in turn, so that a mover that keeps few has to map again.
void many(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  Range range(6);
  range.mapAll();
  Image image(range.bytes());
  std::uint64_t n = 0;
  for (int round = 0; round < 2; ++round) {
    for (std::size_t first = 0; first < 6; ++first) {
      for (std::size_t last = first; last < 6; ++last) {
        transfer(rank, range, image, static_cast<int>(n % 2), first * kSegment + 1,
                 (last - first) * kSegment + kSmallest, n, comm, stream);
        ++n;
      }
    }
  }
  rank.barrier("over");
  say("transfers", std::to_string(n));
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Several threads, each with a communicator, on the same segments; one of them unmaps and maps
/// some of its own between.
void threads(const Rank& rank) {
  constexpr int kThreads = 4, kRounds = 20;
  // Parts of neighbouring segments: no byte is shared, every segment is.
  constexpr std::size_t kBytes = kSegment - 64;
  std::vector<ncclComm_t> comms;
  for (int t = 0; t < kThreads; ++t) comms.push_back(rank.communicator("t" + std::to_string(t)));
  Range shared(kThreads + 1), own(2);
  shared.mapAll();
  // Freed behind all threads: a free waits for every stream, also those of threads that need the
  // peer, which may be in a free itself.
  std::vector<std::unique_ptr<Image>> images;
  for (int t = 0; t < kThreads; ++t) images.push_back(std::make_unique<Image>(kBytes));
  std::vector<std::thread> running;
  for (int t = 0; t < kThreads; ++t) {
    running.emplace_back([&, t] {
      useDevice();
      CUstream stream = newStream();
      const auto index = static_cast<std::size_t>(t);
      const CUdeviceptr part = shared.at(index) + kSegment / 2;
      const Image& image = *images[index];
      std::vector<unsigned char> wanted(kBytes);
      for (int n = 0; n < kRounds; ++n) {
        if (t == 0) own.mapAll();
        const CUdeviceptr at = t == 0 && n % 2 ? own.at(0) + 1 : part + static_cast<unsigned>(n);
        const std::uint64_t seed = seedOf(n % 2, static_cast<std::uint64_t>(n), 20 + index);
        makePattern(seed, wanted.data(), kBytes);
        if (n % 2 == rank.rank) {
          std::memcpy(image.data, wanted.data(), kBytes);
          REQUIRE_CU(cuda().copyToDevice(at, image.data, kBytes, stream));
          REQUIRE_NCCL(nccl().ncclSend(reinterpret_cast<void*>(at), kBytes, ncclUint8,
                                       1 - rank.rank, comms[index], stream));
        } else {
          std::memset(image.data, 0xa5, kBytes);
          REQUIRE_CU(cuda().copyToDevice(at, image.data, kBytes, stream));
          REQUIRE_NCCL(nccl().ncclRecv(reinterpret_cast<void*>(at), kBytes, ncclUint8,
                                       1 - rank.rank, comms[index], stream));
          REQUIRE_CU(cuda().copyToHost(image.data, at, kBytes, stream));
        }
        awaitStream(stream, fmt::format("thread {}, round {}", t, n));
        REQUIRE(std::memcmp(image.data, wanted.data(), kBytes) == 0, "thread {}, round {}", t, n);
        if (t == 0) {
          for (std::size_t i : {0, 1}) own.unmap(i);
        }
      }
    });
  }
  for (std::thread& each : running) each.join();
  images.clear();
  rank.barrier("over");
  say("freedWhileMapped", std::to_string(counters().freedWhileMapped));
  sayStats();
  for (ncclComm_t comm : comms) REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// A group of which nothing is launched leaves no pin behind: the memory can be unmapped.
void failedGroup(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  Range range(1);
  range.mapAll();
  CUstream stream = newStream();
  Image image(range.bytes());
  transfer(rank, range, image, 0, 3, kSmallest, 0, comm, stream);
  void* const buffer = reinterpret_cast<void*>(range.at(0) + 3);
  int nowhere = 0;
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclSend(buffer, kSmallest, ncclUint8, 1 - rank.rank, comm, stream));
  // Memory that CUDA does not know.
  REQUIRE(
      nccl().ncclRecv(&nowhere, kSmallest, ncclUint8, 1 - rank.rank, comm, stream) != ncclSuccess,
      "a buffer that is none was taken");
  REQUIRE(nccl().ncclGroupEnd() != ncclSuccess, "the group did not fail");
  range.unmap(0);
  rank.barrier("over");
  say("freedWhileMapped", std::to_string(counters().freedWhileMapped));
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
}

}  // namespace

const std::vector<Scenario> kSpanScenarios = {
    {"spansSizes", sizes},
    {"spansRemap", remap},
    {"spansPending", pending},
    {"spansUnseen", unseen},
    {"spansUnexportable", unexportable},
    {"spansNoDescriptors", noDescriptors},
    {"spansMany", many},
    {"spansThreads", threads},
    {"spansFailedGroup", failedGroup},
};

}  // namespace e2e
