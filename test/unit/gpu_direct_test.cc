// By which way NICs reach device memory, and when that has to be flushed: every case of the two
// tables, and what the NICs are asked.

#include "plugin-net/gpu_direct.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "test/unit/fake_verbs.h"

namespace hoccl::net_plugin {
namespace {

TEST(GpuDirect, EveryCase) {
  struct Case {
    bool staging, library;
    std::vector<int> errors;
    bool peerMemory, dmaBuf, peer;
    const char* says;
  };
  const Case cases[] = {
      {false, true, {EBADF}, false, true, false, "by DMA-BUF, where"},
      {false, true, {EBADF}, true, true, true, "DMA-BUF or nvidia_peermem"},
      {false, true, {EBADF, EINVAL}, false, true, false, "by DMA-BUF, where"},
      {false, true, {EBADF, EOPNOTSUPP}, false, false, false, "nic1 does not take DMA-BUF"},
      {false, true, {EPROTONOSUPPORT, EBADF}, false, false, false, "nic0 does not take DMA-BUF"},
      {false, true, {EOPNOTSUPP}, true, false, true, "by nvidia_peermem; nic0"},
      {false, false, {}, true, false, true, "rdma-core before 34"},
      {false, false, {}, false, false, false, "host memory"},
      {true, true, {EBADF}, true, false, false, "HOCCL_NET_STAGING=1"},
  };
  for (const Case& each : cases) {
    GpuDirectFacts facts;
    facts.staging = each.staging;
    facts.library = each.library;
    facts.peerMemory = each.peerMemory;
    for (const int error : each.errors) {
      facts.trials.push_back({"nic" + std::to_string(facts.trials.size()), error});
    }
    const GpuDirect way = decideGpuDirect(facts);
    EXPECT_EQ(way.dmaBuf, each.dmaBuf) << way.text;
    EXPECT_EQ(way.peerMemory, each.peer) << way.text;
    EXPECT_NE(way.text.find(each.says), std::string::npos) << way.text;
    EXPECT_EQ(way.text.find('\n'), std::string::npos);
  }
}

TEST(GpuDirect, NicsAreAsked) {
  test::FakeFabric& fabric = test::FakeFabric::get();
  fabric.reset();
  fabric.add(0, "mlx5_0", "10.0.0.1");
  fabric.add(0, "mlx5_1", "10.0.1.1").dmaBufError = EOPNOTSUPP;
  {
    Nics nics;
    ASSERT_TRUE(openNics(test::FakeFabric::library(0), {}, &nics));
    const GpuDirectFacts facts = gatherGpuDirectFacts(nics, false);
    EXPECT_TRUE(facts.library);
    ASSERT_EQ(facts.trials.size(), 2u);
    EXPECT_EQ(facts.trials[0].error, EBADF);
    EXPECT_EQ(facts.trials[1].error, EOPNOTSUPP);
    EXPECT_FALSE(decideGpuDirect(facts).dmaBuf);
    nics.pop_back();
    EXPECT_TRUE(decideGpuDirect(gatherGpuDirectFacts(nics, false)).dmaBuf);
  }
  fabric.reset();
}

TEST(GpuDirect, Flush) {
  FlushFacts facts;
  facts.deviceMemory = true;
  facts.bytes = 8;
  EXPECT_TRUE(needsFlush(facts)) << "a GPU that is not known";
  for (const int before : {6, 7, 8}) {
    facts.computeCapability = before;
    EXPECT_TRUE(needsFlush(facts)) << before;
  }
  for (const int since : {9, 10, 12}) {
    facts.computeCapability = since;
    facts.coherentLink = false;
    EXPECT_FALSE(needsFlush(facts)) << since;
    facts.coherentLink = true;
    EXPECT_TRUE(needsFlush(facts)) << since;
  }
  FlushFacts none = facts;
  none.bytes = 0;
  EXPECT_FALSE(needsFlush(none));
  none = facts;
  none.deviceMemory = false;
  EXPECT_FALSE(needsFlush(none));
  none = facts;
  none.disabled = true;
  EXPECT_FALSE(needsFlush(none));
}

}  // namespace
}  // namespace hoccl::net_plugin
