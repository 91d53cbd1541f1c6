// How far GPUs are from each other over PCIe, and up to where copies between them go directly.

#include "common/gpu/p2p_level.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace hoccl {
namespace {

/// A machine as /sys shows it: GPUs by what is above them.
class Machine {
 public:
  Machine() {
    char name[] = "/tmp/hoccl-sysfs-XXXXXX";
    root_ = ::mkdtemp(name);
    std::filesystem::create_directories(root_ + "/bus/pci/devices");
  }
  ~Machine() { std::filesystem::remove_all(root_); }
  void add(const std::string& path, const std::string& node) {
    const std::string device = root_ + "/devices/" + path;
    std::filesystem::create_directories(device);
    std::ofstream(device + "/numa_node") << node << '\n';
    std::filesystem::create_directory_symlink(
        device, root_ + "/bus/pci/devices/" + std::filesystem::path(path).filename().string());
  }
  [[nodiscard]] const std::string& root() const { return root_; }

 private:
  std::string root_;
};

TEST(PciDistance, ByWhatTwoDevicesShare) {
  Machine machine;
  const std::string port = "pci0000:3a/0000:3a:00.0/0000:3b:00.0/";
  machine.add(port + "0000:3c:04.0/0000:3e:00.0", "0");
  machine.add(port + "0000:3c:08.0/0000:41:00.0", "0");
  machine.add(port + "0000:3c:0c.0/0000:42:00.0/0000:43:00.0/0000:44:00.0",
              "0");                                          // a further switch
  machine.add("pci0000:3a/0000:3a:01.0/0000:51:00.0", "0");  // another port of that root
  machine.add("pci0000:5d/0000:5d:00.0/0000:5e:00.0", "0");  // another root of that CPU
  machine.add("pci0000:85/0000:85:00.0/0000:86:00.0", "1");
  const std::string gpu = "0000:3E:00.0";  // as the driver writes it
  const auto to = [&](const char* other) { return pciDistance(gpu, other, machine.root()); };
  EXPECT_EQ(to("0000:41:00.0"), P2pLevel::Pix);
  EXPECT_EQ(to("0000:44:00.0"), P2pLevel::Pxb);
  EXPECT_EQ(to("0000:51:00.0"), P2pLevel::Phb);
  EXPECT_EQ(to("0000:5e:00.0"), P2pLevel::Phb);
  EXPECT_EQ(to("0000:86:00.0"), P2pLevel::Sys);
  EXPECT_EQ(to("0000:99:00.0"), P2pLevel::Sys) << "not there";
  EXPECT_EQ(pciDistance("0000:44:00.0", gpu, machine.root()), P2pLevel::Pxb) << "either way";
}

/// A machine without NUMA says -1 of all.
TEST(PciDistance, NoNodeIsNoCommonNode) {
  Machine machine;
  machine.add("pci0000:00/0000:00:04.0", "-1");
  machine.add("pci0000:00/0000:00:05.0", "-1");
  machine.add("pci0000:80/0000:80:05.0", "-1");
  EXPECT_EQ(pciDistance("0000:00:04.0", "0000:00:05.0", machine.root()), P2pLevel::Phb);
  EXPECT_EQ(pciDistance("0000:00:04.0", "0000:80:05.0", machine.root()), P2pLevel::Sys);
}

TEST(P2pLevel, NamesAndNcclsOldNumbers) {
  P2pLevel level{};
  for (const char* name : {"LOC", "NVL", "PIX", "PXB", "PHB", "SYS"}) {
    ASSERT_TRUE(parseP2pLevel(name, &level)) << name;
    EXPECT_STREQ(p2pLevelName(level), name);
  }
  const char* const old[] = {"LOC", "PIX", "PXB", "PHB", "SYS", "SYS"};
  for (int i = 0; i < 6; ++i) {
    ASSERT_TRUE(parseP2pLevel(std::to_string(i), &level));
    EXPECT_STREQ(p2pLevelName(level), old[i]) << i;
  }
  ASSERT_TRUE(parseP2pLevel("12", &level));
  EXPECT_EQ(level, P2pLevel::Sys);
  for (const char* nonsense : {"", "nvl", "PXB ", "-1", "1x"}) {
    EXPECT_FALSE(parseP2pLevel(nonsense, &level)) << nonsense;
  }
}

class P2pLimitOf : public ::testing::Test {
 protected:
  void SetUp() override { TearDown(); }
  void TearDown() override {
    for (const char* name : {"HOCCL_P2P", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"}) ::unsetenv(name);
    std::filesystem::remove(cpuinfo_);
  }
  std::string cpu(const std::string& vendor) {
    std::ofstream(cpuinfo_) << "processor\t: 0\nvendor_id\t: " << vendor << "\n";
    return cpuinfo_;
  }
  const std::string cpuinfo_ = ::testing::TempDir() + "hoccl-cpuinfo-" + std::to_string(::getpid());
};

TEST_F(P2pLimitOf, NothingSaidAsNcclDecides) {
  EXPECT_EQ(p2pLimit(2, cpu("GenuineIntel")).level, P2pLevel::Pxb);
  EXPECT_EQ(p2pLimit(2, cpu("AuthenticAMD")).level, P2pLevel::Sys);
  EXPECT_EQ(p2pLimit(4, cpu("AuthenticAMD")).level, P2pLevel::Pxb);
  EXPECT_EQ(p2pLimit(1, "/nowhere").level, P2pLevel::Pxb);
}

TEST_F(P2pLimitOf, NcclsVariables) {
  ::setenv("NCCL_P2P_LEVEL", "PHB", 1);
  EXPECT_EQ(p2pLimit(8).level, P2pLevel::Phb);
  EXPECT_EQ(p2pLimit(8).from, "NCCL_P2P_LEVEL");
  ::setenv("NCCL_P2P_DISABLE", "1", 1);
  EXPECT_EQ(p2pLimit(8).level, P2pLevel::Loc);
  EXPECT_EQ(p2pLimit(8).from, "NCCL_P2P_DISABLE");
  ::setenv("NCCL_P2P_DISABLE", "0", 1);
  EXPECT_EQ(p2pLimit(8).level, P2pLevel::Phb);
  ::setenv("NCCL_P2P_LEVEL", "far", 1);
  EXPECT_EQ(p2pLimit(8, cpu("GenuineIntel")).level, P2pLevel::Pxb) << "nonsense changes nothing";
}

TEST_F(P2pLimitOf, HocclsIsAheadOfThem) {
  ::setenv("HOCCL_P2P", "1", 1);
  ::setenv("NCCL_P2P_DISABLE", "1", 1);
  EXPECT_EQ(p2pLimit(8, cpu("GenuineIntel")).level, P2pLevel::Pxb);
  ::unsetenv("NCCL_P2P_DISABLE");
  ::setenv("NCCL_P2P_LEVEL", "LOC", 1);
  EXPECT_EQ(p2pLimit(8, cpu("GenuineIntel")).level, P2pLevel::Pxb);
  ::setenv("NCCL_P2P_LEVEL", "NVL", 1);
  EXPECT_EQ(p2pLimit(8).level, P2pLevel::Nvl) << "how far is still NCCL's to say";
}

}  // namespace
}  // namespace hoccl
