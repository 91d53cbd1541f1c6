// Every operation as a whole run of the program, on the emulated driver and the stand-in NCCL.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

namespace hoccl::bench {
namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class BenchOperationRun : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("hoccl_bench_operations_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// Runs `hoccl bench <arguments>`; the exit status, 124 when it did not end in time.
  int run(const std::string& arguments, const std::string& variables = "") {
    fs::remove(folder_ / "rows.json");
    const std::string command = "TMPDIR=" + folder_.string() + " HOCCL_EMULATE=always " +
                                variables +
                                " timeout -k 1 50 " HOCCL_TEST_BUILD_DIR "/tools/hoccl bench " +
                                arguments + " --json " + (folder_ / "rows.json").string() + " >" +
                                (folder_ / "out").string() + " 2>" + (folder_ / "err").string();
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  std::string said() const { return contents(folder_ / "out") + contents(folder_ / "err"); }
  nlohmann::json rows() const {
    return nlohmann::json::parse(contents(folder_ / "rows.json"))["rows"];
  }
  bool says(const std::string& text) const { return said().find(text) != std::string::npos; }

  fs::path folder_;
};

struct Expected {
  const char* operation;
  bool inPlace;
  std::uint64_t bytes2, bytes3;  // of 300007 with 2 and with 3 ranks
  double busFactor2, busFactor3;
};
// What a failing test is named by.
void PrintTo(const Expected& expected, std::ostream* out) { *out << expected.operation; }

constexpr Expected kExpected[] = {
    {"sendrecv", false, 300007, 300007, 1, 1},
    {"allgather", true, 300006, 300006, 0.5, 2.0 / 3},
    {"alltoall", false, 300006, 300006, 0.5, 2.0 / 3},
    {"alltoallv", false, 300006, 300006, 0.5, 2.0 / 3},
    {"broadcast", true, 300007, 300007, 1, 1},
    {"gather", true, 300006, 300006, 0.5, 2.0 / 3},
    {"scatter", true, 300006, 300006, 0.5, 2.0 / 3},
};
// What each of the runs above is given: little of everything, and odd addresses.
const std::string kSmall = " -b 300007 -e 300007 -n 2 --batches 1 -w 1 --offset 3 ";

class BenchEachOperation : public BenchOperationRun, public testing::WithParamInterface<Expected> {
 protected:
  void expectRows(const nlohmann::json& rows, const std::string& impl, std::uint64_t bytes,
                  double busFactor) {
    std::vector<bool> places;
    for (const auto& row : rows) {
      if (row["impl"] != impl) continue;
      if (row["path"] == "single") continue;  // the second row of the bare copies
      places.push_back(row["in_place"]);
      EXPECT_EQ(row["op"], GetParam().operation);
      EXPECT_EQ(row["bytes"], bytes);
      EXPECT_GT(row["time_us"], 0);
      EXPECT_NEAR(row["busbw_gbs"].get<double>() / row["algbw_gbs"].get<double>(), busFactor, 1e-9);
      if (impl == "bare") continue;
      EXPECT_EQ(row["errors"], 0) << row;
      EXPECT_GT(row["launch_us"], 0);
      EXPECT_TRUE(row["path"] == "staged" || row["path"] == "nccl" || row["path"] == "mixed")
          << row;
    }
    std::vector<bool> expected{false};
    if (GetParam().inPlace) expected.push_back(true);
    EXPECT_EQ(places, expected) << impl;
  }
};

TEST_P(BenchEachOperation, TwoRanksBesideNcclAndBareCopies) {
  const Expected& expected = GetParam();
  ASSERT_EQ(run(expected.operation + kSmall + "-g 2 --compare nccl,bare"), 0) << said();
  for (const char* impl : {"hoccl", "nccl", "bare"})
    expectRows(rows(), impl, expected.bytes2, expected.busFactor2);
  EXPECT_TRUE(says("# hoccl against bare (steady)")) << said();
}

TEST_P(BenchEachOperation, ThreeRanks) {
  const Expected& expected = GetParam();
  // The last rank as root, where there is one.
  const bool rooted =
      std::string("broadcast gather scatter").find(expected.operation) != std::string::npos;
  ASSERT_EQ(run(expected.operation + kSmall + "-g 3" + (rooted ? " --root 2" : "")), 0) << said();
  expectRows(rows(), "hoccl", expected.bytes3, expected.busFactor3);
}

INSTANTIATE_TEST_SUITE_P(All, BenchEachOperation, testing::ValuesIn(kExpected),
                         [](const auto& info) { return std::string(info.param.operation); });

TEST_F(BenchOperationRun, NothingMovedIsWrongInEveryByteThatHadToCome) {
  // A stand-in that moves nothing; one checked operation and one look after the timed ones.
  struct Case {
    const char* operation;
    std::vector<std::uint64_t> wrong;  // out of place, in place
  };
  for (const auto& [operation, wrong] :
       {Case{"allgather", {4000, 2000}}, Case{"alltoall", {4000}}, Case{"alltoallv", {4000}},
        Case{"broadcast", {4000, 2000}}, Case{"gather", {2000, 1000}},
        Case{"scatter", {2000, 1000}}}) {
    EXPECT_EQ(run(std::string(operation) + " --impl nccl -b 1000 -e 1000 -n 1 --batches 1 -w 0",
                  "NCCLSTANDIN_MOVE=0"),
              1)
        << said();
    std::vector<std::uint64_t> counted;
    for (const auto& row : rows()) counted.push_back(row["errors"]);
    EXPECT_EQ(counted, wrong) << operation;
  }
}

class BenchGrouped : public BenchOperationRun, public testing::WithParamInterface<const char*> {};

TEST_P(BenchGrouped, OnRequest) {
  ASSERT_EQ(run(GetParam() + kSmall + "--grouped -g 3"), 0) << said();
  EXPECT_TRUE(says("; as grouped send/recv\n")) << said();
  for (const auto& row : rows()) EXPECT_EQ(row["errors"], 0) << row;
}

INSTANTIATE_TEST_SUITE_P(All, BenchGrouped, testing::Values("alltoall", "gather", "scatter"),
                         [](const auto& info) { return std::string(info.param); });

TEST_F(BenchOperationRun, TheHeadLinesSayWhatIsMeasured) {
  ASSERT_EQ(run("alltoallv --skew 5 -b 64K -e 64K -n 1 --batches 1 -w 0"), 0) << said();
  EXPECT_TRUE(says("bench alltoallv: 2 ranks, skew 5")) << said();
  EXPECT_TRUE(says("# bytes: bytes one rank sends, the block for itself included")) << said();
  EXPECT_TRUE(says("; as grouped send/recv\n")) << said();
}

}  // namespace
}  // namespace hoccl::bench
