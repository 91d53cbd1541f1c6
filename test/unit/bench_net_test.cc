// `hoccl bench net`: usage, and a short run between two real processes.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tools/bench/net_command.h"

namespace hoccl::bench {
namespace {

struct Outcome {
  int status;
  std::string out, errors;
};

Outcome run(const NetCommandLine& line) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int status = runNetBench(line, "test");
  Outcome outcome{status, testing::internal::GetCapturedStdout(), ""};
  outcome.errors = testing::internal::GetCapturedStderr();
  return outcome;
}

TEST(BenchNet, BadValuesAreUsageErrors) {
  auto expectUsage = [](const NetCommandLine& line, const std::string& named) {
    const Outcome outcome = run(line);
    EXPECT_EQ(outcome.status, 2) << named;
    EXPECT_NE(outcome.errors.find(named), std::string::npos) << outcome.errors;
  };
  expectUsage({.minBytes = "64Q"}, "64Q");
  expectUsage({.minBytes = "2M", .maxBytes = "1M"}, "--minbytes");
  expectUsage({.over = {"rdma"}}, "--over rdma");
  expectUsage({.address = "nowhere"}, "--address");
  expectUsage({.factor = 1}, "--stepfactor 1");
  expectUsage({.threads = 17}, "--threads 17");
  expectUsage({.threads = 16, .sockets = 16}, "64 sockets");
}

TEST(BenchNet, AnAddressThatIsNotThisHostsFailsAtOnce) {
  const Outcome outcome = run({.address = "192.0.2.1", .over = {"tcp"}});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.errors.find("192.0.2.1"), std::string::npos) << outcome.errors;
}

TEST(BenchNet, MeasuresEveryWayAndWritesTheRows) {
  const std::string file =
      (std::filesystem::temp_directory_path() / ("bench-net-" + std::to_string(::getpid())))
          .string();
  const Outcome outcome = run({.minBytes = "64KiB",
                               .maxBytes = "1MiB",
                               .jsonFile = file,
                               .factor = 16,
                               .batches = 1,
                               .threads = 2,
                               .sockets = 2});
  EXPECT_EQ(outcome.status, 0) << outcome.errors;
  EXPECT_NE(outcome.out.find("tcp against bare sockets"), std::string::npos) << outcome.out;
  std::ifstream stream(file);
  const auto report = nlohmann::json::parse(stream, nullptr, false);
  std::filesystem::remove(file);
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report["header"]["threads"], 2);
  std::set<std::string> seen;
  for (const auto& row : report["rows"]) {
    seen.insert(row["transport"].get<std::string>() + row["op"].get<std::string>());
    EXPECT_GT(row["time_us"].get<double>(), 0) << row;
    EXPECT_EQ(row["algbw_gbs"].is_null(), row["op"] != "net_bandwidth") << row;
    EXPECT_EQ(row["impl"] == "bare", row["transport"] == "sockets") << row;
  }
  EXPECT_EQ(seen.size(), 9u);
  EXPECT_EQ(report["rows"].size(), 12u);
}

}  // namespace
}  // namespace hoccl::bench
