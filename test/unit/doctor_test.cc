#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/config_command.h"
#include "tools/doctor_command.h"

namespace hoccl {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kTimeoutMs = 10000;
constexpr int kNccl2_28_9 = 22809;
const std::string kFixtures = HOCCL_TEST_FIXTURE_DIR;

std::string fixture(const std::string& name) { return kFixtures + "/" + name; }

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

class DoctorTest : public ::testing::Test {
 protected:
  void SetUp() override {
    clearEnvironment();
    char folder[] = "/tmp/hoccl-doctor-test-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    folder_ = folder;
  }
  void TearDown() override {
    clearEnvironment();
    fs::remove_all(folder_);
  }
  static void clearEnvironment() {
    for (const char* variable :
         {"LD_PRELOAD", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN",
          "HOCCL_CORE_LIB", "HOCCL_MOVER_PATH", "HOCCL_STEER", "HOCCL_SLOTS", "HOCCL_SPIN_US"}) {
      ::unsetenv(variable);
    }
  }

  // lib/libnccl-tuner-hoccl.so, lib/libhoccl.so and bin/hoccl-mover under the test's folder.
  std::string installHoccl() {
    fs::create_directories(folder_ / "lib");
    fs::create_directories(folder_ / "bin");
    fs::copy_file(fixture("fake-shim.so"), folder_ / "lib/libnccl-tuner-hoccl.so");
    fs::copy_file(fixture("fake-core.so"), folder_ / "lib/libhoccl.so");
    makeExecutable(folder_ / "bin/hoccl-mover");
    return (folder_ / "lib/libnccl-tuner-hoccl.so").string();
  }
  static void makeExecutable(const fs::path& path) {
    std::ofstream(path) << "#!/bin/sh\n";
    ASSERT_EQ(::chmod(path.c_str(), 0755), 0);
  }

  static PluginsReport examineWith(const char* variable, const std::string& value,
                                   int ncclVersion = kNccl2_28_9,
                                   std::uint64_t timeoutMs = kTimeoutMs) {
    ::setenv(variable, value.c_str(), 1);
    PluginsReport report = examinePlugins(ncclVersion, timeoutMs);
    ::unsetenv(variable);
    return report;
  }
  // The one plugin named, which must not fit, and its problems in one text.
  static std::string problemsWith(const char* variable, const std::string& value,
                                  int ncclVersion = kNccl2_28_9,
                                  std::uint64_t timeoutMs = kTimeoutMs) {
    const PluginsReport report = examineWith(variable, value, ncclVersion, timeoutMs);
    EXPECT_FALSE(report.ok);
    EXPECT_EQ(report.plugins.size(), 1u);
    std::string text;
    for (const PluginReport& plugin : report.plugins) {
      EXPECT_FALSE(plugin.fits());
      for (const std::string& problem : plugin.problems) text += problem + "\n";
      for (const CompanionReport& companion : plugin.companions) {
        if (!companion.problem.empty()) text += companion.what + ": " + companion.problem + "\n";
      }
    }
    return text;
  }

  fs::path folder_;
};

TEST_F(DoctorTest, NamesAreTriedInNcclsOrder) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(candidateNames(PluginKind::Net, "foo"), (Names{"foo", "libnccl-net-foo.so"}));
  EXPECT_EQ(candidateNames(PluginKind::Tuner, "foo"), (Names{"foo", "libnccl-tuner-foo.so"}));
  EXPECT_EQ(candidateNames(PluginKind::Profiler, "foo"), (Names{"foo", "libnccl-profiler-foo.so"}));
  EXPECT_EQ(candidateNames(PluginKind::Net, "./foo"), (Names{"./foo"}));
  EXPECT_EQ(candidateNames(PluginKind::Net, "libfoo.so"), (Names{"libfoo.so"}));
  EXPECT_EQ(candidateNames(PluginKind::Net, "libfoo.so.1"),
            (Names{"libfoo.so.1", "libnccl-net-libfoo.so.1.so"}));
  EXPECT_EQ(candidateNames(PluginKind::Net, "foo.so"), (Names{"foo.so", "libnccl-net-foo.so.so"}));
  EXPECT_EQ(candidateNames(PluginKind::Preload, "foo"), (Names{"foo"}));
}

