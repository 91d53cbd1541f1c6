// The stand-in NCCL by itself: ranks are processes, forked before anything is loaded; without a
// CUDA context every pointer is host memory.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "test/nccl-standin/testing.h"

namespace hoccl {
namespace {

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
  for (const char* name :
       {"ncclBroadcast", "ncclGetUniqueId", "ncclCommGetAsyncError", "ncclCommRegister",
        "ncclCommDeregister", "ncclCommWindowDeregister", "ncclMemAlloc", "ncclMemFree"}) {
    EXPECT_NE(relocations.find(name), std::string::npos) << name << " cannot be interposed";
  }
}

}  // namespace
}  // namespace hoccl
