#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tools/bench/locate.h"
#include "tools/bench/nccl_api.h"
#include "tools/bench/rank_environment.h"

namespace hoccl::bench {
namespace {

namespace fs = std::filesystem;
using Entries = std::vector<std::string>;

std::string valueOf(const Entries& entries, const std::string& name) {
  std::string value = "(unset)";
  int found = 0;
  for (const std::string& entry : entries)
    if (entry.rfind(name + "=", 0) == 0) {
      value = entry.substr(name.size() + 1);
      ++found;
    }
  EXPECT_LE(found, 1) << name << " appears " << found << " times";
  return value;
}

TEST(BenchEnvironment, PreloadComesBeforeTheUsersOwn) {
  RankEnvironment rank;
  rank.preload = "/opt/lib/libnccl-tuner-hoccl.so";
  EXPECT_EQ(valueOf(rank.applyTo({"A=1"}), "LD_PRELOAD"), rank.preload);
  EXPECT_EQ(valueOf(rank.applyTo({"LD_PRELOAD=libjemalloc.so"}), "LD_PRELOAD"),
            rank.preload + ":libjemalloc.so");
  // Once only, whichever copy the user's shell has.
  EXPECT_EQ(valueOf(rank.applyTo({"LD_PRELOAD=/old/libnccl-tuner-hoccl.so"}), "LD_PRELOAD"),
            rank.preload);
}

TEST(BenchEnvironment, PlainNcclIsPlain) {
  const Entries entries = RankEnvironment{}.applyTo(
      {"LD_PRELOAD=/a/libnccl-tuner-hoccl.so libjemalloc.so", "NCCL_TUNER_PLUGIN=hoccl",
       "NCCL_NET_PLUGIN=aws-ofi", "NCCL_PROFILER_PLUGIN=/x/libnccl-tuner-hoccl.so",
       "HOCCL_SLOTS=4"});
  EXPECT_EQ(valueOf(entries, "LD_PRELOAD"), "libjemalloc.so");
  EXPECT_EQ(valueOf(entries, "NCCL_TUNER_PLUGIN"), "(unset)");
  EXPECT_EQ(valueOf(entries, "NCCL_PROFILER_PLUGIN"), "(unset)");
  EXPECT_EQ(valueOf(entries, "NCCL_NET_PLUGIN"), "aws-ofi");
  EXPECT_EQ(valueOf(entries, "HOCCL_SLOTS"), "4");
}

TEST(BenchEnvironment, ReplacesAndAdds) {
  RankEnvironment rank;
  rank.hostId = "node-1";
  rank.libraryPath = "/emulator";
  rank.extra = {"EMUCUDA_DEVICES=2", "B=new=value", "D"};
  const Entries entries =
      rank.applyTo({"NCCL_HOSTID=all", "LD_LIBRARY_PATH=/cuda", "B=old", "C=3", "D=4", "DD=5"});
  EXPECT_EQ(valueOf(entries, "D"), "(unset)");
  EXPECT_EQ(valueOf(entries, "DD"), "5");
  EXPECT_EQ(valueOf(entries, "NCCL_HOSTID"), "node-1");
  EXPECT_EQ(valueOf(entries, "LD_LIBRARY_PATH"), "/emulator:/cuda");
  EXPECT_EQ(valueOf(entries, "EMUCUDA_DEVICES"), "2");
  EXPECT_EQ(valueOf(entries, "B"), "new=value");
  EXPECT_EQ(valueOf(entries, "C"), "3");
}

TEST(BenchEnvironment, NcclTransportFromItsLog) {
  EXPECT_EQ(ncclTransportIn("host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via "
                            "NET/Socket/0\nhost:1:2 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] "
                            "[send] via NET/Socket/0\n"),
            "NET/Socket");
  EXPECT_EQ(ncclTransportIn("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"), "P2P/CUMEM");
  EXPECT_EQ(ncclTransportIn("0 -> 1 via SHM/direct/direct\n1 -> 2 via NET/IB/0(2)/GDRDMA"),
            "NET/IB+SHM/direct");
  EXPECT_EQ(ncclTransportIn("NCCL INFO Using network Socket\n"), "");
  EXPECT_EQ(ncclTransportIn("0 -> 1 via SHM/"), "SHM/");
}

TEST(BenchEnvironment, NcclCopyEnginesFromItsLog) {
  EXPECT_TRUE(
      ncclCopyEnginesIn("host:1:2 [0] NCCL INFO Init CE, rank 0 baseUCSymReadyPtr 0x7f00\n"));
  EXPECT_FALSE(
      ncclCopyEnginesIn("host:1:2 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 - "
                        "Init COMPLETE\n"));
  EXPECT_FALSE(ncclCopyEnginesIn(""));
}

class BenchLocations : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("hoccl_bench_locate_" + std::to_string(::getpid()));
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  std::string file(const std::string& relative) {
    const fs::path path = root_ / relative;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << "x";
    return path.string();
  }
  fs::path root_;
};

TEST_F(BenchLocations, BuildTree) {
  const Locations here(file("tools/hoccl"));
  const std::string shim = file("plugin-tuner/libnccl-tuner-hoccl.so");
  file("test/emulator/libcuda.so.1");
  file("test/nccl-standin/libnccl.so.2");
  std::string path;
  ASSERT_TRUE(here.shim(&path));
  EXPECT_EQ(path, shim);
  ASSERT_TRUE(here.emulatorPath(&path));
  EXPECT_EQ(path,
            (root_ / "test/emulator").string() + ":" + (root_ / "test/nccl-standin").string());
}

TEST_F(BenchLocations, Installed) {
  const Locations here(file("bin/hoccl"));
  const std::string shim = file("lib/libnccl-tuner-hoccl.so");
  file("lib/hoccl/emulator/libcuda.so.1");
  file("lib/hoccl/emulator/libnccl.so.2");
  std::string path;
  ASSERT_TRUE(here.shim(&path));
  EXPECT_EQ(path, shim);
  ASSERT_TRUE(here.emulatorPath(&path));
  EXPECT_EQ(path, (root_ / "lib/hoccl/emulator").string());
}

TEST_F(BenchLocations, MissingPartsAreNamedWithWhereTheyWereLookedFor) {
  const Locations here(file("bin/hoccl"));
  std::string path = "untouched";
  const Status shim = here.shim(&path);
  ASSERT_FALSE(shim);
  EXPECT_NE(shim.message().find((root_ / "lib/libnccl-tuner-hoccl.so").string()), std::string::npos)
      << shim.message();
  const Status emulator = here.emulatorPath(&path);
  ASSERT_FALSE(emulator);
  EXPECT_NE(emulator.message().find((root_ / "lib/hoccl/emulator/libcuda.so.1").string()),
            std::string::npos)
      << emulator.message();
  EXPECT_EQ(path, "untouched");
}

TEST_F(BenchLocations, NcclOfAPythonInstallation) {
  const std::string nccl = file("venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2");
  const char* before = std::getenv("VIRTUAL_ENV");
  const std::string kept = before ? before : "";
  ::setenv("VIRTUAL_ENV", (root_ / "venv").c_str(), 1);
  std::string places;
  const auto candidates = ncclCandidates("", &places);
  if (before)
    ::setenv("VIRTUAL_ENV", kept.c_str(), 1);
  else
    ::unsetenv("VIRTUAL_ENV");
  ASSERT_GE(candidates.size(), 2u);
  EXPECT_EQ(candidates[0], "libnccl.so.2");
  EXPECT_EQ(candidates[1], nccl);
  EXPECT_NE(places.find((root_ / "venv").string()), std::string::npos);
  EXPECT_EQ(ncclCandidates("/mine/libnccl.so.2", &places), Entries{"/mine/libnccl.so.2"});
}

TEST(BenchSteering, CountsAllCommunicators) {
  SteeringCounts counts;
  const Status status = parseSteeringCounts(
      R"({"communicators":[
        {"id":"a","rank":0,"transport":"shm","paths":{"staged":{"ops":5,"bytes":10},"nccl":{"ops":2,"bytes":4}},
         "reasons":{"below HOCCL_MIN_BYTES":2,"captured":0}},
        {"id":"b","rank":1,"paths":{"staged":{"ops":1,"bytes":1}},"reasons":{}}]})",
      &counts);
  ASSERT_TRUE(status) << status.message();
  EXPECT_TRUE(counts.known);
  EXPECT_EQ(counts.staged, 6u);
  EXPECT_EQ(counts.nccl, 2u);
  EXPECT_EQ(counts.reasons, "below HOCCL_MIN_BYTES: 2");
  EXPECT_EQ(counts.transport, "shm");
}