TEST_F(DoctorTest, NothingNamedIsPlainNccl) {
  const PluginsReport report = examinePlugins(kNccl2_28_9, kTimeoutMs);
  EXPECT_FALSE(report.ok);
  EXPECT_FALSE(report.steered);
  EXPECT_TRUE(report.plugins.empty());
  EXPECT_EQ(report.unset.size(), 4u);
  EXPECT_CONTAINS(report.verdict, "plain NCCL");
}

TEST_F(DoctorTest, PluginThatLoadsAndFits) {
  const std::string path = fixture("libnccl-net-fake.so");
  const PluginsReport report = examineWith("NCCL_NET_PLUGIN", path);
  ASSERT_EQ(report.plugins.size(), 1u);
  EXPECT_TRUE(report.ok) << report.verdict;
  EXPECT_EQ(report.plugins[0].file, path);
  EXPECT_EQ(report.plugins[0].versions, (std::vector<int>{8, 11}));
  EXPECT_TRUE(examineWith("NCCL_TUNER_PLUGIN", fixture("libnccl-tuner-fake.so")).ok);
}

// The real one: loaded, initialised, its own line among the notes.
TEST_F(DoctorTest, HocclsNetPlugin) {
  const std::string path = HOCCL_TEST_BUILD_DIR "/plugin-net/libnccl-net-hoccl.so";
  const PluginsReport report = examineWith("NCCL_NET_PLUGIN", path);
  ASSERT_EQ(report.plugins.size(), 1u);
  EXPECT_TRUE(report.ok) << report.verdict;
  EXPECT_EQ(report.plugins[0].versions, (std::vector<int>{8, 9, 10, 11, 12}));
  EXPECT_TRUE(report.plugins[0].hocclNet);
  ASSERT_EQ(report.plugins[0].notes.size(), 1u);
  EXPECT_CONTAINS(report.plugins[0].notes[0], "transport tcp");
  EXPECT_CONTAINS(report.verdict, "HOCCL's net plugin");
}

TEST_F(DoctorTest, HocclsNetPluginWithoutAnInterface) {
  ::setenv("NCCL_SOCKET_IFNAME", "=nosuch0", 1);
  const PluginsReport report =
      examineWith("NCCL_NET_PLUGIN", HOCCL_TEST_BUILD_DIR "/plugin-net/libnccl-net-hoccl.so");
  ::unsetenv("NCCL_SOCKET_IFNAME");
  EXPECT_FALSE(report.ok);
  ASSERT_EQ(report.plugins[0].problems.size(), 1u);
  EXPECT_CONTAINS(report.plugins[0].problems[0], "NCCL_SOCKET_IFNAME");
  EXPECT_EQ(report.verdict.find("HOCCL's net plugin"), std::string::npos);
}

TEST_F(DoctorTest, BareNameThatIsNowhereNamesBothTries) {
  const std::string text = problemsWith("NCCL_NET_PLUGIN", "no-such-thing");
  EXPECT_CONTAINS(text, "no-such-thing: not found");
  EXPECT_CONTAINS(text, "libnccl-net-no-such-thing.so: not found");
  EXPECT_CONTAINS(text, "LD_LIBRARY_PATH");
}

TEST_F(DoctorTest, MissingFile) {
  EXPECT_CONTAINS(problemsWith("NCCL_NET_PLUGIN", "/no/such/file.so"), "no such file");
  EXPECT_CONTAINS(problemsWith("LD_PRELOAD", "/no/such/file.so"), "no such file");
}

