#include "common/base/host_identity.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <set>
#include <string>

#include "common/base/random.h"
#include "common/base/time.h"

namespace hoccl {
namespace {

// What `work` returns in a child of its own.
template <typename Work>
std::string inChild(Work work) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string text = work();
    ::_exit(::write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0
                                                                                            : 1);
  }
  ::close(ends[1]);
  char buffer[512];
  const ssize_t got = ::read(ends[0], buffer, sizeof buffer);
  ::close(ends[0]);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  return std::string(buffer, got > 0 ? static_cast<std::size_t>(got) : 0);
}

TEST(HostIdentityTest, KeysAreTheSameInTwoProcesses) {
  ::unsetenv("NCCL_HOSTID");
  EXPECT_EQ(bootId().size(), 36u) << bootId();
  EXPECT_NE(hostKey().find(bootId()), std::string::npos);
  EXPECT_EQ(inChild([] { return hostKey(); }), hostKey());
  EXPECT_EQ(inChild([] { return nodeKey(); }), nodeKey());
  EXPECT_NE(nodeKey().find(bootId()), std::string::npos);
}

TEST(HostIdentityTest, AnotherNetworkNamespaceIsAnotherHost) {
  const std::string inside = inChild([] {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0 && ::unshare(CLONE_NEWNET) != 0) {
      return std::string("refused");
    }
    return hostKey();
  });
  if (inside == "refused") GTEST_SKIP() << "no network namespaces here";
  EXPECT_FALSE(inside.empty());
  EXPECT_NE(inside, hostKey());
}

TEST(HostIdentityTest, NcclHostIdMakesTheNode) {
  ::unsetenv("NCCL_HOSTID");
  const std::string plain = nodeKey();
  const std::string host = hostKey();
  ::setenv("NCCL_HOSTID", "node-a", 1);
  const std::string a = nodeKey();
  ::setenv("NCCL_HOSTID", "node-b", 1);
  const std::string b = nodeKey();
  ::setenv("NCCL_HOSTID", "", 1);
  const std::string empty = nodeKey();
  EXPECT_EQ(hostKey(), host) << "the host is not the node";
  ::unsetenv("NCCL_HOSTID");
  EXPECT_EQ((std::set<std::string>{plain, a, b, empty}.size()), 4u);
  EXPECT_EQ(nodeKey(), plain);
}

TEST(HostIdentityTest, ShortNameHasNoDot) {
  EXPECT_FALSE(shortHostName().empty());
  EXPECT_EQ(shortHostName().find('.'), std::string::npos);
}

TEST(RandomTest, DoesNotRepeat) {
  std::set<std::uint64_t> seen;
  for (int i = 0; i < 100; ++i) {
    std::uint64_t bits = 0;
    ASSERT_TRUE(random64(&bits));
    EXPECT_TRUE(seen.insert(bits).second);
  }
  std::array<std::uint8_t, 16> one{}, other{};
  ASSERT_TRUE(random128(&one));
  ASSERT_TRUE(random128(&other));
  EXPECT_NE(one, other);
}

TEST(RandomTest, FillsLongBuffersToTheEnd) {
  std::array<std::uint8_t, 4096> bytes{};
  ASSERT_TRUE(randomBytes(bytes.data(), bytes.size()));
  // 64 zero bytes in a row in random data would be chance of 2^-512.
  for (std::size_t at = 0; at < bytes.size(); at += 64) {
    bool allZero = true;
    for (std::size_t i = 0; i < 64; ++i) allZero = allZero && bytes[at + i] == 0;
    EXPECT_FALSE(allZero) << at;
  }
}

TEST(DeadlineTest, CountsDownAndPasses) {
  const Deadline far = Deadline::afterMs(60000);
  EXPECT_FALSE(far.passed());
  EXPECT_GT(far.remainingMs(), 50000);
  EXPECT_LE(far.remainingMs(), 60000);
  const Deadline now = Deadline::afterMs(0);
  EXPECT_TRUE(now.passed());
  EXPECT_EQ(now.remainingMs(), 0);
  const Deadline soon = Deadline::afterMs(5);
  while (!soon.passed()) ::usleep(1000);
  EXPECT_EQ(soon.remainingMs(), 0);
}

}  // namespace
}  // namespace hoccl
