#pragma once

// What the tests of the stand-in share: the library by dlopen, and ranks as processes.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <nccl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "test/nccl-standin/newer_nccl.h"

namespace hoccl {

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
  X(ncclCommInitRankScalable);
  X(ncclCommInitAll);
  X(ncclCommSplit);
  X(ncclCommShrink);
  X(ncclCommRevoke);
  X(ncclCommGetUniqueId);
  X(ncclCommGrow);
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
  X(ncclGroupSimulateEnd);
  X(ncclRedOpCreatePreMulSum);
  X(ncclRedOpDestroy);
  X(ncclSend);
  X(ncclRecv);
  X(ncclAllReduce);
  X(ncclReduce);
  X(ncclReduceScatter);
  X(ncclAllGather);
  X(ncclAlltoAll);
  X(ncclGather);
  X(ncclScatter);
  X(ncclAllReduceConfig);
  X(ncclReduceConfig);
  X(ncclReduceScatterConfig);
  X(ncclBroadcastConfig);
  X(ncclAllGatherConfig);
  X(ncclAlltoAllConfig);
  X(ncclGatherConfig);
  X(ncclScatterConfig);
  X(ncclBroadcast);
  X(ncclBcast);
  X(ncclCommRegister);
  X(ncclCommDeregister);
  X(ncclCommWindowRegister);
  X(ncclCommWindowDeregister);
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
inline void runRanks(int nranks, const Body& body) {
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

inline ncclResult_t settle(const Nccl& nccl, ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (nccl.ncclCommGetAsyncError(comm, &state) == ncclSuccess && state == ncclInProgress) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return state;
}

inline std::vector<unsigned char> pattern(int from, int to, std::size_t bytes) {
  std::vector<unsigned char> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) {
    data[i] = static_cast<unsigned char>(i * 7 + from * 31 + to * 3 + (i >> 11));
  }
  return data;
}

}  // namespace hoccl
