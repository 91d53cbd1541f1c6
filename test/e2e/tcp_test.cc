// Movers that reach each other over TCP: forced to on one host, and by themselves between network
// namespaces, which are hosts to each other.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

std::uint64_t stagedOps(const Job& job, int rank) {
  std::uint64_t sum = 0;
  for (const auto& comm : job.communicators(rank)) {
    EXPECT_EQ(comm["paths"]["nccl"]["ops"].get<std::uint64_t>(), 0u) << comm;
    sum += comm["paths"]["staged"]["ops"].get<std::uint64_t>();
  }
  return sum;
}

/// A scenario's ranks with tcp for all movers.
struct TcpJob : Job {
  TcpJob(const std::string& scenario, int ranks) : Job(scenario, ranks) {
    env("HOCCL_TRANSPORT", "tcp").env("HOCCL_SOCKET_IFNAME", "=lo");
  }
};

TEST(Tcp, TransfersOfOddSizesAndBothWays) {
  TcpJob sizes("sizes", 2);
  sizes.finish();
  for (int rank : {0, 1}) EXPECT_EQ(stagedOps(sizes, rank), 17u);
  TcpJob both("bothWays", 2);
  both.finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(stagedOps(both, rank), 48u);
    EXPECT_EQ(both.said(rank, "smOps"), "0");
  }
}

TEST(Tcp, OverIPv6) {
  TcpJob job("bothWays", 2);
  job.env("NCCL_SOCKET_FAMILY", "AF_INET6").finish();
  for (int rank : {0, 1}) EXPECT_EQ(stagedOps(job, rank), 48u);
}

TEST(Tcp, FewAndSmallSlotsManySocketsAndDelays) {
  TcpJob small("bothWays", 2);
  small.env("HOCCL_SLOT_BYTES", "128KiB").env("HOCCL_SLOTS", "1").finish();
  TcpJob many("bothWays", 2);
  many.env("HOCCL_SOCKET_NTHREADS", "3").env("HOCCL_NSOCKS_PERTHREAD", "4");
  many.env("EMUCUDA_DELAY_US", "300").finish();
}

TEST(Tcp, CollectivesOfThree) {
  TcpJob job("collectives", 3);
  job.finish(60);
  for (int rank : {0, 1, 2}) {
    EXPECT_EQ(job.said(rank, "smOps"), "0");
    EXPECT_NE(job.said(rank, "steered"), "0");
  }
}

TEST(Tcp, TwoHundredInFlightFromBothSides) {
  TcpJob job("manyInFlight", 2);
  job.finish(60);
  for (int rank : {0, 1}) EXPECT_EQ(stagedOps(job, rank), 400u);
}

TEST(Tcp, AFlowThatWaitsHoldsUpNoOther) {
  TcpJob job("independent", 2);
  job.finish();
}

