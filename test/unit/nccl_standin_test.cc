// The stand-in NCCL by itself: ranks are processes, forked before anything is loaded; without a
// CUDA context every pointer is host memory.
#include <cuda.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace hoccl {
namespace {

/// The library's functions, by dlopen, as HOCCL itself finds NCCL's.
struct Nccl {
  template <typename F>
  F* find(const char* name) const {
    return reinterpret_cast<F*>(library ? dlsym(library, name) : nullptr);
  }
  void* const library =
      dlopen(HOCCL_TEST_BUILD_DIR "/test/nccl-standin/libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
#define X(name) decltype(::name)* const name = find<decltype(::name)>(#name)
  X(ncclGetVersion);
  X(ncclGetUniqueId);
  X(ncclCommInitRank);
  X(ncclCommInitRankConfig);
  X(ncclCommInitAll);
  X(ncclCommSplit);
  X(ncclCommShrink);
  X(ncclCommFinalize);
  X(ncclCommDestroy);
  X(ncclCommAbort);
  X(ncclCommGetAsyncError);
  X(ncclGetLastError);
  X(ncclGetErrorString);
  X(ncclCommCount);
  X(ncclCommCuDevice);
  X(ncclCommUserRank);
  X(ncclGroupStart);
  X(ncclGroupEnd);
  X(ncclSend);
  X(ncclRecv);
  X(ncclAllReduce);
  X(ncclReduce);
  X(ncclReduceScatter);
  X(ncclAllGather);
  X(ncclAlltoAll);
  X(ncclGather);
  X(ncclScatter);
  X(ncclBroadcast);
  X(ncclBcast);
  X(ncclCommRegister);
  X(ncclCommDeregister);
  X(ncclMemAlloc);
  X(ncclMemFree);
#undef X
  std::size_t (*const log)(char*,
                           std::size_t) = find<std::size_t(char*, std::size_t)>("ncclStandinLog");

  [[nodiscard]] std::string lines() const {
    std::string text(log(nullptr, 0) + 1, '\0');
    log(text.data(), text.size());
    text.pop_back();
    return text;
  }
};

/// Checks inside a forked rank: a failure ends the process with a line that says where.
#define RANK_CHECK(condition)                                                         \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::fprintf(stderr, "rank %d, line %d: %s (%s)\n", rank, __LINE__, #condition, \
                   nccl.library ? nccl.ncclGetLastError(nullptr) : "not loaded");     \
      _exit(1);                                                                       \
    }                                                                                 \
  } while (false)
#define RANK_OK(call) RANK_CHECK((call) == ncclSuccess)

using Body = std::function<void(const Nccl& nccl, int rank, ncclUniqueId id)>;

/// Runs `body` in one process a rank, rank 0's making the id, and expects all to return within 20
/// s.
void runRanks(int nranks, const Body& body) {
  std::vector<pid_t> children;
  std::vector<int> pipes(2 * nranks);
  for (int rank = 0; rank < nranks; ++rank) ASSERT_EQ(pipe(&pipes[2 * rank]), 0);
  for (int rank = 0; rank < nranks; ++rank) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      const Nccl nccl;
      if (!nccl.library) std::fprintf(stderr, "%s\n", dlerror());
      RANK_CHECK(nccl.library);
      ncclUniqueId id;
      if (rank == 0) {
        RANK_OK(nccl.ncclGetUniqueId(&id));
        // Bytes behind the 64th reach every rank unchanged, and disturb nobody.
        std::memset(id.internal + 64, 0x77, 64);
        for (int other = 1; other < nranks; ++other) {
          RANK_CHECK(write(pipes[2 * other + 1], &id, sizeof id) == sizeof id);
        }
      } else {
        RANK_CHECK(read(pipes[2 * rank], &id, sizeof id) == sizeof id);
      }
      body(nccl, rank, id);
      _exit(0);
    }
    children.push_back(child);
  }
  for (const int fd : pipes) close(fd);
  for (std::size_t rank = 0; rank < children.size(); ++rank) {
    int status = 0;
    ASSERT_EQ(waitpid(children[rank], &status, 0), children[rank]);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank << ": " << status;
  }
}

ncclResult_t settle(const Nccl& nccl, ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (nccl.ncclCommGetAsyncError(comm, &state) == ncclSuccess && state == ncclInProgress) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return state;
}

