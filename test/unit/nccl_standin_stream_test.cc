// The stand-in NCCL on the emulated driver: operations are enqueued on their stream and the call
// returns, as with NCCL.
#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "test/nccl-standin/testing.h"

namespace hoccl {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

#define TEXT_OF(name) #name
#define SYMBOL(name) TEXT_OF(name)
/// The emulated driver, loaded under its soname before the stand-in first asks for one.
struct Cuda {
  void* const library = dlopen(HOCCL_TEST_BUILD_DIR "/test/emulator/libcuda.so.1", RTLD_NOW);
#define X(member, name) \
  decltype(&(name)) const member = reinterpret_cast<decltype(&(name))>(dlsym(library, SYMBOL(name)))
  X(init, cuInit);
  X(retain, cuDevicePrimaryCtxRetain);
  X(setCurrent, cuCtxSetCurrent);
  X(streamCreate, cuStreamCreate);
  X(query, cuStreamQuery);
  X(synchronize, cuStreamSynchronize);
  X(alloc, cuMemAlloc);
  X(free, cuMemFree);
  X(hostAlloc, cuMemHostAlloc);
  X(toDevice, cuMemcpyHtoD);
  X(toDeviceAsync, cuMemcpyHtoDAsync);
  X(toHost, cuMemcpyDtoH);
  X(toHostAsync, cuMemcpyDtoHAsync);
  X(waitValue, cuStreamWaitValue64);
  X(beginCapture, cuStreamBeginCapture);
  X(endCapture, cuStreamEndCapture);
  X(graphDestroy, cuGraphDestroy);
#undef X
};
#undef SYMBOL
#undef TEXT_OF

#define CUDA_OK(call) RANK_CHECK((call) == CUDA_SUCCESS)

/// A rank with a device, a communicator and memory.
struct Device {
  const Nccl& nccl;
  const int rank;
  Cuda cuda;
  CUcontext context = nullptr;
  std::uint64_t* flag = nullptr;  ///< pinned; a stream can be held on it

  Device(const Nccl& library, int self) : nccl(library), rank(self) {
    RANK_CHECK(cuda.library);
    CUDA_OK(cuda.init(0));
    CUDA_OK(cuda.retain(&context, rank));
    CUDA_OK(cuda.setCurrent(context));
    void* memory = nullptr;
    CUDA_OK(cuda.hostAlloc(&memory, 4096, 0));
    flag = static_cast<std::uint64_t*>(memory);
  }
  [[nodiscard]] cudaStream_t stream(unsigned flags = CU_STREAM_NON_BLOCKING) const {
    CUstream made = nullptr;
    CUDA_OK(cuda.streamCreate(&made, flags));
    return reinterpret_cast<cudaStream_t>(made);
  }
  [[nodiscard]] char* memory(const std::vector<unsigned char>& content) const {
    CUdeviceptr made = 0;
    CUDA_OK(cuda.alloc(&made, content.size()));
    CUDA_OK(cuda.toDevice(made, content.data(), content.size()));
    return reinterpret_cast<char*>(made);
  }
  [[nodiscard]] std::vector<unsigned char> content(const char* memory, std::size_t bytes) const {
    std::vector<unsigned char> got(bytes);
    CUDA_OK(cuda.toHost(got.data(), reinterpret_cast<CUdeviceptr>(memory), bytes));
    return got;
  }
  /// What comes next on the stream waits for release().
  void hold(cudaStream_t stream) const {
    CUDA_OK(cuda.waitValue(reinterpret_cast<CUstream>(stream), reinterpret_cast<CUdeviceptr>(flag),
                           1, CU_STREAM_WAIT_VALUE_GEQ));
  }
  void release() const { std::atomic_ref(*flag).store(1); }
  [[nodiscard]] bool busy(cudaStream_t stream) const {
    return cuda.query(reinterpret_cast<CUstream>(stream)) == CUDA_ERROR_NOT_READY;
  }
  void synchronize(cudaStream_t stream) const {
    CUDA_OK(cuda.synchronize(reinterpret_cast<CUstream>(stream)));
  }
};

/// Ranks with a device each.
void runDevices(int nranks, const std::function<void(const Device& gpu, ncclComm_t comm)>& body) {
  setenv("EMUCUDA_DEVICES", std::to_string(nranks).c_str(), 1);
  runRanks(nranks, [&](const Nccl& nccl, int rank, ncclUniqueId id) {
    const Device gpu(nccl, rank);
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, nranks, id, rank));
    int device = -1;
    RANK_OK(nccl.ncclCommCuDevice(comm, &device));
    RANK_CHECK(device == rank);
    body(gpu, comm);
  });
  unsetenv("EMUCUDA_DEVICES");
}

