// What the verbs transport decides: which devices, which address, which attributes; and its parts
// that need no peer.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/log.h"
#include "common/net/verbs/gid_choice.h"
#include "common/net/verbs/hca_list.h"
#include "common/net/verbs/immediate.h"
#include "common/net/verbs/message_window.h"
#include "common/net/verbs/nic.h"
#include "common/net/verbs/queue_pair.h"
#include "common/net/verbs/slot_pieces.h"
#include "common/net/verbs/verbs_settings.h"
#include "common/net/verbs/work_request.h"
#include "test/unit/fake_verbs.h"

namespace hoccl {
namespace {

using test::FakeDevice;
using test::FakeFabric;

void expectNamed(const Status& status, const std::vector<std::string>& parts) {
  ASSERT_FALSE(status);
  for (const std::string& part : parts) {
    EXPECT_NE(status.message().find(part), std::string::npos)
        << part << " in: " << status.message();
  }
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << "more than one line";
}

/// Variables of one test, taken back at its end.
class Variables {
 public:
  Variables() {
    for (const char* name :
         {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_SL", "NCCL_IB_PKEY",
          "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_QPS_PER_CONNECTION",
          "NCCL_IB_ADAPTIVE_ROUTING", "NCCL_IB_PCI_RELAXED_ORDERING"}) {
      ::unsetenv(name);
    }
  }
  ~Variables() {
    for (const std::string& name : names_) ::unsetenv(name.c_str());
  }
  void set(const char* name, const char* value) {
    ::setenv(name, value, 1);
    names_.emplace_back(name);
  }

