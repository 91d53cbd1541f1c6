// Every way to make and to end communicators.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

/// All communicators of the rank were steered, and what is over HOCCL_MIN_BYTES has not reached
/// NCCL.
void expectSteered(const Job& job, int rank, std::size_t communicators) {
  const nlohmann::json comms = job.communicators(rank);
  EXPECT_EQ(comms.size(), communicators) << comms;
  for (const auto& comm : comms) {
    EXPECT_TRUE(comm["steered"]) << comm;
    EXPECT_EQ(comm["paths"]["nccl"]["ops"], 0) << comm;
  }
  for (const char* function : {"ncclSend", "ncclRecv", "ncclAllGather"}) {
    EXPECT_EQ(job.callCount(rank, function), 0) << function;
  }
}

class InitAll : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(OfDevices, InitAll, ::testing::Values(1, 2));

/// One process is one node: copies go directly between its GPUs. With one GPU it is plain NCCL, with
/// the reason.
void expectOneNode(const Job& job, int devices, std::size_t communicators) {
  const nlohmann::json comms = job.communicators(0);
  EXPECT_EQ(comms.size(), communicators);
  for (const auto& comm : comms) {
    if (devices > 1) {
      EXPECT_TRUE(comm["steered"]) << comm;
      EXPECT_GT(comm["paths"]["direct"]["ops"], 0) << comm;
      EXPECT_EQ(comm["paths"]["staged"]["ops"], 0) << comm;
      continue;
    }
    EXPECT_FALSE(comm["steered"]) << comm;
    EXPECT_NE(comm["why"].get<std::string>().find("all ranks are on one node"),
              std::string::npos)
        << comm;
  }
}

TEST_P(InitAll, FromOneThread) {
  Job job("initAll", 1);
  job.argument("devices", std::to_string(GetParam())).env("EMUCUDA_DEVICES", "2").finish();
  expectOneNode(job, GetParam(), static_cast<std::size_t>(GetParam()));
}

TEST_P(InitAll, FromSeveralThreadsAtOnce) {
  Job job("initAll", 1);
  job.argument("devices", std::to_string(GetParam())).argument("threads", "3");
  job.env("EMUCUDA_DEVICES", "2").finish();
  expectOneNode(job, GetParam(), static_cast<std::size_t>(12 * GetParam()));
}

TEST(InitRankScalable, WithOneIdAndWithOneOfEachRank) {
  for (const char* ids : {"1", "3"}) {
    SCOPED_TRACE(ids);
    Job job("scalable", 3);
    job.argument("ids", ids).finish();
    for (int rank : {0, 1, 2}) expectSteered(job, rank, 3);
  }
}

TEST(Families, SplitsOfSplitsOutliveTheirParents) {
  Job job("splitsOfSplits", 3);
  job.finish();
  for (int rank : {0, 1, 2}) expectSteered(job, rank, 7);
}

TEST(Families, SeveralMadeInOneGroupInFourWays) {
  Job job("severalInAGroup", 2);
  job.finish();
  for (int rank : {0, 1}) expectSteered(job, rank, 6);
}

TEST(Families, NonBlockingOnesUsedBeforeAndAfterTheyAreReady) {
  Job job("usedBeforeReady", 2);
  job.finish();
  for (int rank : {0, 1}) expectSteered(job, rank, 6);
}

TEST(Families, FortyAliveWithTrafficOnAll) {
  Job job("manyAlive", 2);
  job.finish(60);
  for (int rank : {0, 1}) expectSteered(job, rank, 40);
}

/// As many waits parked as there are connections, and the peer calls them in another order: rule 7.
TEST(Families, FortyAliveOnAsManyStreamsAsConnections) {
  Job job("manyAlive", 2);
  job.argument("streams", "8").env("CUDA_DEVICE_MAX_CONNECTIONS", "8").finish(40);
  for (int rank : {0, 1}) expectSteered(job, rank, 40);
}

TEST(Shrink, EveryRankInItsTurn) {
  Job job("shrink", 3);
  job.finish();
  // The world and three splits of it; of the two other ranks' turns two shrunk ones and a split
  // each.
  for (int rank : {0, 1, 2}) expectSteered(job, rank, 4 + 2 * 3);
}

TEST(Shrink, AbortEndsWhatIsPendingOnTheParent) {
  for (const char* gone : {"2", "0"}) {
    SCOPED_TRACE(gone);
    Job job("shrinkAbort", 3);
    job.argument("gone", gone).finish();
    for (int rank = 0; rank < 3; ++rank) {
      if (std::to_string(rank) == gone) continue;
      expectSteered(job, rank, 3);
      EXPECT_NE(job.said(rank, "error").find("shrunk"), std::string::npos)
          << job.said(rank, "error");
    }
  }
}

TEST(Shrink, WithoutRankZeroWhoseProcessHasEnded) {
  Job job("shrinkAbort", 3);
  job.argument("gone", "0").argument("dead", "1").finish();
  for (int rank : {1, 2}) expectSteered(job, rank, 3);
}