TEST_F(DoctorTest, PluginOfTheWrongKindOrVersion) {
  EXPECT_CONTAINS(problemsWith("NCCL_NET_PLUGIN", fixture("libnccl-tuner-fake.so")),
                  "no plugin for NCCL_NET_PLUGIN");
  const std::string text =
      problemsWith("NCCL_PROFILER_PLUGIN", fixture("libnccl-profiler-fake.so"));
  EXPECT_CONTAINS(text, "NCCL 2.28.9 takes ncclProfiler_v1 to ncclProfiler_v5, this has v7");
  EXPECT_TRUE(examineWith("NCCL_PROFILER_PLUGIN", fixture("libnccl-profiler-fake.so"), 23102).ok);
  EXPECT_TRUE(examineWith("NCCL_PROFILER_PLUGIN", fixture("libnccl-profiler-fake.so"), 0).ok)
      << "an unknown NCCL refuses nothing";
}

TEST_F(DoctorTest, BrokenLibrariesAreNamedAndHurtNobody) {
  EXPECT_CONTAINS(problemsWith("NCCL_NET_PLUGIN", fixture("libundefined.so")), "definedNowhere");
  EXPECT_CONTAINS(problemsWith("NCCL_NET_PLUGIN", fixture("libcrashes.so")), "signal 6");
  EXPECT_CONTAINS(problemsWith("NCCL_NET_PLUGIN", fixture("libexits.so")), "ended the process");
  EXPECT_CONTAINS(problemsWith("NCCL_NET_PLUGIN", fixture("libhangs.so"), kNccl2_28_9, 300),
                  "no end within 300 ms");
  EXPECT_CONTAINS(problemsWith("NCCL_NET_PLUGIN", fixture("libneeds-nowhere.so")),
                  "needs libnowhere.so");
}