 private:
  std::vector<std::string> names_;
};

TEST(VerbsHcaList, NcclsSyntax) {
  const auto allowed = [](const char* list, const char* device, unsigned port = 1) {
    return hcaAllowed(list, device, port);
  };
  EXPECT_TRUE(allowed("", "mlx5_0"));
  EXPECT_TRUE(allowed("mlx5", "mlx5_0"));
  EXPECT_TRUE(allowed("mlx5_1", "mlx5_10")) << "prefixes";
  EXPECT_FALSE(allowed("=mlx5_1", "mlx5_10"));
  EXPECT_TRUE(allowed("=mlx5_1,mlx5_10", "mlx5_10"));
  EXPECT_FALSE(allowed("^mlx5_1", "mlx5_10"));
  EXPECT_TRUE(allowed("^=mlx5_1", "mlx5_10"));
  EXPECT_FALSE(allowed("^=mlx5_1", "mlx5_1"));
  EXPECT_TRUE(allowed("mlx5_0:2", "mlx5_0", 2));
  EXPECT_FALSE(allowed("mlx5_0:2", "mlx5_0", 1));
  EXPECT_FALSE(allowed("^mlx5_0:2", "mlx5_0", 2));
  EXPECT_TRUE(allowed("^mlx5_0:2", "mlx5_0", 1));
  EXPECT_FALSE(allowed("mlx5_0:x", "mlx5_0", 1));
  EXPECT_FALSE(allowed("rxe,,", "mlx5_0")) << "empty entries name nothing";
  EXPECT_TRUE(allowed(",mlx5_0", "mlx5_0"));
}

GidEntry entry(std::uint32_t index, const char* address,
               std::uint32_t type = IBV_GID_TYPE_ROCE_V2) {
  return {index, FakeDevice::parse(address), type};
}

TEST(VerbsGid, MappedV2FirstLinkLocalLast) {
  const auto choice = [](const std::vector<GidEntry>& table) {
    GidEntry chosen;
    const Status status = chooseGid(table, "rxe0", "", "HOCCL_IB_GID_INDEX", &chosen);
    EXPECT_TRUE(status) << status.message();
    return chosen.index;
  };
  constexpr auto kV1 = IBV_GID_TYPE_ROCE_V1;
  EXPECT_EQ(choice({entry(0, "fe80::1"), entry(1, "10.0.0.1")}), 1u);
  EXPECT_EQ(choice({entry(2, "10.0.0.1", kV1), entry(3, "10.0.0.1")}), 3u);
  EXPECT_EQ(choice({entry(0, "fe80::1"), entry(4, "2001:db8::1")}), 4u) << "IPv6 only";
  EXPECT_EQ(choice({entry(4, "2001:db8::1"), entry(5, "10.0.0.1")}), 5u);
  EXPECT_EQ(choice({entry(4, "2001:db8::1"), entry(5, "10.0.0.1", kV1)}), 4u) << "v2 before v1";
  EXPECT_EQ(choice({entry(0, "fe80::1"), entry(5, "10.0.0.1", kV1)}), 5u);
  EXPECT_EQ(choice({entry(0, "fe80::1", kV1), entry(1, "fe80::1")}), 1u);
  EXPECT_EQ(choice({entry(7, "10.0.0.2"), entry(3, "10.0.0.1")}), 3u) << "the lowest of equals";
}

TEST(VerbsGid, OverridesByIndexAndByDevice) {
  const std::vector<GidEntry> table{entry(0, "fe80::1"), entry(1, "10.0.0.1"),
                                    entry(3, "10.0.0.3")};
  const auto choice = [&table](const char* override, const char* device) {
    GidEntry chosen;
    EXPECT_TRUE(chooseGid(table, device, override, "HOCCL_IB_GID_INDEX", &chosen));
    return chosen.index;
  };
  EXPECT_EQ(choice("3", "rxe0"), 3u);
  EXPECT_EQ(choice("0", "rxe0"), 0u);
  EXPECT_EQ(choice("rxe0:0,rxe1:3", "rxe0"), 0u);
  EXPECT_EQ(choice("rxe0:0,rxe1:3", "rxe1"), 3u);
  EXPECT_EQ(choice("rxe0:0,rxe1:3", "rxe2"), 1u) << "not named: chosen";
}

TEST(VerbsGid, Rule10OutOfRangeOrNonsenseIsNamed) {
  const std::vector<GidEntry> table{entry(0, "fe80::1"), entry(1, "10.0.0.1")};
  GidEntry chosen;
  expectNamed(chooseGid(table, "rxe0", "9", "NCCL_IB_GID_INDEX", &chosen),
              {"NCCL_IB_GID_INDEX='9'", "rxe0", "no GID of index 9", "1 10.0.0.1"});
  for (const char* bad : {"x", "3,4", "rxe0:", ":3", "rxe0:3,4", "-2", "1.5"}) {
    expectNamed(chooseGid(table, "rxe0", bad, "HOCCL_IB_GID_INDEX", &chosen),
                {fmt::format("HOCCL_IB_GID_INDEX='{}'", bad), "mlx5_0:3"});
  }
  expectNamed(chooseGid({}, "rxe0", "", "HOCCL_IB_GID_INDEX", &chosen), {"rxe0", "no address"});
}

TEST(VerbsSettingsTest, OwnVariablesAheadOfNccls) {
  Variables variables;
  Config config = Config::defaults();
  VerbsSettings s;
  ASSERT_TRUE(VerbsSettings::fromEnvironment(config, &s));
  EXPECT_EQ(s.qpsPerPeer, 4u);
  EXPECT_EQ(s.trafficClass, 0);
  EXPECT_EQ(s.retryCount, 7);
  variables.set("NCCL_IB_TC", "106");
  variables.set("NCCL_IB_SL", "3");
  variables.set("NCCL_IB_TIMEOUT", "22");
  variables.set("NCCL_IB_RETRY_CNT", "5");
  variables.set("NCCL_IB_QPS_PER_CONNECTION", "2");
  variables.set("NCCL_IB_HCA", "mlx5_1");
  variables.set("NCCL_IB_GID_INDEX", "3");
  variables.set("NCCL_IB_PCI_RELAXED_ORDERING", "0");
  ASSERT_TRUE(VerbsSettings::fromEnvironment(config, &s));
  EXPECT_EQ(s.trafficClass, 106);
  EXPECT_EQ(s.serviceLevel, 3);
  EXPECT_EQ(s.timeout, 22);
  EXPECT_EQ(s.retryCount, 5);
  EXPECT_EQ(s.qpsPerPeer, 2u);
  EXPECT_EQ(s.hcaList, "mlx5_1");
  EXPECT_EQ(s.hcaVariable, "NCCL_IB_HCA");
  EXPECT_EQ(s.gidIndex, "3");
  EXPECT_EQ(s.relaxedOrdering, VerbsSettings::Choice::Off);
  ASSERT_TRUE(config.set("HOCCL_IB_TC", "7"));
  ASSERT_TRUE(config.set("HOCCL_QPS_PER_PEER", "8"));
  ASSERT_TRUE(config.set("HOCCL_IB_HCA", "^mlx5_0"));
  ASSERT_TRUE(VerbsSettings::fromEnvironment(config, &s));
  EXPECT_EQ(s.trafficClass, 7);
  EXPECT_EQ(s.qpsPerPeer, 8u);
  EXPECT_EQ(s.hcaList, "^mlx5_0");
  EXPECT_EQ(s.hcaVariable, "HOCCL_IB_HCA");
}

TEST(VerbsSettingsTest, EveryVariableByItsTwoNames) {
  const auto text = [](auto value) { return fmt::format("{}", value); };
  using Choice = VerbsSettings::Choice;
  const auto word = [](Choice choice) {
    return choice == Choice::Off ? "0" : choice == Choice::On ? "1" : "2";
  };
  const struct {
    const char *own, *nccl, *ownValue, *ncclValue;
    std::function<std::string(const VerbsSettings&)> get;
  } all[] = {
      {"HOCCL_IB_HCA", "NCCL_IB_HCA", "a", "b", [](const auto& s) { return s.hcaList; }},
      {"HOCCL_IB_GID_INDEX", "NCCL_IB_GID_INDEX", "4", "5",
       [](const auto& s) { return s.gidIndex; }},
      {"HOCCL_IB_TC", "NCCL_IB_TC", "4", "5", [&](const auto& s) { return text(s.trafficClass); }},
      {"HOCCL_IB_SL", "NCCL_IB_SL", "4", "5", [&](const auto& s) { return text(s.serviceLevel); }},
      {"HOCCL_IB_PKEY", "NCCL_IB_PKEY", "4", "5", [&](const auto& s) { return text(s.pkeyIndex); }},
      {"HOCCL_IB_TIMEOUT", "NCCL_IB_TIMEOUT", "14", "15",
       [&](const auto& s) { return text(s.timeout); }},
      {"HOCCL_IB_RETRY_CNT", "NCCL_IB_RETRY_CNT", "4", "5",
       [&](const auto& s) { return text(s.retryCount); }},
      {"HOCCL_QPS_PER_PEER", "NCCL_IB_QPS_PER_CONNECTION", "5", "6",
       [&](const auto& s) { return text(s.qpsPerPeer); }},
      {"HOCCL_IB_ADAPTIVE_ROUTING", "NCCL_IB_ADAPTIVE_ROUTING", "1", "0",
       [&](const auto& s) { return word(s.adaptiveRouting); }},
      {"HOCCL_IB_PCI_RELAXED_ORDERING", "NCCL_IB_PCI_RELAXED_ORDERING", "1", "0",
       [&](const auto& s) { return word(s.relaxedOrdering); }},
  };
  for (const auto& each : all) {
    Variables variables;
    variables.set(each.nccl, each.ncclValue);
    Config config = Config::defaults();
    VerbsSettings s;
    ASSERT_TRUE(VerbsSettings::fromEnvironment(config, &s)) << each.nccl;
    EXPECT_EQ(each.get(s), each.ncclValue) << each.nccl;
    ASSERT_TRUE(config.set(each.own, each.ownValue)) << each.own;
    ASSERT_TRUE(VerbsSettings::fromEnvironment(config, &s)) << each.own;
    EXPECT_EQ(each.get(s), each.ownValue) << each.own;
  }
}

TEST(VerbsSettingsTest, UnsetIsMinusOneOrTheSmallestInteger) {
  for (const char* unset : {"-1", "-2147483648", ""}) {
    Variables variables;
    variables.set("NCCL_IB_TC", unset);
    variables.set("NCCL_IB_GID_INDEX", unset);
    VerbsSettings s;
    ASSERT_TRUE(VerbsSettings::fromEnvironment(Config::defaults(), &s)) << unset;
    EXPECT_EQ(s.trafficClass, 0);
    EXPECT_EQ(s.gidIndex, "");
  }
}

TEST(VerbsSettingsTest, ACommunicatorsTrafficClassStandsBehindVariables) {
  VerbsSettings s;
  for (const int unset : {-1, std::numeric_limits<int>::min()}) {
    ASSERT_TRUE(s.takeTrafficClass(unset, true));
    EXPECT_EQ(s.trafficClass, 0);
    EXPECT_EQ(s.serviceLevel, 0);
  }
  ASSERT_TRUE(s.takeTrafficClass(106, false));
  EXPECT_EQ(s.trafficClass, 106);
  EXPECT_EQ(s.serviceLevel, 0) << "on Ethernet";
  ASSERT_TRUE(s.takeTrafficClass(5, true));
  EXPECT_EQ(s.trafficClass, 5);
  EXPECT_EQ(s.serviceLevel, 5) << "on InfiniBand, as NCCL has it";
  Variables variables;
  variables.set("NCCL_IB_TC", "42");
  variables.set("NCCL_IB_SL", "2");
  ASSERT_TRUE(VerbsSettings::fromEnvironment(Config::defaults(), &s));
  ASSERT_TRUE(s.takeTrafficClass(106, true));
  EXPECT_EQ(s.trafficClass, 42);
  EXPECT_EQ(s.serviceLevel, 2);
}

TEST(VerbsSettingsTest, Rule10AnUnknownTrafficClassOfACommunicator) {
  VerbsSettings s;
  for (const auto& [value, infiniBand, allowed] :
       {std::tuple{256, false, "0 to 255"}, {-2, false, "0 to 255"}, {16, true, "0 to 15"}}) {
    const Status status = s.takeTrafficClass(value, infiniBand);
    ASSERT_FALSE(status);
    for (const std::string& part :
         {std::to_string(value), std::string("ncclConfig.trafficClass"), std::string(allowed),
          std::string("HOCCL_IB_TC"), std::string("NCCL_IB_TC")}) {
      EXPECT_NE(status.message().find(part), std::string::npos) << part << ": " << status.message();
    }
    EXPECT_EQ(s.trafficClass, 0);
  }
}

TEST(VerbsSettingsTest, Rule10BadValuesAreNamed) {
  const std::vector<std::vector<const char*>> bad{
      {"HOCCL_IB_TC", "256", "traffic class", "0 to 255"},
      {"HOCCL_IB_TC", "abc", "traffic class"},
      {"HOCCL_IB_SL", "16", "service level", "0 to 15"},
      {"HOCCL_IB_TIMEOUT", "0", "1 to 31"},
      {"HOCCL_IB_RETRY_CNT", "8", "0 to 7"},
      {"HOCCL_IB_PKEY", "1x"},
      {"HOCCL_IB_ADAPTIVE_ROUTING", "3"},
  };
  for (const auto& each : bad) {
    Variables variables;
    Config config = Config::defaults();
    ASSERT_TRUE(config.set(each[0], each[1]));
    VerbsSettings s;
    std::vector<std::string> parts{fmt::format("{}='{}'", each[0], each[1])};
    parts.insert(parts.end(), each.begin() + 2, each.end());
    expectNamed(VerbsSettings::fromEnvironment(config, &s), parts);
  }
  Variables variables;
  variables.set("NCCL_IB_TC", "-5");
  VerbsSettings s;
  expectNamed(VerbsSettings::fromEnvironment(Config::defaults(), &s), {"NCCL_IB_TC='-5'"});
}

class VerbsNicTest : public ::testing::Test {
 protected:
  void SetUp() override { fabric_.reset(); }
  void TearDown() override {
    nics_.clear();
    fabric_.reset();
  }
  Status open() { return openNics(FakeFabric::library(0), settings_, &nics_); }
  std::string names() const {
    std::string text;
    for (const auto& nic : nics_) text += fmt::format("{}:{} ", nic->device(), nic->port());
    return text;
  }
  FakeFabric& fabric_ = FakeFabric::get();
  VerbsSettings settings_;
  Nics nics_;
};

TEST_F(VerbsNicTest, ActivePortsInTheOrderOfTheirNames) {
  fabric_.add(0, "mlx5_1", "10.0.1.1");
  fabric_.add(0, "mlx5_0", "10.0.0.1").ports = 2;
  fabric_.add(0, "mlx5_2", "10.0.2.1").state = IBV_PORT_DOWN;
  fabric_.add(0, "mlx5_3");  // without an address
  fabric_.add(0, "siw0", "10.0.9.1").transport_type = IBV_TRANSPORT_IWARP;
  ASSERT_TRUE(open());
  EXPECT_EQ(names(), "mlx5_0:1 mlx5_0:2 mlx5_1:1 ");
  EXPECT_EQ(nics_[2]->text(), "mlx5_1:1 (GID 10.0.1.1)");
  settings_.hcaList = "mlx5_0:2,mlx5_1";
  ASSERT_TRUE(open());
  EXPECT_EQ(names(), "mlx5_0:2 mlx5_1:1 ");
  settings_.hcaList = "^mlx5_0";
  ASSERT_TRUE(open());
  EXPECT_EQ(names(), "mlx5_1:1 ");
}

TEST_F(VerbsNicTest, Rule10NoDeviceOrNoneThatFits) {
  expectNamed(open(), {"no RDMA device"});
  fabric_.add(0, "mlx5_0", "10.0.0.1");
  fabric_.add(0, "mlx5_1", "10.0.1.1");
  settings_.hcaList = "=mlx4_0";
  settings_.hcaVariable = "HOCCL_IB_HCA";
  const Status status = open();
  EXPECT_EQ(status.code(), Code::InvalidConfig);
  expectNamed(status, {"HOCCL_IB_HCA='=mlx4_0'", "mlx5_0; mlx5_1"});
  settings_.hcaList = "mlx5_0:3";
  expectNamed(open(), {"HOCCL_IB_HCA='mlx5_0:3'"});
  settings_.hcaList = "";
  fabric_.add(0, "siw0", "10.0.9.1").transport_type = IBV_TRANSPORT_IWARP;
  for (auto& device : fabric_.hosts[0]) device->state = IBV_PORT_DOWN;
  fabric_.hosts[0][1]->openError = EACCES;
  expectNamed(open(), {"mlx5_0:1 is not active", "mlx5_1 cannot be opened", "siw0 is neither"});
}

TEST_F(VerbsNicTest, Rule10AGidIndexOutOfRange) {
  fabric_.add(0, "mlx5_0", "10.0.0.1");
  settings_.gidIndex = "7";
  settings_.gidVariable = "HOCCL_IB_GID_INDEX";
  expectNamed(open(), {"HOCCL_IB_GID_INDEX='7'", "mlx5_0", "1 10.0.0.1"});
}

std::string warned;

TEST_F(VerbsNicTest, Rule10AGidIndexOfADeviceThatIsNotThere) {
  fabric_.add(0, "mlx5_0", "10.0.0.1");
  settings_.gidIndex = "mlx5_0:1,mlx5_7:3";
  settings_.gidVariable = "HOCCL_IB_GID_INDEX";
  warned.clear();
  setLogHandler([](LogLevel level, std::string_view text) {
    if (level == LogLevel::Warn) warned += text;
  });
  EXPECT_TRUE(open());
  setLogHandler(nullptr);
  for (const char* part : {"HOCCL_IB_GID_INDEX='mlx5_0:1,mlx5_7:3' names mlx5_7", "are: mlx5_0"}) {
    EXPECT_NE(warned.find(part), std::string::npos) << warned;
  }
}

TEST_F(VerbsNicTest, Rule10AMemoryLockLimitIsNamed) {
  FakeDevice& device = fabric_.add(0, "mlx5_0", "10.0.0.1");
  device.registerError = ENOMEM;
  ASSERT_TRUE(open());
  CompletionQueue cq, none;
  ASSERT_TRUE(CompletionQueue::create(*nics_[0], 64, &cq));
  rlimit before{}, small{};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
  small = before;
  small.rlim_cur = 64 << 10;
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &small), 0);
  MemoryRegion region;
  std::vector<std::byte> memory(4096);
  const Status status =
      MemoryRegion::create(*nics_[0], settings_, memory.data(), memory.size(), &region);
  // Some drivers lock the memory of queues.
  device.queueError = ENOMEM;
  QueuePair pair;
  const Status noQueue = CompletionQueue::create(*nics_[0], 64, &none),
               noPair = QueuePair::create(nics_[0], cq, settings_, {}, &pair);
  ::setrlimit(RLIMIT_MEMLOCK, &before);
  expectNamed(noQueue, {"mlx5_0:1", "RLIMIT_MEMLOCK is 64 KiB", "ulimit -l"});
  expectNamed(noPair, {"mlx5_0:1", "RLIMIT_MEMLOCK is 64 KiB", "ulimit -l"});
  expectNamed(status, {"mlx5_0:1", "4096 bytes", "RLIMIT_MEMLOCK is 64 KiB", "ulimit -l"});
}