std::vector<unsigned char> pattern(int from, int to, std::size_t bytes) {
  std::vector<unsigned char> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<unsigned char>(i * 7 + from * 31 + to * 3 + (i >> 11));
  }
  return data;
}

TEST(NcclStandin, AnswersWithoutACommunicator) {
  runRanks(1, [](const Nccl& nccl, int rank, ncclUniqueId) {
    int version = 0;
    RANK_OK(nccl.ncclGetVersion(&version));
    RANK_CHECK(version == 22809);
    RANK_CHECK(std::string(nccl.ncclGetErrorString(ncclInProgress)).find("progress") !=
               std::string::npos);
    int count = 0;
    RANK_CHECK(nccl.ncclCommCount(nullptr, &count) == ncclInvalidArgument);
    RANK_CHECK(nccl.ncclGroupEnd() == ncclInvalidUsage);
    void* memory = nullptr;
    RANK_OK(nccl.ncclMemAlloc(&memory, 100));
    std::memset(memory, 1, 100);
    RANK_OK(nccl.ncclMemFree(memory));
  });
}

TEST(NcclStandin, GroupedRingOfThreeProcesses) {
  runRanks(3, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 3, id, rank));
    int count = 0, mine = -1;
    RANK_OK(nccl.ncclCommCount(comm, &count));
    RANK_OK(nccl.ncclCommUserRank(comm, &mine));
    RANK_CHECK(count == 3 && mine == rank);
    // Larger than any socket buffer, odd, and empty; several to each neighbour.
    for (const std::size_t bytes : {std::size_t{9000001}, std::size_t{0}, std::size_t{1}}) {
      const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
      const auto forward = pattern(rank, next, bytes), backward = pattern(rank, previous, bytes);
      std::vector<unsigned char> a(bytes + 1, 0xee), b(bytes + 1, 0xee);
      RANK_OK(nccl.ncclGroupStart());
      RANK_OK(nccl.ncclSend(forward.data(), bytes, ncclUint8, next, comm, nullptr));
      RANK_OK(nccl.ncclSend(backward.data(), bytes, ncclUint8, previous, comm, nullptr));
      RANK_OK(nccl.ncclRecv(a.data(), bytes, ncclUint8, previous, comm, nullptr));
      RANK_OK(nccl.ncclRecv(b.data(), bytes, ncclUint8, next, comm, nullptr));
      RANK_OK(nccl.ncclGroupEnd());
      RANK_CHECK(std::memcmp(a.data(), pattern(previous, rank, bytes).data(), bytes) == 0);
      RANK_CHECK(std::memcmp(b.data(), pattern(next, rank, bytes).data(), bytes) == 0);
      RANK_CHECK(a[bytes] == 0xee && b[bytes] == 0xee);
    }
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

template <typename T>
void checkReductions(const Nccl& nccl, int rank, ncclComm_t comm, ncclDataType_t type) {
  std::vector<T> in(1001), out(1001, T(-1));
  std::iota(in.begin(), in.end(), T(rank * 1000));
  RANK_OK(nccl.ncclAllReduce(in.data(), out.data(), in.size(), type, ncclSum, comm, nullptr));
  for (std::size_t i = 0; i < in.size(); ++i) RANK_CHECK(out[i] == T(3 * i + 3000));
  RANK_OK(nccl.ncclAllReduce(in.data(), in.data(), in.size(), type, ncclAvg, comm, nullptr));
  for (std::size_t i = 0; i < in.size(); ++i) RANK_CHECK(in[i] == T(i + 1000));
}