TEST(Grow, ByAllOtherRanksTwiceOutOfOneParent) {
  Job job("grow", 4);
  job.finish(60);
  // Two grown ones with a split each, the world, and of two ranks the pair.
  for (int rank = 0; rank < 4; ++rank) expectSteered(job, rank, rank < 2 ? 6 : 5);
}

TEST(Revoke, EndsWhatIsPendingAndLeavesOthersAlone) {
  Job job("revoke", 3);
  job.finish();
  for (int rank : {0, 1, 2}) {
    EXPECT_NE(job.said(rank, "error").find("revoked"), std::string::npos)
        << job.said(rank, "error");
    const nlohmann::json comms = job.communicators(rank);
    EXPECT_EQ(comms.size(), rank == 0 ? 2u : 3u);
    for (const auto& comm : comms) EXPECT_TRUE(comm["steered"]) << comm;
  }
}

/// A port of this host that nobody listens at; nobody else asks for it again soon.
int freePort() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

TEST(Families, NcclCommIdIsPlainNcclAndSaysSo) {
  Job job("commonId", 2);
  job.env("NCCL_COMM_ID", "127.0.0.1:" + std::to_string(freePort())).finish();
  for (int rank : {0, 1}) {
    const nlohmann::json comms = job.communicators(rank);
    EXPECT_GE(comms.size(), 2u);
    for (const auto& comm : comms) {
      EXPECT_FALSE(comm["steered"]) << comm;
      EXPECT_NE(comm["why"].get<std::string>().find("NCCL_COMM_ID"), std::string::npos) << comm;
    }
    EXPECT_EQ(job.callCount(rank, "ncclAllGather"), 4);
  }
}

/// What a process holds.
struct Holdings {
  explicit Holdings(pid_t pid) {
    const std::string proc = "/proc/" + std::to_string(pid);
    std::ifstream status(proc + "/status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("Threads:", 0) == 0) threads = std::stoi(line.substr(8));
      if (line.rfind("RssAnon:", 0) == 0) residentKib = std::stol(line.substr(8));
    }
    std::ifstream maps(proc + "/maps");
    for (std::string line; std::getline(maps, line);) ++mappings;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(proc + "/fd", ignored)) {
      (void)entry;
      ++descriptors;
    }
  }
  int threads = 0, descriptors = 0, mappings = 0;
  long residentKib = 0;
};

TEST(Families, AThousandMadeAndEndedLeaveNothingBehind) {
  // Early: once HOCCL keeps as many ended communicators for its statistics as it ever will.
  Job job("createDestroy", 2);
  job.argument("rounds", "1000").argument("early", "400").start();
  std::map<std::string, std::vector<Holdings>> seen;
  for (const char* when : {"early", "late"}) {
    ASSERT_TRUE(job.awaitAll(when, 60)) << job.transcript();
    for (int rank : {0, 1}) {
      for (const pid_t pid : {job.pid(rank), job.moverOf(rank)}) {
        ASSERT_GT(pid, 0);
        seen[when].emplace_back(pid);
      }
    }
    job.post(std::string(when) + "-seen");
  }
  job.finish();
  for (std::size_t i = 0; i < seen["early"].size(); ++i) {
    SCOPED_TRACE((i % 2 ? "the mover of rank " : "the application, rank ") + std::to_string(i / 2));
    const Holdings &early = seen["early"][i], &late = seen["late"][i];
    std::printf("threads %d %d, descriptors %d %d, mappings %d %d, RssAnon %ld %ld KiB\n",
                early.threads, late.threads, early.descriptors, late.descriptors, early.mappings,
                late.mappings, early.residentKib, late.residentKib);
    EXPECT_LE(late.threads, early.threads);
    EXPECT_LE(late.descriptors, early.descriptors + 4);
    EXPECT_LE(late.mappings, early.mappings + 40);
#if !HOCCL_SANITIZED  // which keeps freed memory for a while
    // The process of the root keeps its verdicts for latecomers, up to a bound.
    EXPECT_LE(late.residentKib, early.residentKib + (i == 0 ? 1024 : 256));
#endif
  }
}

class AbortStorm : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, AbortStorm, ::testing::Values(1, 2));

TEST_P(AbortStorm, AtRandomMomentsFromAnotherThreadEndsInTime) {
  Job job("abortStorm", 2);
  job.argument("seed", std::to_string(GetParam()))
      .argument("rounds", GetParam() == 1 ? "200" : "60");
  if (GetParam() != 1) job.env("EMUCUDA_DELAY_US", "300").env("EMUCUDA_SEED", "5");
  job.finish(60);
  for (int rank : {0, 1}) {
    ASSERT_FALSE(job.said(rank, "slowestAbortMs").empty());
    EXPECT_LT(std::stoi(job.said(rank, "slowestAbortMs")), 5000);
  }
}

}  // namespace
}  // namespace e2e