TEST(Tcp, Rule9ASenderThatLeavesEarlyHasDelivered) {
  TcpJob job("senderLeaves", 2);
  job.start();
  EXPECT_TRUE(job.awaitEnd(0, 20)) << "the sender waits for a receive it need not wait for";
  ::usleep(300'000);  // its mover goes, too
  job.post("sender gone");
  job.finish();
}

TEST(Tcp, Rule9ThePeersMoverIsKilled) {
  for (int victim : {0, 1}) {
    TcpJob job("moverDies", 2);
    job.start();
    ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
    ASSERT_EQ(::kill(job.moverOf(victim), SIGKILL), 0);
    job.post("killed");
    job.finish();
    const std::string error = job.said(1 - victim, "error");
    EXPECT_NE(error.find("rank " + std::to_string(victim)), std::string::npos) << error;
  }
}

TEST(Tcp, Rule11AnIdleMoverUsesNoCpu) {
  TcpJob job("idle", 2);
  job.argument("pending", "0").start();
  ASSERT_TRUE(job.awaitAll("idle")) << job.transcript();
  const pid_t mover = job.moverOf(1);
  ::usleep(200'000);
  const long before = Job::cpuMs(mover);
  ::usleep(1'000'000);
  EXPECT_LE(Job::cpuMs(mover) - before, 20) << "ms of CPU in a second";
  job.post("measured");
  job.finish();
}

TEST(Tcp, Rule10AnInterfaceThatIsNotThereMeansPlainNcclAndOneLine) {
  Job job("plain", 2);
  job.env("HOCCL_TRANSPORT", "tcp").env(1, "HOCCL_SOCKET_IFNAME", "=there-is-none").finish();
  std::string errors = job.errors(0) + job.errors(1);
  EXPECT_NE(errors.find("HOCCL_SOCKET_IFNAME='=there-is-none'"), std::string::npos) << errors;
  EXPECT_NE(errors.find("lo"), std::string::npos) << errors;
  for (int rank : {0, 1}) {
    for (const auto& comm : job.communicators(rank)) EXPECT_FALSE(comm["steered"]) << comm;
  }
}

TEST(Tcp, ShmStaysWithWhatItReaches) {
  Job job("bothWays", 2);
  job.env("HOCCL_SOCKET_IFNAME", "=there-is-none").finish();
  for (int rank : {0, 1}) EXPECT_EQ(stagedOps(job, rank), 48u);
}

/// Two network namespaces with a wire between them.
class Hosts : public ::testing::Test {
 protected:
  void SetUp() override {
    for (int i : {0, 1}) name_[i] = fmt::format("hoccl-{}-{}", ::getpid(), i);
    if (run("ip netns add " + name_[0]) != 0) {
      GTEST_SKIP() << "this user may not make network namespaces (root, with iproute2, may)";
    }
    made_ = true;
    ASSERT_EQ(run("ip netns add " + name_[1]), 0);
    if (run(fmt::format("ip -n {} link add wire type veth peer name wire netns {}", name_[0],
                        name_[1])) != 0) {
      GTEST_SKIP()
          << "here no wire can join two network namespaces (it takes the kernel's veth, and "
             "a root that is a mount)";
    }
    for (int i : {0, 1}) {
      ASSERT_EQ(run(fmt::format("ip -n {} address add 10.77.0.{}/24 dev wire", name_[i], i + 1)),
                0);
      ASSERT_EQ(wire(i, true), 0);
      // What a host says to itself.
      ASSERT_EQ(run(fmt::format("ip -n {} link set lo up", name_[i])), 0);
    }
    // The kernel tells of a new wire's carrier within a second.
    for (int i : {0, 1}) {
      int tries = 0;
      const std::string up =
          fmt::format("ip -n {} -o link show wire | grep -q 'state UP'", name_[i]);
      while (run(up) != 0 && ++tries < 100) ::usleep(50'000);
      ASSERT_LT(tries, 100);
    }
  }
  void TearDown() override {
    if (!made_) return;
    for (const std::string& name : name_) run("ip netns delete " + name);
  }
  int wire(int host, bool up) {
    return run(fmt::format("ip -n {} link set wire {}", name_[host], up ? "up" : "down"));
  }
  void settle(Job& job) {
    for (int i : {0, 1}) {
      job.network(i, name_[i]).env(i, "NCCLSTANDIN_ADDRESS", fmt::format("10.77.0.{}", i + 1));
    }
  }

 private:
  static int run(const std::string& command) {
    return std::system(("{ " + command + "; } >/dev/null 2>&1").c_str());
  }
  std::string name_[2];
  bool made_ = false;
};

TEST_F(Hosts, TransfersByThemselvesOverTcp) {
  Job job("bothWays", 2);
  settle(job);
  job.finish();
  for (int rank : {0, 1}) {
    EXPECT_EQ(stagedOps(job, rank), 48u);
    EXPECT_EQ(job.said(rank, "smOps"), "0");
  }
}

TEST_F(Hosts, Collectives) {
  Job job("collectives", 2);
  settle(job);
  job.finish(60);
  for (int rank : {0, 1}) EXPECT_NE(job.said(rank, "steered"), "0");
}

TEST_F(Hosts, ShmAloneLeavesThemToNccl) {
  Job job("plain", 2);
  settle(job);
  job.env("HOCCL_TRANSPORT", "shm").finish();
  for (int rank : {0, 1}) {
    for (const auto& comm : job.communicators(rank)) EXPECT_FALSE(comm["steered"]) << comm;
  }
}

TEST_F(Hosts, Rule9AHostThatIsCutOffIsReportedInTime) {
  Job job("moverDies", 2);
  settle(job);
  job.argument("cut", "1").start();
  ASSERT_TRUE(job.awaitAll("pending")) << job.transcript();
  ASSERT_EQ(wire(0, false), 0);
  job.post("killed");
  const bool seen = job.awaitAll("at-seen", 12);
  ASSERT_EQ(wire(0, true), 0);
  EXPECT_TRUE(seen) << job.transcript();
  ::usleep(1'500'000);  // until the kernel tells of the carrier
  job.post("mended");
  job.finish();
  for (int rank : {0, 1}) {
    const std::string error = job.said(rank, "error");
    EXPECT_NE(error.find(fmt::format("rank {}", 1 - rank)), std::string::npos) << error;
    EXPECT_NE(error.find("the host has not answered"), std::string::npos) << error;
    EXPECT_NE(error.find(fmt::format("10.77.0.{}", 2 - rank)), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace e2e