TEST(NcclStandin, Collectives) {
  runRanks(3, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 3, id, rank));
    checkReductions<float>(nccl, rank, comm, ncclFloat32);
    checkReductions<double>(nccl, rank, comm, ncclFloat64);
    checkReductions<int>(nccl, rank, comm, ncclInt32);

    std::vector<int> in{rank, 10 + rank, 20 + rank}, out(3, -1);
    RANK_OK(nccl.ncclReduce(in.data(), rank == 2 ? out.data() : nullptr, 3, ncclInt32, ncclMax, 2,
                            comm, nullptr));
    RANK_CHECK(rank != 2 || (out == std::vector<int>{2, 12, 22}));
    int one = -1;
    RANK_OK(nccl.ncclReduceScatter(in.data(), &one, 1, ncclInt32, ncclSum, comm, nullptr));
    RANK_CHECK(one == 30 * rank + 3);
    RANK_OK(nccl.ncclAllGather(&rank, out.data(), 1, ncclInt32, comm, nullptr));
    RANK_CHECK((out == std::vector<int>{0, 1, 2}));
    RANK_OK(nccl.ncclAlltoAll(in.data(), out.data(), 1, ncclInt32, comm, nullptr));
    RANK_CHECK((out == std::vector<int>{10 * rank, 10 * rank + 1, 10 * rank + 2}));
    RANK_OK(nccl.ncclGather(&in[1], out.data(), 1, ncclInt32, 1, comm, nullptr));
    RANK_CHECK(rank != 1 || (out == std::vector<int>{10, 11, 12}));
    RANK_OK(nccl.ncclScatter(in.data(), &one, 1, ncclInt32, 2, comm, nullptr));
    RANK_CHECK(one == 10 * rank + 2);
    RANK_OK(nccl.ncclBcast(in.data(), 3, ncclInt32, 1, comm, nullptr));
    RANK_CHECK((in == std::vector<int>{1, 11, 21}));
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandin, NonBlockingInitSplitAndShrink) {
  runRanks(3, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t world = nullptr;
    if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    RANK_CHECK(nccl.ncclCommInitRankConfig(&world, 3, id, rank, &config) == ncclInProgress);
    RANK_CHECK(world);
    ncclResult_t state = ncclSuccess;
    RANK_OK(nccl.ncclCommGetAsyncError(world, &state));
    RANK_CHECK(rank == 2 || state == ncclInProgress);  // rank 2 is late
    RANK_OK(settle(nccl, world));
    // Ranks 0 and 2 together, in reverse order; rank 1 in none.
    ncclComm_t pair = world;
    RANK_CHECK(nccl.ncclCommSplit(world, rank == 1 ? NCCL_SPLIT_NOCOLOR : 4, -rank, &pair,
                                  nullptr) == ncclInProgress);
    RANK_OK(settle(nccl, world));
    if (rank == 1) {
      RANK_CHECK(!pair);
    } else {
      RANK_OK(settle(nccl, pair));
      int mine = -1, count = 0, sum = 0;
      RANK_OK(nccl.ncclCommUserRank(pair, &mine));
      RANK_OK(nccl.ncclCommCount(pair, &count));
      RANK_CHECK(count == 2 && mine == (rank == 2 ? 0 : 1));
      RANK_OK(nccl.ncclAllReduce(&rank, &sum, 1, ncclInt32, ncclSum, pair, nullptr));
      RANK_CHECK(sum == 2);
      RANK_CHECK(nccl.ncclCommFinalize(pair) == ncclInProgress);
      RANK_OK(settle(nccl, pair));
      RANK_OK(nccl.ncclCommDestroy(pair));
    }
    if (rank != 0) {
      int left = 0, mine = -1;
      ncclComm_t rest = nullptr;
      RANK_CHECK(nccl.ncclCommShrink(world, &left, 1, &rest, nullptr, 0) == ncclInProgress);
      RANK_OK(settle(nccl, world));
      RANK_OK(settle(nccl, rest));
      RANK_OK(nccl.ncclCommUserRank(rest, &mine));
      RANK_CHECK(mine == rank - 1);
      RANK_OK(nccl.ncclCommDestroy(rest));
    }
    RANK_OK(nccl.ncclCommDestroy(world));
  });
}

TEST(NcclStandin, OneProcessInitAllAndGroups) {
  runRanks(1, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comms[3];
    const int devices[] = {5, 6, 7};
    RANK_OK(nccl.ncclCommInitAll(comms, 3, devices));
    int device = 0;
    RANK_OK(nccl.ncclCommCuDevice(comms[1], &device));
    RANK_CHECK(device == 6);
    float values[] = {1, 2, 4};
    RANK_OK(nccl.ncclGroupStart());
    RANK_OK(nccl.ncclGroupStart());
    for (int i = 0; i < 3; ++i) {
      RANK_OK(
          nccl.ncclAllReduce(&values[i], &values[i], 1, ncclFloat32, ncclSum, comms[i], nullptr));
    }
    RANK_OK(nccl.ncclGroupEnd());
    RANK_CHECK(values[0] == 1);  // the outermost end runs it
    RANK_OK(nccl.ncclGroupEnd());
    for (const float value : values) RANK_CHECK(value == 7);
    for (ncclComm_t comm : comms) RANK_OK(nccl.ncclCommDestroy(comm));
    // Several ranks of one thread by a group, and one of them to itself.
    RANK_OK(nccl.ncclGroupStart());
    for (int i = 0; i < 2; ++i) RANK_OK(nccl.ncclCommInitRank(&comms[i], 2, id, i));
    RANK_OK(nccl.ncclGroupEnd());
    int from = 42, to = 0;
    RANK_OK(nccl.ncclGroupStart());
    RANK_OK(nccl.ncclSend(&from, 1, ncclInt32, 1, comms[1], nullptr));
    RANK_OK(nccl.ncclRecv(&to, 1, ncclInt32, 1, comms[1], nullptr));
    RANK_OK(nccl.ncclGroupEnd());
    RANK_CHECK(to == 42);
    for (int i = 0; i < 2; ++i) RANK_OK(nccl.ncclCommDestroy(comms[i]));
  });
}