TEST_F(VerbsNicTest, RelaxedOrderingIsAskedForUnlessItIsOff) {
  FakeDevice& device = fabric_.add(0, "mlx5_0", "10.0.0.1");
  ASSERT_TRUE(open());
  std::vector<std::byte> memory(4096);
  for (const auto choice :
       {VerbsSettings::Choice::Auto, VerbsSettings::Choice::On, VerbsSettings::Choice::Off}) {
    settings_.relaxedOrdering = choice;
    MemoryRegion region;
    ASSERT_TRUE(MemoryRegion::create(*nics_[0], settings_, memory.data(), memory.size(), &region));
    EXPECT_EQ((device.lastAccess & IBV_ACCESS_RELAXED_ORDERING) != 0,
              choice != VerbsSettings::Choice::Off);
    EXPECT_NE(device.lastAccess & IBV_ACCESS_REMOTE_WRITE, 0u);
  }
}

TEST_F(VerbsNicTest, AQueuePairHasWhatTheSettingsSay) {
  FakeDevice& device = fabric_.add(0, "mlx5_0", "10.0.0.1");
  device.mtu = IBV_MTU_4096;
  settings_.trafficClass = 106;
  settings_.serviceLevel = 3;
  settings_.timeout = 17;
  settings_.retryCount = 4;
  settings_.pkeyIndex = 2;
  ASSERT_TRUE(open());
  CompletionQueue cq;
  QueuePair pair;
  ASSERT_TRUE(CompletionQueue::create(*nics_[0], 64, &cq));
  ASSERT_TRUE(QueuePair::create(nics_[0], cq, settings_, {}, &pair));
  QueuePairPeer peer;
  peer.address.gid = FakeDevice::parse("10.0.0.2");
  peer.address.mtu = IBV_MTU_2048;
  peer.number = 77;
  peer.sequence = 1234;
  ASSERT_TRUE(pair.connect(settings_, peer));
  ibv_qp_attr has{};
  ASSERT_TRUE(pair.query(&has));
  EXPECT_EQ(has.qp_state, IBV_QPS_RTS);
  EXPECT_EQ(has.ah_attr.grh.traffic_class, 106);
  EXPECT_EQ(has.ah_attr.sl, 3);
  EXPECT_EQ(has.timeout, 17);
  EXPECT_EQ(has.retry_cnt, 4);
  EXPECT_EQ(has.rnr_retry, 7);
  EXPECT_EQ(has.pkey_index, 2);
  EXPECT_EQ(has.path_mtu, IBV_MTU_2048) << "the smaller of both ends";
  EXPECT_EQ(has.dest_qp_num, 77u);
  EXPECT_EQ(has.rq_psn, 1234u);
  EXPECT_EQ(has.sq_psn, pair.sequence());
  EXPECT_EQ(has.ah_attr.is_global, 1);
  EXPECT_EQ(has.ah_attr.grh.sgid_index, 1);
}