TEST_F(DoctorTest, FilesThatAreNoLibraries) {
  const fs::path text = folder_ / "text.so";
  std::ofstream(text) << std::string(4096, 'x');
  EXPECT_CONTAINS(problemsWith("NCCL_NET_PLUGIN", text.string()), "invalid ELF header");
  // A 32-bit header on an otherwise right library.
  const fs::path other = folder_ / "other.so";
  fs::copy_file(fixture("libplain.so"), other);
  std::fstream file(other, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(4);  // EI_CLASS
  file.put(1);    // ELFCLASS32
  file.close();
  EXPECT_CONTAINS(problemsWith("LD_PRELOAD", other.string()), "wrong ELF class");
}

TEST_F(DoctorTest, NoneDisablesAndLongNamesAreCut) {
  const PluginsReport none = examineWith("NCCL_NET_PLUGIN", "None");
  EXPECT_TRUE(none.ok);
  EXPECT_TRUE(none.plugins[0].disabled);
  EXPECT_CONTAINS(problemsWith("NCCL_NET_PLUGIN", std::string(255, 'x')), "255 bytes");
}

TEST_F(DoctorTest, ListsAreSplitAsTheirReadersDo) {
  const std::string net = fixture("libnccl-net-fake.so");
  EXPECT_EQ(examineWith("NCCL_NET_PLUGIN", net + "," + net).plugins.size(), 2u);
  const std::string plain = fixture("libplain.so");
  EXPECT_EQ(examineWith("LD_PRELOAD", plain + ":" + plain + " " + plain + ":").plugins.size(), 3u);
}

TEST_F(DoctorTest, InstalledHocclIsFoundWithItsCompanions) {
  const std::string shim = installHoccl();
  const PluginsReport report = examineWith("LD_PRELOAD", shim);
  ASSERT_EQ(report.plugins.size(), 1u);
  const PluginReport& plugin = report.plugins[0];
  EXPECT_TRUE(report.ok) << report.verdict;
  EXPECT_TRUE(report.steered);
  EXPECT_TRUE(plugin.steering);
  EXPECT_TRUE(plugin.interposesSend);
  ASSERT_EQ(plugin.companions.size(), 2u);
  EXPECT_EQ(plugin.companions[0].file, (folder_ / "lib/libhoccl.so").string());
  EXPECT_EQ(plugin.companions[1].file, (folder_ / "bin/hoccl-mover").string());
  EXPECT_CONTAINS(report.verdict, "HOCCL steers");
  ::setenv("HOCCL_STEER", "0", 1);
  const PluginsReport off = examineWith("LD_PRELOAD", shim);
  ::unsetenv("HOCCL_STEER");
  EXPECT_FALSE(off.steered);
  EXPECT_CONTAINS(off.verdict, "does not steer");
}

TEST_F(DoctorTest, MissingCompanionsAreProblems) {
  const std::string shim = installHoccl();
  fs::remove(folder_ / "lib/libhoccl.so");
  EXPECT_CONTAINS(problemsWith("LD_PRELOAD", shim), "core: ");
  fs::create_directories(folder_ / "other");
  fs::copy_file(fixture("fake-core.so"), folder_ / "other/core.so");
  ::setenv("HOCCL_CORE_LIB", (folder_ / "other/core.so").c_str(), 1);
  EXPECT_TRUE(examineWith("LD_PRELOAD", shim).ok) << "the mover is in bin/ beside other/";
  ::chmod((folder_ / "bin/hoccl-mover").c_str(), 0644);
  if (::geteuid() != 0 || ::access((folder_ / "bin/hoccl-mover").c_str(), X_OK) != 0) {
    EXPECT_CONTAINS(problemsWith("LD_PRELOAD", shim), "not executable");
  }
  fs::remove(folder_ / "bin/hoccl-mover");
  EXPECT_CONTAINS(problemsWith("LD_PRELOAD", shim), "set HOCCL_MOVER_PATH");
  makeExecutable(folder_ / "my-mover");
  ::setenv("HOCCL_MOVER_PATH", (folder_ / "my-mover").c_str(), 1);
  EXPECT_TRUE(examineWith("LD_PRELOAD", shim).ok);
  ::setenv("HOCCL_MOVER_PATH", "/no/mover", 1);
  EXPECT_CONTAINS(problemsWith("LD_PRELOAD", shim), "/no/mover: No such file or directory");
  fs::create_directories(folder_ / "libexec");
  ::unsetenv("HOCCL_MOVER_PATH");
  makeExecutable(folder_ / "libexec/hoccl-mover");
  EXPECT_TRUE(examineWith("LD_PRELOAD", shim).ok);
}

TEST_F(DoctorTest, PreloadsThatWouldNotSteer) {
  const std::string shim = installHoccl();
  const PluginsReport plain = examineWith("LD_PRELOAD", fixture("libplain.so"));
  EXPECT_TRUE(plain.ok) << "it loads, and promises nothing";
  EXPECT_FALSE(plain.steered);
  EXPECT_CONTAINS(plain.verdict, "does not steer");
  EXPECT_CONTAINS(problemsWith("LD_PRELOAD", fixture("libshim-without-send.so")), "ncclSend");
  // Another library's ncclSend in front takes the calls.
  const PluginsReport behind = examineWith("LD_PRELOAD", fixture("libsends.so") + ":" + shim);
  EXPECT_FALSE(behind.ok);
  EXPECT_FALSE(behind.steered);
  ASSERT_EQ(behind.plugins.size(), 2u);
  ASSERT_EQ(behind.plugins[1].problems.size(), 1u);
  EXPECT_CONTAINS(behind.plugins[1].problems[0], "libsends.so comes before it");
  EXPECT_TRUE(examineWith("LD_PRELOAD", shim + ":" + fixture("libsends.so")).steered);
  // A file of HOCCL's name that is something else.
  fs::copy_file(fixture("libplain.so"), folder_ / "libnccl-tuner-hoccl.so");
  EXPECT_CONTAINS(problemsWith("LD_PRELOAD", (folder_ / "libnccl-tuner-hoccl.so").string()),
                  "not HOCCL's");
}

TEST_F(DoctorTest, AcceptedVersionsFollowTheReleases) {
  EXPECT_EQ(acceptedVersions(PluginKind::Net, 22809).highest, 11);
  EXPECT_EQ(acceptedVersions(PluginKind::Net, 22809).lowest, 6);
  EXPECT_EQ(acceptedVersions(PluginKind::Net, 22005).highest, 8);
  EXPECT_EQ(acceptedVersions(PluginKind::Tuner, 22105).lowest, 2);
  EXPECT_EQ(acceptedVersions(PluginKind::Tuner, 23007).highest, 6);
  EXPECT_EQ(acceptedVersions(PluginKind::Profiler, 22203).highest, 0);
  EXPECT_EQ(ncclVersionText(22809), "2.28.9");
  EXPECT_EQ(ncclVersionText(2708), "2.7.8");
  EXPECT_EQ(cudaVersionText(13000), "13.0");
  EXPECT_EQ(cudaVersionText(12040), "12.4");
}

TEST_F(DoctorTest, ReportsAreTextAndJson) {
  const std::string shim = installHoccl();
  ::setenv("LD_PRELOAD", shim.c_str(), 1);
  ::setenv("NCCL_NET_PLUGIN", "/no/such\xff.so", 1);
  const DoctorReport report = examine(false);
  ::unsetenv("LD_PRELOAD");
  ::unsetenv("NCCL_NET_PLUGIN");
  EXPECT_FALSE(report.ok);
  const std::string text = renderText(report);
  EXPECT_CONTAINS(text, "LD_PRELOAD = " + shim);
  EXPECT_CONTAINS(text, "PROBLEM");
  EXPECT_CONTAINS(text, "memlock limit");
  EXPECT_CONTAINS(text, "verdict: 1 of 2 named do not load or do not fit");
  const auto json = nlohmann::json::parse(renderJson(report));
  EXPECT_FALSE(json["ok"].get<bool>());
  EXPECT_EQ(json["plugins"].size(), 2u);
  EXPECT_TRUE(json["plugins"][0]["fits"].get<bool>());
  EXPECT_FALSE(json["plugins"][1]["fits"].get<bool>());
  EXPECT_TRUE(json.contains("memlock"));
}

TEST_F(DoctorTest, BadConfigurationIsReported) {
  ::setenv("HOCCL_SLOTS", "none", 1);
  const DoctorReport report = examine(false);
  std::string problems;
  const std::string table = renderConfig(false, &problems);
  std::string jsonProblems;
  const auto json = nlohmann::json::parse(renderConfig(true, &jsonProblems));
  ::unsetenv("HOCCL_SLOTS");
  EXPECT_FALSE(report.ok);
  EXPECT_CONTAINS(renderText(report), "HOCCL_SLOTS='none'");
  EXPECT_CONTAINS(problems, "HOCCL_SLOTS='none'");
  EXPECT_EQ(problems, jsonProblems);
  EXPECT_CONTAINS(table, "HOCCL_SLOTS");
  for (const auto& row : json) {
    if (row["variable"] != "HOCCL_SLOTS") continue;
    EXPECT_EQ(row["source"], "default");
  }
}

TEST_F(DoctorTest, ConfigTellsWhereAValueComesFrom) {
  ::setenv("HOCCL_SPIN_US", "7", 1);
  std::string problems;
  const auto json = nlohmann::json::parse(renderConfig(true, &problems));
  ::unsetenv("HOCCL_SPIN_US");
  EXPECT_EQ(problems, "");
  int fromEnvironment = 0;
  for (const auto& row : json) {
    if (row["source"] != "environment") continue;
    ++fromEnvironment;
    EXPECT_EQ(row["variable"], "HOCCL_SPIN_US");
    EXPECT_EQ(row["value"], "7");
    EXPECT_EQ(row["allowed"], "0 to 1000000 (us)");
  }
  EXPECT_EQ(fromEnvironment, 1);
}

}  // namespace
}  // namespace hoccl