TEST(NcclStandin, LogSaysWhatWasCalledInMemoryAndInTheFile) {
  const std::string path = ::testing::TempDir() + "nccl_standin_log." + std::to_string(getpid());
  setenv("NCCLSTANDIN_LOG", (path + ".%p").c_str(), 1);
  runRanks(2, [&](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 2, id, rank));
    double value = 1;
    RANK_OK(nccl.ncclGroupStart());
    if (rank == 0) RANK_OK(nccl.ncclSend(&value, 1, ncclFloat64, 1, comm, nullptr));
    if (rank == 1) RANK_OK(nccl.ncclRecv(&value, 1, ncclFloat64, 0, comm, nullptr));
    RANK_OK(nccl.ncclGroupEnd());
    RANK_OK(nccl.ncclBcast(&value, 1, ncclFloat64, 0, comm, nullptr));
    const std::string expected = std::string(rank == 0 ? "ncclGetUniqueId comm=-1 rank=-1 peer=-1 "
                                                         "bytes=0 dtype=-1 stream=0x0 depth=0\n"
                                                       : "");
    const std::string me = "comm=1 rank=" + std::to_string(rank);
    const std::string all =
        expected + "ncclCommInitRank " + me + " peer=-1 bytes=0 dtype=-1 stream=0x0 depth=0\n" +
        "ncclGroupStart comm=-1 rank=-1 peer=-1 bytes=0 dtype=-1 stream=0x0 depth=0\n" +
        (rank == 0 ? "ncclSend " : "ncclRecv ") + me + " peer=" + std::to_string(1 - rank) +
        " bytes=8 dtype=8 stream=0x0 depth=1\n" +
        "ncclGroupEnd comm=-1 rank=-1 peer=-1 bytes=0 dtype=-1 stream=0x0 depth=1\n" +
        "ncclBcast " + me + " peer=0 bytes=8 dtype=8 stream=0x0 depth=0\n" + "ncclBroadcast " + me +
        " peer=0 bytes=8 dtype=8 stream=0x0 depth=0\n";
    if (nccl.lines() != all) std::fprintf(stderr, "%s", nccl.lines().c_str());
    RANK_CHECK(nccl.lines() == all);
    const std::string mine = path + "." + std::to_string(getpid());
    std::ifstream file(mine);
    RANK_CHECK(std::string(std::istreambuf_iterator<char>(file), {}) == all);
    unlink(mine.c_str());
    char cut[5];
    RANK_CHECK(nccl.log(cut, sizeof cut) == all.size() && std::string(cut) == all.substr(0, 4));
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
  unsetenv("NCCLSTANDIN_LOG");
}