TEST_F(VerbsNicTest, InfiniBandGoesByLidInsideItsSubnet) {
  FakeDevice& device = fabric_.add(0, "mlx5_0");
  device.linkLayer = IBV_LINK_LAYER_INFINIBAND;
  device.lid = 5;
  device.gids.push_back({0, "fe80::5", IBV_GID_TYPE_IB});
  ASSERT_TRUE(open());
  QueuePairPeer peer;
  peer.address = nics_[0]->address();
  peer.address.lid = 9;
  peer.address.gid = FakeDevice::parse("fe80::9");
  EXPECT_EQ(receiveAttributes(*nics_[0], settings_, peer).ah_attr.is_global, 0);
  EXPECT_EQ(receiveAttributes(*nics_[0], settings_, peer).ah_attr.dlid, 9);
  peer.address.gid = FakeDevice::parse("fec0::9");
  EXPECT_EQ(receiveAttributes(*nics_[0], settings_, peer).ah_attr.is_global, 1);
  EXPECT_EQ(nics_[0]->text(), "mlx5_0:1 (LID 5)");
}

TEST(VerbsImmediate, RoundTripsAndDistances) {
  for (std::uint32_t slot : {0u, 1u, 63u, 255u}) {
    for (std::uint32_t piece : {0u, 5u, 63u}) {
      const std::uint32_t bits = Immediate::piece(slot, piece, 64, 0x12345);
      EXPECT_EQ(Immediate::kind(bits), Immediate::Kind::Piece);
      EXPECT_EQ(Immediate::slot(bits), slot);
      EXPECT_EQ(Immediate::pieceIndex(bits), piece);
      EXPECT_EQ(Immediate::pieceCount(bits), 64u);
      EXPECT_EQ(Immediate::turn(bits), 0x345u);
    }
  }
  EXPECT_EQ(Immediate::kind(Immediate::message(5)), Immediate::Kind::Message);
  EXPECT_EQ(Immediate::kind(Immediate::credit(5, 6)), Immediate::Kind::Credit);
  EXPECT_EQ(Immediate::code(Immediate::other(Immediate::Other::Consumed, 9)),
            Immediate::Other::Consumed);
  EXPECT_EQ(Immediate::distance(3, 0xfff, 12), 4) << "round the end of the cut numbers";
  EXPECT_EQ(Immediate::distance(0xfff, 0x1001, 12), -2);
  EXPECT_EQ(Immediate::distance(0, 0, 12), 0);
  const WorkId id{WorkId::Kind::Piece, 63, 0x3fff, 255, 63, 1 << 20};
  const WorkId back = WorkId::unpack(id.pack());
  EXPECT_EQ(back.kind, id.kind);
  EXPECT_EQ(back.path, id.path);
  EXPECT_EQ(back.generation, id.generation);
  EXPECT_EQ(back.slot, id.slot);
  EXPECT_EQ(back.piece, id.piece);
  EXPECT_EQ(back.units, id.units);
}