/// Or an AlltoAllv whose pairs went directly would be called mixed.
TEST(BenchSteering, OwnBlocksByKernelAreNoPathBetweenRanks) {
  SteeringCounts counts;
  ASSERT_TRUE(parseSteeringCounts(
      R"({"communicators":[{"paths":{"staged":{"ops":0,"bytes":0},"direct":{"ops":4,"bytes":8},
          "own-block":{"ops":2,"bytes":4}},"reasons":{}}]})",
      &counts));
  EXPECT_EQ(counts.staged, 0u);
  EXPECT_EQ(counts.direct, 4u);
}

TEST(BenchSteering, AnUnsteeredCommunicatorSaysWhy) {
  SteeringCounts counts;
  ASSERT_TRUE(parseSteeringCounts(
      R"({"communicators":[{"why":"rank 1 has version 0.2","paths":{"nccl":{"ops":3,"bytes":9}},
          "reasons":{"unsteered communicator":3}}]})",
      &counts));
  EXPECT_EQ(counts.nccl, 3u);
  EXPECT_EQ(counts.reasons, "rank 1 has version 0.2, unsteered communicator: 3");
}

TEST(BenchSteering, OtherTextIsAnError) {
  SteeringCounts counts;
  for (const char* text : {"", "{", "[]", "{}", R"({"communicators":{}})"})
    EXPECT_FALSE(parseSteeringCounts(text, &counts)) << text;
  EXPECT_FALSE(counts.known);
}

}  // namespace
}  // namespace hoccl::bench