constexpr std::size_t kBytes = 300001;
const std::vector<unsigned char> kPoison(kBytes, 0xee);

/// One byte off the allocation's start, behind a copy that nobody waits for.
TEST(NcclStandinStream, InTheOrderOfTheStream) {
  runDevices(2, [](const Device& gpu, ncclComm_t comm) {
    const auto& [nccl, rank, cuda, context, flag] = gpu;
    const int peer = 1 - rank;
    const auto sent = pattern(rank, peer, kBytes);
    std::vector<unsigned char> got(kBytes + 4, 0xee);
    char* out = gpu.memory(got);
    char* in = gpu.memory(got);
    for (const cudaStream_t stream : {gpu.stream(), gpu.stream(CU_STREAM_DEFAULT), cudaStream_t{},
                                      reinterpret_cast<cudaStream_t>(CU_STREAM_LEGACY),
                                      reinterpret_cast<cudaStream_t>(CU_STREAM_PER_THREAD)}) {
      const auto cuStream = reinterpret_cast<CUstream>(stream);
      got.assign(kBytes + 4, 0xee);
      CUDA_OK(
          cuda.toDeviceAsync(reinterpret_cast<CUdeviceptr>(in), got.data(), got.size(), cuStream));
      CUDA_OK(cuda.toDeviceAsync(reinterpret_cast<CUdeviceptr>(out) + 1, sent.data(), kBytes,
                                 cuStream));
      RANK_OK(nccl.ncclGroupStart());
      RANK_OK(nccl.ncclSend(out + 1, kBytes, ncclUint8, peer, comm, stream));
      RANK_OK(nccl.ncclRecv(in + 1, kBytes, ncclUint8, peer, comm, stream));
      RANK_OK(nccl.ncclGroupEnd());
      // Destroyed behind the send, fetched behind the receive.
      const std::vector<unsigned char> zero(kBytes);
      CUDA_OK(cuda.toDeviceAsync(reinterpret_cast<CUdeviceptr>(out) + 1, zero.data(), kBytes,
                                 cuStream));
      CUDA_OK(
          cuda.toHostAsync(got.data(), reinterpret_cast<CUdeviceptr>(in), got.size(), cuStream));
      gpu.synchronize(stream);
      RANK_CHECK(std::memcmp(got.data() + 1, pattern(peer, rank, kBytes).data(), kBytes) == 0);
      RANK_CHECK(got[0] == 0xee && got[kBytes + 1] == 0xee);
    }
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinStream, TheCallReturnsBeforeThePeerComes) {
  runDevices(2, [](const Device& gpu, ncclComm_t comm) {
    const auto& [nccl, rank, cuda, context, flag] = gpu;
    const cudaStream_t stream = gpu.stream();
    char* data = gpu.memory(rank == 0 ? kPoison : pattern(1, 0, kBytes));
    if (rank == 1) std::this_thread::sleep_for(milliseconds(400));
    const auto begin = Clock::now();
    if (rank == 0) {
      RANK_OK(nccl.ncclRecv(data, kBytes, ncclUint8, 1, comm, stream));
      RANK_CHECK(Clock::now() - begin < milliseconds(200));
      RANK_CHECK(gpu.busy(stream));
      // The application's calls go on: memory is allocated, copied on other streams and freed, and
      // the free, which waits for the whole context, ends when the peer has come.
      char* other = gpu.memory(pattern(0, 0, kBytes));
      RANK_CHECK(gpu.content(other, kBytes) == pattern(0, 0, kBytes));
      RANK_CHECK(gpu.busy(stream));
      CUDA_OK(cuda.free(reinterpret_cast<CUdeviceptr>(other)));
      RANK_CHECK(!gpu.busy(stream));
      RANK_CHECK(gpu.content(data, kBytes) == pattern(1, 0, kBytes));
    } else {
      RANK_OK(nccl.ncclSend(data, kBytes, ncclUint8, 0, comm, stream));
      gpu.synchronize(stream);
    }
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinStream, AHeldStreamHoldsUpItsCommunicatorAndNoOther) {
  runDevices(2, [](const Device& gpu, ncclComm_t comm) {
    const auto& [nccl, rank, cuda, context, flag] = gpu;
    ncclComm_t second = nullptr;
    RANK_OK(nccl.ncclCommSplit(comm, 0, 0, &second, nullptr));
    const cudaStream_t held = gpu.stream(), free = gpu.stream(), other = gpu.stream();
    const int peer = 1 - rank;
    const auto mine = pattern(rank, 9, kBytes), theirs = pattern(peer, 9, kBytes);
    char* out = gpu.memory(mine);
    char* in[3];
    for (char*& each : in) each = gpu.memory(kPoison);
    gpu.hold(held);
    const auto exchange = [&](char* to, ncclComm_t on, cudaStream_t stream) {
      RANK_OK(nccl.ncclGroupStart());
      RANK_OK(nccl.ncclSend(out, kBytes, ncclUint8, peer, on, stream));
      RANK_OK(nccl.ncclRecv(to, kBytes, ncclUint8, peer, on, stream));
      RANK_OK(nccl.ncclGroupEnd());
    };
    exchange(in[0], comm, held);
    exchange(in[1], comm, free);     // behind the first in the order of the communicator
    exchange(in[2], second, other);  // independent
    gpu.synchronize(other);
    RANK_CHECK(gpu.content(in[2], kBytes) == theirs);
    std::this_thread::sleep_for(milliseconds(50));
    RANK_CHECK(gpu.busy(held) && gpu.busy(free));
    RANK_CHECK(gpu.content(in[1], kBytes) == kPoison);
    gpu.release();
    gpu.synchronize(held);
    gpu.synchronize(free);
    RANK_CHECK(gpu.content(in[0], kBytes) == theirs && gpu.content(in[1], kBytes) == theirs);
    RANK_OK(nccl.ncclCommDestroy(second));
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinStream, StreamsOfOneGroupStartAndFinishTogether) {
  runDevices(2, [](const Device& gpu, ncclComm_t comm) {
    const auto& [nccl, rank, cuda, context, flag] = gpu;
    const cudaStream_t held = gpu.stream(), free = gpu.stream();
    const int peer = 1 - rank;
    char* out = gpu.memory(pattern(rank, 4, kBytes));
    char* in = gpu.memory(kPoison);
    if (rank == 0) gpu.hold(held);
    RANK_OK(nccl.ncclGroupStart());
    RANK_OK(nccl.ncclSend(out, kBytes, ncclUint8, peer, comm, held));
    RANK_OK(nccl.ncclRecv(in, kBytes, ncclUint8, peer, comm, free));
    RANK_OK(nccl.ncclGroupEnd());
    std::this_thread::sleep_for(milliseconds(100));
    if (rank == 0) {
      RANK_CHECK(gpu.busy(free));
      gpu.release();
    }
    gpu.synchronize(held);
    gpu.synchronize(free);
    RANK_CHECK(gpu.content(in, kBytes) == pattern(peer, 4, kBytes));
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinStream, ReductionsWithAScalarOnTheDevice) {
  runDevices(2, [](const Device& gpu, ncclComm_t comm) {
    const auto& [nccl, rank, cuda, context, flag] = gpu;
    const cudaStream_t stream = gpu.stream();
    const float value = static_cast<float>(rank + 1), by = static_cast<float>(10 * rank + 1);
    CUdeviceptr data = 0, scalar = 0;
    CUDA_OK(cuda.alloc(&data, 4));
    CUDA_OK(cuda.alloc(&scalar, 4));
    CUDA_OK(cuda.toDevice(data, &value, 4));
    CUDA_OK(cuda.toDeviceAsync(scalar, &by, 4, reinterpret_cast<CUstream>(stream)));
    ncclRedOp_t op;
    RANK_OK(nccl.ncclRedOpCreatePreMulSum(&op, reinterpret_cast<void*>(scalar), ncclFloat32,
                                          ncclScalarDevice, comm));
    void* in = reinterpret_cast<void*>(data);
    RANK_OK(nccl.ncclAllReduce(in, in, 1, ncclFloat32, op, comm, stream));
    RANK_OK(nccl.ncclRedOpDestroy(op, comm));
    gpu.synchronize(stream);
    float sum = 0;
    CUDA_OK(cuda.toHost(&sum, data, 4));
    RANK_CHECK(sum == 1 * 1 + 2 * 11);
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinStream, AnErrorReleasesTheStreamAndShowsInTheCommunicator) {
  setenv("NCCLSTANDIN_TIMEOUT_MS", "1000", 1);
  const auto failing = [](std::size_t firstSends) {
    runDevices(2, [=](const Device& gpu, ncclComm_t comm) {
      const auto& [nccl, rank, cuda, context, flag] = gpu;
      const cudaStream_t stream = gpu.stream();
      char* data = gpu.memory(kPoison);
      const auto begin = Clock::now();
      if (rank == 0) {
        RANK_OK(nccl.ncclRecv(data, kBytes, ncclUint8, 1, comm, stream));
        RANK_OK(nccl.ncclRecv(data, kBytes, ncclUint8, 1, comm, stream));  // never runs
        gpu.synchronize(stream);
        RANK_CHECK(Clock::now() - begin < milliseconds(5000));
        ncclResult_t state = ncclSuccess;
        RANK_OK(nccl.ncclCommGetAsyncError(comm, &state));
        RANK_CHECK(state == (firstSends ? ncclInvalidUsage : ncclRemoteError));
        RANK_CHECK(std::strstr(nccl.ncclGetLastError(comm), "rank 0 of 2"));
        RANK_CHECK(nccl.ncclRecv(data, kBytes, ncclUint8, 1, comm, stream) == state);
        RANK_CHECK(gpu.content(data, kBytes) != pattern(1, 0, kBytes));
      } else if (firstSends) {
        RANK_OK(nccl.ncclSend(data, firstSends, ncclUint8, 0, comm, stream));
      }
      if (rank == 1) std::this_thread::sleep_for(milliseconds(1500));
      RANK_OK(nccl.ncclCommAbort(comm));
    });
  };
  failing(kBytes - 1);  // another size than the receive's
  failing(0);           // a peer that does not come
  unsetenv("NCCLSTANDIN_TIMEOUT_MS");
}

TEST(NcclStandinStream, AbortFromAnotherThreadReleasesTheStreams) {
  runDevices(2, [](const Device& gpu, ncclComm_t comm) {
    const auto& [nccl, rank, cuda, context, flag] = gpu;
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(800));
      RANK_OK(nccl.ncclCommAbort(comm));
      return;
    }
    const cudaStream_t stream = gpu.stream(), held = gpu.stream();
    char* data = gpu.memory(kPoison);
    RANK_OK(nccl.ncclRecv(data, kBytes, ncclUint8, 1, comm, stream));
    gpu.hold(held);
    RANK_OK(nccl.ncclRecv(data, kBytes, ncclUint8, 1, comm, held));  // has not started either
    std::thread aborter([&] {
      std::this_thread::sleep_for(milliseconds(100));
      RANK_OK(nccl.ncclCommAbort(comm));
    });
    const auto begin = Clock::now();
    gpu.synchronize(stream);
    aborter.join();
    RANK_CHECK(Clock::now() - begin < milliseconds(600));
    gpu.release();
    gpu.synchronize(held);
  });
}

TEST(NcclStandinStream, CapturedWorkIsOnlyRecorded) {
  runDevices(1, [](const Device& gpu, ncclComm_t comm) {
    const auto& [nccl, rank, cuda, context, flag] = gpu;
    const cudaStream_t stream = gpu.stream(), beside = gpu.stream();
    char* out = gpu.memory(pattern(1, 1, kBytes));
    char* in = gpu.memory(kPoison);
    CUDA_OK(cuda.beginCapture(reinterpret_cast<CUstream>(stream), CU_STREAM_CAPTURE_MODE_GLOBAL));
    RANK_OK(nccl.ncclAllGather(out, in, kBytes, ncclUint8, comm, stream));
    // On a stream that is not captured an operation runs, and spoils no capture.
    char* other = in + 1;
    RANK_OK(nccl.ncclAllGather(out, other, kBytes - 1, ncclUint8, comm, beside));
    CUgraph graph = nullptr;
    CUDA_OK(cuda.endCapture(reinterpret_cast<CUstream>(stream), &graph));
    CUDA_OK(cuda.graphDestroy(graph));
    gpu.synchronize(beside);
    const auto got = gpu.content(in, kBytes), sent = pattern(1, 1, kBytes);
    RANK_CHECK(got[0] == 0xee && std::memcmp(got.data() + 1, sent.data(), kBytes - 1) == 0);
    RANK_CHECK(nccl.lines().find("ncclAllGather comm=1 rank=0 peer=-1 bytes=300001 ") !=
               std::string::npos);
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinStream, ThousandsOfOperationsLeaveMemoryFlat) {
  runDevices(2, [](const Device& gpu, ncclComm_t comm) {
    const auto& [nccl, rank, cuda, context, flag] = gpu;
    const cudaStream_t streams[] = {gpu.stream(), gpu.stream(), gpu.stream()};
    const int peer = 1 - rank;
    std::vector<unsigned char> both(2 * kBytes, 0xee);
    char* out = gpu.memory(pattern(rank, 2, kBytes));
    char* in = gpu.memory(both);
    const auto maps = [] {
      std::ifstream file("/proc/self/maps");
      return std::count(std::istreambuf_iterator<char>(file), {}, '\n');
    };
    long before = 0;
    for (int n = 0; n < 2000; ++n) {
      const std::size_t bytes = 1 + (n * 7919u) % kBytes;
      const cudaStream_t stream = streams[n % 3];
      if (n % 2) {
        RANK_OK(nccl.ncclAllGather(out, in, bytes, ncclUint8, comm, stream));
      } else {
        RANK_OK(nccl.ncclGroupStart());
        RANK_OK(nccl.ncclSend(out, bytes, ncclUint8, peer, comm, stream));
        RANK_OK(nccl.ncclRecv(in, bytes, ncclUint8, peer, comm, stream));
        RANK_OK(nccl.ncclGroupEnd());
      }
      if (n % 40 == 39) {
        for (const cudaStream_t each : streams) gpu.synchronize(each);
      }
      if (n == 400) before = maps();
    }
    for (const cudaStream_t each : streams) gpu.synchronize(each);
    const long after = maps();
    std::fprintf(stderr, "rank %d: mappings %ld -> %ld\n", rank, before, after);
    RANK_CHECK(after <= before + 40);
    RANK_OK(nccl.ncclAllGather(out, in, kBytes, ncclUint8, comm, streams[0]));
    gpu.synchronize(streams[0]);
    RANK_CHECK(gpu.content(in + peer * kBytes, kBytes) == pattern(peer, 2, kBytes));
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

}  // namespace
}  // namespace hoccl