TEST(VerbsPieces, EachCountsOnce) {
  using Arrival = InPieces::Arrival;
  InPieces in;
  for (std::uint64_t turn = 1; turn <= 9000; turn += 1) {
    EXPECT_EQ(in.arrived(Immediate::piece(0, 1, 2, turn)), Arrival::Piece);
    EXPECT_EQ(in.arrived(Immediate::piece(0, 1, 2, turn)), Arrival::Again);
    EXPECT_EQ(in.arrived(Immediate::piece(0, 1, 3, turn)), Arrival::Nonsense);
    EXPECT_EQ(in.arrived(Immediate::piece(0, 0, 2, turn + 1)), Arrival::Nonsense);
    EXPECT_EQ(in.arrived(Immediate::piece(0, 0, 2, turn)), Arrival::Whole);
    EXPECT_EQ(in.got.ready, turn);
    EXPECT_EQ(in.arrived(Immediate::piece(0, 0, 2, turn)), Arrival::Again);
  }
  EXPECT_EQ(in.arrived(Immediate::piece(0, 2, 2, 9001)), Arrival::Nonsense);
}

TEST(VerbsPieces, OnlyWhatThePeerLacksGoesAgain) {
  OutPieces out;
  out.begin(7, 1000, 300);
  ASSERT_EQ(out.pieces, 4u);
  EXPECT_EQ(out.lengthOf(3), 100u);
  for (std::uint32_t i = 0; i < 4; ++i) out.posted(i, static_cast<std::uint8_t>(i % 2));
  out.completed(0, 0);
  out.completed(1, 0);  // not over that path
  EXPECT_EQ(out.landed, 0b0001u);
  SlotReport report;
  report.turn = 7;
  report.mask = 0b0001;
  EXPECT_TRUE(out.failedOver(0, report)) << "piece 2 is missing";
  EXPECT_EQ(out.pending, 0b0100u);
  EXPECT_EQ(out.landed, 0b0001u);
  out.posted(2, 1);
  out.completed(2, 0);  // of the failed path, late
  EXPECT_FALSE(out.complete());
  out.completed(2, 1);
  out.completed(1, 1);
  out.completed(3, 1);
  EXPECT_TRUE(out.complete());
  report = {.ready = 7, .turn = 0, .mask = 0};
  EXPECT_FALSE(out.failedOver(1, report)) << "it has all of it";
  report = {.ready = 6, .turn = 6, .mask = 0b1111};
  EXPECT_TRUE(out.failedOver(1, report)) << "an older turn's pieces are not this one's";
}

