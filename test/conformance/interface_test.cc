// What every version of the interface has and says, and the smallest transfers over it.

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "test/conformance/session.h"

namespace conformance {
namespace {

class Interface : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Versions, Interface, testing::ValuesIn(kVersions),
                         [](const auto& info) { return "v" + std::to_string(info.param); });

TEST_P(Interface, ExportsWhatNcclCalls) {
  const Outcome outcome = runAlone([] {
    Session session(GetParam(), false);
    REQUIRE(session.net().missing().empty());
    REQUIRE(std::string(session.net().name()) == "HOCCL");
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST_P(Interface, DevicesAndProperties) {
  const Outcome outcome = runAlone([] {
    Session session(GetParam());
    int count = -1;
    REQUIRE_OK(session.net().devices(&count));
    REQUIRE(count >= 1);
    for (int device = 0; device < count; ++device) {
      Properties p;
      REQUIRE_OK(session.net().properties(device, &p));
      REQUIRE(!p.name.empty());
      REQUIRE(p.pointerSupport == 1);
      REQUIRE(p.guid != 0);
      REQUIRE(p.speedMbps > 0);
      REQUIRE(p.latencyUs >= 0);
      REQUIRE(p.maxComms > 0);
      REQUIRE(p.maxReceives >= 1 && p.maxReceives <= 8);
      REQUIRE(p.deviceType == 0);
      if (GetParam() >= 9) {
        REQUIRE(p.maxPointToPointBytes > 0 && p.maxPointToPointBytes <= std::size_t{1} << 40);
        REQUIRE(p.maxCollectiveBytes > 0 && p.maxCollectiveBytes <= std::size_t{1} << 40);
        REQUIRE(p.virtualDevices == 1 && p.virtualDevice == device);
      }
      if (GetParam() >= 12) REQUIRE(p.rail == -1 && p.plane == -1);
    }
    takeLog();
    for (const int device : {-1, count}) {
      Properties p;
      REQUIRE(session.net().properties(device, &p) == ncclInvalidArgument);
      REQUIRE(onlyWarning().find("there are") != std::string::npos);
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST_P(Interface, OneLineAtInit) {
  const Outcome outcome = runAlone([] {
    Session session(GetParam());
    const std::vector<LogLine> lines = takeLog();
    REQUIRE(lines.size() == 1);
    REQUIRE(lines[0].level == hoccl::nccl_abi::kLogInfo);
    const std::string expected = "plugin interface v" + std::to_string(GetParam());
    REQUIRE_SAYING(lines[0].text.find(expected) != std::string::npos, lines[0].text);
    const char* const asked = std::getenv("HOCCL_TRANSPORT");
    const std::string transport = std::string("transport ") + (asked != nullptr ? asked : "tcp");
    REQUIRE_SAYING(lines[0].text.find(transport) != std::string::npos, lines[0].text);
    REQUIRE_SAYING(lines[0].text.find("devices: ") != std::string::npos, lines[0].text);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// Two processes, a small and a large message in each of two connections.
TEST_P(Interface, SendsAndReceives) {
  const Outcome outcome = runPair([](const Side& side) {
    Session session(GetParam());
    Net& net = session.net();
    for (const int from : {0, 1}) {
      void* const comm = session.connectPair(side, from);
      for (const std::size_t bytes : {std::size_t{8}, std::size_t{3000001}}) {
        std::vector<unsigned char> buffer(bytes + 64, 0xee);
        void* handle = nullptr;
        REQUIRE_OK(net.registerMemory(comm, buffer.data(), buffer.size(), 1, &handle));
        if (side.rank() == from) {
          fill(buffer.data(), bytes, bytes);
          REQUIRE(finish(net, startSend(net, comm, buffer.data(), bytes, 5)) ==
                  static_cast<int>(bytes));
        } else {
          REQUIRE(finish(net, startReceive(net, comm, buffer.data(), bytes, 5)) ==
                  static_cast<int>(bytes));
          REQUIRE(matches(buffer.data(), bytes, bytes));
          REQUIRE(allBytes(buffer.data() + bytes, 64, 0xee));
        }
        REQUIRE_OK(net.deregisterMemory(comm, handle));
      }
      side.meet();
      REQUIRE_OK(side.rank() == from ? net.closeSend(comm) : net.closeReceive(comm));
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
