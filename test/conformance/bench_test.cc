// `hoccl bench regmr`, which drives the plugin as NCCL does, on the emulated driver.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "test/conformance/processes.h"

namespace conformance {
namespace {

Outcome bench(std::vector<std::string> options, const std::vector<std::string>& environment = {}) {
  std::vector<std::string> command{CONFORMANCE_TOOL, "bench", "regmr"};
  command.insert(command.end(), options.begin(), options.end());
  std::vector<std::string> all{"LD_LIBRARY_PATH=" CONFORMANCE_EMULATOR_DIR,
                               "EMUCUDA_SESSION=regmr" + std::to_string(::getpid())};
  all.insert(all.end(), environment.begin(), environment.end());
  return runProgram(command, all);
}

TEST(BenchRegistration, TimesNewAndKnownMemory) {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("regmr-" + std::to_string(::getpid()));
  const Outcome outcome = bench({"--bytes", "2MiB", "--count", "5", "--json", file.string()});
  ASSERT_TRUE(outcome.ok()) << outcome.text();
  std::ifstream stream(file);
  const auto report = nlohmann::json::parse(stream, nullptr, false);
  std::filesystem::remove(file);
  ASSERT_TRUE(report.is_object());
  ASSERT_EQ(report["rows"].size(), 2u);
  for (const auto& row : report["rows"]) {
    EXPECT_EQ(row["bytes"], 2 << 20);
    EXPECT_EQ(row["times_us"].size(), 5u);
    EXPECT_GT(row["time_us"].get<double>(), 0);
  }
  EXPECT_EQ(report["rows"][0]["allocation"], "fresh");
  EXPECT_EQ(report["rows"][1]["allocation"], "known");
}

TEST(BenchRegistration, SaysWhatIsWrong) {
  Outcome outcome = bench({"--count", "0"});
  EXPECT_FALSE(outcome.ok());
  EXPECT_NE(outcome.output.find("--count 0"), std::string::npos) << outcome.text();
  outcome = bench({"--bytes", "2MiB"}, {"NCCL_PROTO=LL128"});
  EXPECT_FALSE(outcome.ok());
  EXPECT_NE(outcome.output.find("does not take device memory"), std::string::npos)
      << outcome.text();
  outcome = bench({"--bytes", "100GiB", "--count", "9"});  // the emulated GPU has not so much
  EXPECT_FALSE(outcome.ok());
  EXPECT_NE(outcome.output.find("cuMemAlloc"), std::string::npos) << outcome.text();
}

}  // namespace
}  // namespace conformance