TEST(NcclStandin, MismatchDeathAndAbortEndInBoundedTime) {
  setenv("NCCLSTANDIN_TIMEOUT_MS", "1500", 1);
  runRanks(2, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 2, id, rank));
    char data[64] = {};
    if (rank == 0) {
      RANK_OK(nccl.ncclSend(data, 64, ncclChar, 1, comm, nullptr));
    } else {
      RANK_CHECK(nccl.ncclRecv(data, 32, ncclChar, 0, comm, nullptr) == ncclInvalidUsage);
      RANK_CHECK(std::strstr(nccl.ncclGetLastError(comm), "rank 0 sends 64 bytes"));
    }
    RANK_OK(nccl.ncclCommAbort(comm));
  });
  runRanks(2, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 2, id, rank));
    if (rank == 1) _exit(0);
    char data[64];
    RANK_CHECK(nccl.ncclRecv(data, 64, ncclChar, 1, comm, nullptr) == ncclRemoteError);
    ncclResult_t state = ncclSuccess;
    RANK_OK(nccl.ncclCommGetAsyncError(comm, &state));
    RANK_CHECK(state == ncclRemoteError);
    RANK_OK(nccl.ncclCommAbort(comm));
  });
  runRanks(2, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 2, id, rank));
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
      _exit(0);
    }
    // Aborted by another thread while the receive waits for rank 1.
    std::thread aborter([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      RANK_OK(nccl.ncclCommAbort(comm));
    });
    char data[64];
    const auto begin = std::chrono::steady_clock::now();
    RANK_CHECK(nccl.ncclRecv(data, 64, ncclChar, 1, comm, nullptr) == ncclInternalError);
    RANK_CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(400));
    aborter.join();
  });
  runRanks(1, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;  // the other rank never comes
    RANK_CHECK(nccl.ncclCommInitRank(&comm, 2, id, rank) == ncclRemoteError);
    RANK_CHECK(!comm);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    RANK_OK(nccl.ncclGetUniqueId(&id));
    RANK_CHECK(nccl.ncclCommInitRankConfig(&comm, 2, id, rank, &config) == ncclInProgress);
    const auto begin = std::chrono::steady_clock::now();
    RANK_OK(nccl.ncclCommAbort(comm));
    RANK_CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(1000));
  });
  unsetenv("NCCLSTANDIN_TIMEOUT_MS");
}