TEST(VerbsWindow, MessagesWaitForRoomAndComeInOrder) {
  SendWindow send;
  ReceiveWindow receive;
  for (std::uint64_t total = 0; total < 5 * kMessageWindow; total += kMessageWindow) {
    while (!send.full()) ++send.queued;
    EXPECT_EQ(send.queued - send.consumed, kMessageWindow);
    send.posted = send.queued;
    // The last comes first.
    for (std::uint64_t n = send.queued; n-- > total;) {
      EXPECT_FALSE(receive.any());
      ASSERT_TRUE(receive.arrived(Immediate::sequence(Immediate::message(n))));
      ASSERT_TRUE(receive.arrived(Immediate::sequence(Immediate::message(n)))) << "again";
    }
    while (receive.any()) receive.take();
    EXPECT_EQ(receive.next, send.queued);
    EXPECT_EQ(receive.missing(), send.queued);
    ASSERT_TRUE(send.peerConsumed(
        Immediate::value(Immediate::other(Immediate::Other::Consumed, receive.next))));
    EXPECT_FALSE(send.full());
  }
  EXPECT_FALSE(receive.arrived(Immediate::sequence(Immediate::message(receive.next + 1000))));
  EXPECT_FALSE(send.peerConsumed(
      Immediate::value(Immediate::other(Immediate::Other::Consumed, send.queued + 1))));
  send.queued += 10;
  send.posted = send.queued;
  send.failedOver(send.queued - 4);
  EXPECT_EQ(send.posted, send.queued - 4);
}

}  // namespace
}  // namespace hoccl
