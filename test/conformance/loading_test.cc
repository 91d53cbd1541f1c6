// How the plugin is found, loaded, unloaded and left behind; interfaces.

#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "test/conformance/session.h"

namespace conformance {
namespace {

namespace fs = std::filesystem;

const fs::path kPlugin = CONFORMANCE_PLUGIN;

Outcome runLoader(const std::string& name, const std::string& how, const std::string& folder = {},
                  const std::string& searchPath = {}) {
  return runProgram({CONFORMANCE_LOADER, how},
                    {"NCCL_NET_PLUGIN=" + name,
                     searchPath.empty() ? "LD_LIBRARY_PATH" : "LD_LIBRARY_PATH=" + searchPath},
                    folder);
}

TEST(Names, AsNcclResolvesThem) {
  const std::string folder = kPlugin.parent_path();
  for (const std::string name : {"hoccl", "libnccl-net-hoccl.so"}) {
    const Outcome found = runLoader(name, "close", {}, folder);
    EXPECT_TRUE(found.ok()) << name << ": " << found.text();
    const Outcome lost = runLoader(name, "close");
    EXPECT_EQ(WEXITSTATUS(lost.statuses[0]), 4) << name << ": " << lost.text();
  }
  const Outcome relative = runLoader("./libnccl-net-hoccl.so", "close", folder);
  EXPECT_TRUE(relative.ok()) << relative.text();
  const std::string upAndDown =
      "../" + kPlugin.parent_path().filename().string() + "/libnccl-net-hoccl.so";
  const Outcome longer = runLoader(upAndDown, "close", folder);
  EXPECT_TRUE(longer.ok()) << longer.text();
  const Outcome absolute = runLoader(kPlugin, "close");
  EXPECT_TRUE(absolute.ok()) << absolute.text();
}

class Endings : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Ways, Endings,
                         testing::Values("close", "leak", "exit", "finalize", "unload", "again",
                                         "fork", "exec"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Endings, OfAPlainCProgram) {
  const Outcome outcome = runLoader(kPlugin, GetParam());
  EXPECT_TRUE(outcome.ok()) << outcome.text();
  EXPECT_LT(outcome.seconds, 5) << outcome.text();
}

class Loading : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Versions, Loading, testing::ValuesIn(kVersions),
                         [](const auto& info) { return "v" + std::to_string(info.param); });

// Loaded and unloaded again and again with connections in between: no thread, no descriptor stays.
TEST_P(Loading, NothingIsLeft) {
  const Outcome outcome = runAlone([] {
    const std::size_t threads = threadsWithoutPlugin();
    std::size_t descriptors = 0;
    for (int round = 0; round < 8; ++round) {
      Session session(GetParam());
      Net& net = session.net();
      Handle handle;
      void* const listener = session.listen(&handle);
      void *sends = nullptr, *receives = nullptr;
      while (sends == nullptr || receives == nullptr) {
        if (sends == nullptr) REQUIRE_OK(net.connect(session.context(), 0, handle.data(), &sends));
        if (receives == nullptr) REQUIRE_OK(net.accept(listener, &receives));
      }
      std::vector<unsigned char> from(300000), to(300000);
      fill(from.data(), from.size(), 3);
      void* const receive = startReceive(net, receives, to.data(), to.size(), 0);
      void* const send = startSend(net, sends, from.data(), from.size(), 0);
      int sent = 0, received = 0;  // in turn: each may wait for the other's next step
      while (sent == 0 || received == 0) {
        if (sent == 0) REQUIRE_OK(net.test(send, &sent, nullptr));
        if (received == 0) REQUIRE_OK(net.test(receive, &received, nullptr));
      }
      REQUIRE(matches(to.data(), to.size(), 3));
      REQUIRE(threadCount() > threads);
      // A connection that nobody goes on with.
      Handle other;
      void* const second = session.listen(&other);
      void* pending = nullptr;
      REQUIRE_OK(net.connect(session.context(), 0, other.data(), &pending));
      REQUIRE_OK(net.closeListen(second));
      if (GetParam() < 11) {
        const double start = now();
        while (net.connect(session.context(), 0, other.data(), &pending) == ncclSuccess) {
          REQUIRE(pending == nullptr && now() - start < 5);
        }
      }
      REQUIRE_OK(net.closeSend(sends));
      REQUIRE_OK(net.closeReceive(receives));
      REQUIRE(threadsSettleAt(threads));
      REQUIRE_OK(net.closeListen(listener));
      session.end();
      if (round == 0) descriptors = descriptorCount();
      REQUIRE(descriptorCount() == descriptors);
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Several communicators: each has its init and finalize; one that is leaked ends with its own.
TEST(Contexts, EndOneByOne) {
  const Outcome outcome = runAlone([] {
    const std::size_t threads = threadsWithoutPlugin();
    Session one(11), other(11);
    Handle handle;
    void* const listener = one.listen(&handle);
    (void)listener;  // left open
    Handle kept;
    void* const stays = other.listen(&kept);
    one.end();
    takeLog();
    void* comm = nullptr;
    Handle dead = handle;
    REQUIRE(other.net().connect(other.context(), 0, dead.data(), &comm) != ncclSuccess ||
            comm == nullptr);
    void *sends = nullptr, *receives = nullptr;
    while (sends == nullptr || receives == nullptr) {
      if (sends == nullptr) {
        REQUIRE_OK(other.net().connect(other.context(), 0, kept.data(), &sends));
      }
      if (receives == nullptr) REQUIRE_OK(other.net().accept(stays, &receives));
    }
    other.end();  // with all of it open
    REQUIRE(threadsSettleAt(threads));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST(Interfaces, OneThatIsNotThere) {
  for (const int version : kVersions) {
    const Outcome outcome = runAlone([version] {
      ::setenv("NCCL_SOCKET_IFNAME", "=nosuch0", 1);
      Session session(version, false);
      void* context = nullptr;
      takeLog();
      REQUIRE(session.net().init(&context, sessionLogger()) != ncclSuccess);
      REQUIRE(context == nullptr);
      const std::string line = onlyWarning();
      REQUIRE_SAYING(line.find("NCCL_SOCKET_IFNAME") != std::string::npos, line);
      REQUIRE_SAYING(line.find("nosuch0") != std::string::npos, line);
    });
    EXPECT_TRUE(outcome.ok()) << outcome.text();
  }
}

TEST(Interfaces, ABadVariableIsOneLine) {
  const Outcome outcome = runAlone([] {
    ::setenv("HOCCL_SLOTS", "many", 1);
    ::setenv("HOCCL_NO_SUCH", "1", 1);
    Session session(11);
    const std::string line = onlyWarning();
    REQUIRE_SAYING(line.find("HOCCL_SLOTS='many'") != std::string::npos, line);
    REQUIRE_SAYING(line.find("HOCCL_NO_SUCH") != std::string::npos, line);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

int runningInterfaces() {
  ifaddrs* all = nullptr;
  REQUIRE(::getifaddrs(&all) == 0);
  int count = 0;
  for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
    const bool wanted = each->ifa_addr != nullptr && each->ifa_addr->sa_family == AF_INET &&
                        std::strncmp(each->ifa_name, "eth", 3) == 0;
    count += wanted && (each->ifa_flags & IFF_RUNNING) != 0 ? 1 : 0;
  }
  ::freeifaddrs(all);
  return count;
}

// A network namespace with so many interfaces that have an IPv4 address; false where the system
// does not allow it.
bool enterNamespace(int interfaces) {
  if (::unshare(CLONE_NEWNET) != 0) {
    const uid_t user = ::geteuid();
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
  }
  std::FILE* const ip = ::popen("ip -batch - 2>/dev/null", "w");
  if (ip == nullptr) return false;
  for (int i = 0; i < interfaces; ++i) {
    std::fprintf(ip, "link add eth%d type veth peer name w%d\n", i, i);
    std::fprintf(ip, "link set w%d up\naddr add 10.77.%d.1/24 dev eth%d\nlink set eth%d up\n", i, i,
                 i, i);
  }
  if (::pclose(ip) != 0) return false;
  // A link is there a moment after both its ends are up.
  const double start = now();
  while (runningInterfaces() < interfaces) {
    REQUIRE(now() - start < 5);
    ::usleep(2000);
  }
  return true;
}

TEST(Interfaces, NoneOneAndMany) {
  for (const int count : {0, 1, 16, 17, 64}) {
    const Outcome outcome = runAlone([count] {
      if (!enterNamespace(count)) {
        std::puts("no namespaces here");
        return;
      }
      ::setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
      Session session(11, false);
      void* context = nullptr;
      takeLog();
      const ncclResult_t result = session.net().init(&context, sessionLogger());
      if (count == 0) {
        REQUIRE(result != ncclSuccess);
        (void)onlyWarning();
        return;
      }
      REQUIRE_OK(result);
      REQUIRE(takeLog().size() == 1);
      int devices = 0;
      REQUIRE_OK(session.net().devices(&devices));
      REQUIRE(devices == count);
      std::vector<std::uint64_t> seen;
      for (int device = 0; device < devices; ++device) {
        Properties p;
        REQUIRE_OK(session.net().properties(device, &p));
        REQUIRE(p.name.rfind("eth", 0) == 0);
        for (const std::uint64_t guid : seen) REQUIRE(guid != p.guid);
        seen.push_back(p.guid);
        Handle handle;
        void* listener = nullptr;
        REQUIRE_OK(session.net().listen(context, device, handle.data(), &listener));
        REQUIRE_OK(session.net().closeListen(listener));
      }
      REQUIRE_OK(session.net().finalize(context));
    });
    EXPECT_TRUE(outcome.ok()) << count << ": " << outcome.text();
    if (outcome.output.find("no namespaces here") != std::string::npos) {
      GTEST_SKIP() << "this system lets nobody make network namespaces";
    }
  }
}

// Over IPv6, where the system has it.
TEST(Interfaces, IPv6) {
  const Outcome outcome = runPair([](const Side& side) {
    ::setenv("NCCL_SOCKET_FAMILY", "AF_INET6", 1);
    ::setenv("NCCL_SOCKET_IFNAME", "=lo", 1);
    Session session(11, false);
    void* context = nullptr;
    if (session.net().init(&context, sessionLogger()) != ncclSuccess) {
      std::puts("no IPv6 here");
      return;
    }
    REQUIRE_OK(session.net().finalize(context));
    Session over(11);
    void* const comm = over.connectPair(side, 0);
    std::vector<unsigned char> data(400000);
    if (side.rank() == 0) {
      fill(data.data(), data.size(), 1);
      finish(over.net(), startSend(over.net(), comm, data.data(), data.size(), 0));
    } else {
      finish(over.net(), startReceive(over.net(), comm, data.data(), data.size(), 0));
      REQUIRE(matches(data.data(), data.size(), 1));
    }
    side.meet();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
  if (outcome.output.find("no IPv6 here") != std::string::npos) GTEST_SKIP() << "no IPv6";
}

}  // namespace
}  // namespace conformance