TEST(NcclStandin, SilentStrangersHoldUpNobody) {
  runRanks(1, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    sockaddr_in address;
    std::memcpy(&address, id.internal + 8, sizeof address);
    for (int i = 0; i < 4; ++i) {  // one of them says half a greeting
      const int fd = socket(AF_INET, SOCK_STREAM, 0);
      RANK_CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
      RANK_CHECK(i != 0 || send(fd, "1234567", 7, MSG_NOSIGNAL) == 7);
    }
    ncclComm_t comms[2];
    const auto begin = std::chrono::steady_clock::now();
    RANK_OK(nccl.ncclGroupStart());
    for (int i = 0; i < 2; ++i) RANK_OK(nccl.ncclCommInitRank(&comms[i], 2, id, i));
    RANK_OK(nccl.ncclGroupEnd());
    RANK_CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(1500));
    for (ncclComm_t comm : comms) RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandin, WrongArgumentsAreRefusedAndSpoilOnlyTheirGroup) {
  runRanks(2, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_CHECK(nccl.ncclCommInitRank(&comm, 2, id, 2) == ncclInvalidArgument);
    RANK_OK(nccl.ncclCommInitRank(&comm, 2, id, rank));
    int value = rank, sum = 0;
    RANK_CHECK(nccl.ncclSend(&value, 1, ncclInt32, -1, comm, nullptr) == ncclInvalidArgument);
    RANK_CHECK(nccl.ncclSend(&value, 1, ncclNumTypes, 1, comm, nullptr) == ncclInvalidArgument);
    RANK_OK(nccl.ncclGroupStart());
    RANK_CHECK(nccl.ncclRecv(&value, 1, ncclInt32, 2, comm, nullptr) == ncclInvalidArgument);
    RANK_OK(nccl.ncclSend(&value, 1, ncclInt32, 1 - rank, comm, nullptr));
    RANK_CHECK(nccl.ncclGroupEnd() == ncclInvalidArgument);
    RANK_OK(nccl.ncclAllReduce(&value, &sum, 1, ncclInt32, ncclSum, comm, nullptr));
    RANK_CHECK(sum == 1);
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandin, DeviceMemoryOfTheEmulatedDriver) {
  setenv("EMUCUDA_DEVICES", "2", 1);
  runRanks(2, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    // Loaded under its soname before the stand-in first asks for the driver.
    void* driver = dlopen(HOCCL_TEST_BUILD_DIR "/test/emulator/libcuda.so.1", RTLD_NOW);
    RANK_CHECK(driver);
#define TEXT_OF(name) #name
#define SYMBOL(name) TEXT_OF(name)
#define CU(name) reinterpret_cast<decltype(&(name))>(dlsym(driver, SYMBOL(name)))
    CUcontext context = nullptr;
    CUstream stream = nullptr;
    CUdeviceptr out = 0, in = 0;
    constexpr std::size_t kBytes = 300001;
    RANK_CHECK(CU(cuInit)(0) == CUDA_SUCCESS);
    RANK_CHECK(CU(cuDevicePrimaryCtxRetain)(&context, rank) == CUDA_SUCCESS);
    RANK_CHECK(CU(cuCtxSetCurrent)(context) == CUDA_SUCCESS);
    RANK_CHECK(CU(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
    RANK_CHECK(CU(cuMemAlloc)(&out, kBytes + 4) == CUDA_SUCCESS);
    RANK_CHECK(CU(cuMemAlloc)(&in, kBytes + 4) == CUDA_SUCCESS);
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 2, id, rank));
    int device = -1;
    RANK_OK(nccl.ncclCommCuDevice(comm, &device));
    RANK_CHECK(device == rank);

    // On the stream, not waited for: the stand-in must. One byte off the allocation's start.
    const auto sent = pattern(rank, 1 - rank, kBytes), expected = pattern(1 - rank, rank, kBytes);
    std::vector<unsigned char> got(kBytes + 4, 0xee);
    RANK_CHECK(CU(cuMemcpyHtoDAsync)(in, got.data(), got.size(), stream) == CUDA_SUCCESS);
    RANK_CHECK(CU(cuMemcpyHtoDAsync)(out + 1, sent.data(), kBytes, stream) == CUDA_SUCCESS);
    RANK_OK(nccl.ncclGroupStart());
    RANK_OK(nccl.ncclSend(reinterpret_cast<void*>(out + 1), kBytes, ncclUint8, 1 - rank, comm,
                          reinterpret_cast<cudaStream_t>(stream)));
    RANK_OK(nccl.ncclRecv(reinterpret_cast<void*>(in + 1), kBytes, ncclUint8, 1 - rank, comm,
                          reinterpret_cast<cudaStream_t>(stream)));
    RANK_OK(nccl.ncclGroupEnd());
    RANK_CHECK(CU(cuMemcpyDtoH)(got.data(), in, got.size()) == CUDA_SUCCESS);
    RANK_CHECK(std::memcmp(got.data() + 1, expected.data(), kBytes) == 0);
    RANK_CHECK(got[0] == 0xee && got[kBytes + 1] == 0xee);

    const float one = static_cast<float>(rank + 1);
    float sum = 0;
    RANK_CHECK(CU(cuMemcpyHtoD)(out, &one, sizeof one) == CUDA_SUCCESS);
    RANK_OK(nccl.ncclAllReduce(reinterpret_cast<void*>(out), reinterpret_cast<void*>(out), 1,
                               ncclFloat32, ncclSum, comm, nullptr));
    RANK_CHECK(CU(cuMemcpyDtoH)(&sum, out, sizeof sum) == CUDA_SUCCESS);
    RANK_CHECK(sum == 3);
    void* memory = nullptr;
    RANK_OK(nccl.ncclMemAlloc(&memory, 4096));
    RANK_CHECK(CU(cuMemcpyHtoD)(reinterpret_cast<CUdeviceptr>(memory), &one, 4) == CUDA_SUCCESS);
    RANK_OK(nccl.ncclMemFree(memory));
    RANK_OK(nccl.ncclCommDestroy(comm));
#undef CU
#undef SYMBOL
#undef TEXT_OF
  });
  unsetenv("EMUCUDA_DEVICES");
}

TEST(NcclStandin, ReentersThroughThePlt) {
  // Its own calls of these go by name, so that a preloaded definition catches them.
  const std::string library = HOCCL_TEST_BUILD_DIR "/test/nccl-standin/libnccl.so.2";
  const std::string command = "readelf -rW '" + library + "' 2>/dev/null";
  FILE* pipe = popen(command.c_str(), "r");
  ASSERT_TRUE(pipe);
  std::string relocations;
  char buffer[4096];
  while (const std::size_t n = fread(buffer, 1, sizeof buffer, pipe)) relocations.append(buffer, n);
  pclose(pipe);
  if (relocations.empty()) GTEST_SKIP() << "no readelf here";
  for (const char* name : {"ncclBroadcast", "ncclGetUniqueId", "ncclCommGetAsyncError"}) {
    EXPECT_NE(relocations.find(name), std::string::npos) << name << " cannot be interposed";
  }
}

}  // namespace
}  // namespace hoccl
