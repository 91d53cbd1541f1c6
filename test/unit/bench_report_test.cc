#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tools/bench/report.h"

namespace hoccl::bench {
namespace {

Row fullRow() {
  Row row;
  row.impl = "hoccl";
  row.op = "sendrecv";
  row.path = "staged";
  row.transport = "shm";
  row.device = "NVIDIA H200";
  row.ranks = 2;
  row.bytes = 1 << 20;
  row.count = 1 << 18;
  row.dtype = "float";
  row.iters = 100;
  row.timeUs = 21.5;
  row.errors = 0;
  row.launchUs = 1.25;
  row.launchP99Us = 3.5;
  row.launchIdleUs = 7.5;
  row.kernels = 0;
  return row;
}

std::vector<std::string> words(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> result;
  for (std::string word; stream >> word;) result.push_back(word);
  return result;
}

TEST(BenchReport, BandwidthIsBytesByTime) {
  EXPECT_NEAR(*fullRow().algbwGbs(), 48.77, 0.01);
  EXPECT_EQ(fullRow().algbwGbs(), fullRow().busbwGbs());
  Row allgather = fullRow();
  allgather.busFactor = 0.75;
  EXPECT_NEAR(*allgather.busbwGbs(), 36.58, 0.01);
  Row row = fullRow();
  row.timeUs.reset();
  EXPECT_FALSE(row.algbwGbs());
}

TEST(BenchReport, TableRowHasEveryColumn) {
  EXPECT_EQ(words(tableRow(fullRow())),
            (std::vector<std::string>{"1048576", "262144", "float", "out", "21.50", "48.77",
                                      "48.77", "0", "1.25", "3.50", "7.50", "0", "staged"}));
}

TEST(BenchReport, WhatIsNotMeasuredIsADash) {
  Row row = fullRow();
  row.errors.reset();
  row.launchUs.reset();
  row.launchP99Us.reset();
  row.launchIdleUs.reset();
  row.kernels.reset();
  row.path = "";
  EXPECT_EQ(words(tableRow(row)),
            (std::vector<std::string>{"1048576", "262144", "float", "out", "21.50", "48.77",
                                      "48.77", "-", "-", "-", "-", "-", "-"}));
}

TEST(BenchReport, HeadingIsAsWideAsARow) {
  std::istringstream heading(tableHeading());
  std::string first;
  std::getline(heading, first);
  EXPECT_EQ(first.find("path"), tableRow(fullRow()).find("staged"));
  EXPECT_EQ(first.front(), '#');
}

TEST(BenchReport, JsonRowHasTheSchema) {
  const auto json = rowJson(fullRow());
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) keys.push_back(key);
  EXPECT_EQ(keys,
            (std::vector<std::string>{
                "schema",         "impl",      "op",        "path",   "transport", "device",
                "emulated",       "ranks",     "bytes",     "dtype",  "in_place",  "iters",
                "time_us",        "algbw_gbs", "busbw_gbs", "errors", "launch_us", "launch_p99_us",
                "launch_idle_us", "kernels"}));
  EXPECT_EQ(json["op"], "sendrecv");
  EXPECT_EQ(json["in_place"], false);
  Row inPlace = fullRow();
  inPlace.op = "gather";
  inPlace.inPlace = true;
  EXPECT_EQ(rowJson(inPlace)["op"], "gather");
  EXPECT_EQ(rowJson(inPlace)["in_place"], true);
  EXPECT_EQ(json["transport"], "shm");
  EXPECT_EQ(json["time_us"], 21.5);
  EXPECT_EQ(json["kernels"], 0);
}

TEST(BenchReport, WhatIsNotMeasuredIsNull) {
  Row row;
  row.impl = "bare";
  const auto json = rowJson(row);
  for (const char* key : {"path", "transport", "time_us", "algbw_gbs", "busbw_gbs", "errors",
                          "launch_us", "launch_p99_us", "launch_idle_us", "kernels"})
    EXPECT_TRUE(json[key].is_null()) << key;
}

TEST(BenchReport, JsonFileIsWrittenWhole) {
  const std::string folder =
      std::filesystem::temp_directory_path() / ("hoccl_bench_report_" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  RunHeader header;
  header.op = "allgather";
  header.kernel = "Linux 6.1";
  header.emulated = true;
  header.dilation = 20;
  const std::string path = folder + "/rows.json";
  ASSERT_TRUE(writeJson(path, reportJson(header, {fullRow(), fullRow()})));
  std::ifstream file(path);
  const auto json = nlohmann::json::parse(file);
  EXPECT_EQ(json["rows"].size(), 2u);
  EXPECT_EQ(json["header"]["program"], "hoccl bench allgather");
  EXPECT_EQ(json["header"]["kernel"], "Linux 6.1");
  EXPECT_EQ(json["header"]["dilation"], 20);
  EXPECT_TRUE(json["header"]["commit"].is_null());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1);

  const Status status = writeJson(folder + "/missing/rows.json", json);
  EXPECT_FALSE(status);
  EXPECT_NE(status.message().find("missing/rows.json"), std::string::npos);
  std::filesystem::remove_all(folder);
}

TEST(BenchReport, ComparisonSetsEqualSizesSideBySide) {
  Row our = fullRow(), their = fullRow(), other = fullRow();
  their.timeUs = 43;
  their.impl = other.impl = "nccl";
  other.bytes = 2 << 20;
  Row inPlace = their;
  inPlace.inPlace = true;  // no row of ours to set it beside
  const std::string text = comparisonTable("over NET/Socket", {our}, {their, other, inPlace});
  EXPECT_NE(text.find("hoccl against nccl over NET/Socket"), std::string::npos);
  std::istringstream lines(text);
  std::string line, last;
  while (std::getline(lines, line)) last = line;
  EXPECT_EQ(words(last), (std::vector<std::string>{"1048576", "out", "21.50", "43.00", "48.77",
                                                   "24.39", "1.25", "1.25", "2.00"}));
  EXPECT_EQ(text.find("2097152"), std::string::npos);
  EXPECT_EQ(comparisonTable("", {our}, {}), "");
}

TEST(BenchReport, NcclVersions) {
  EXPECT_EQ(ncclVersionText(22809), "2.28.9");
  EXPECT_EQ(ncclVersionText(21903), "2.19.3");
}

TEST(BenchReport, SummarySaysHowMuchWasSteered) {
  auto line = [](std::optional<std::uint64_t> errors, PathCounts paths) {
    return summaryLine(errors, &paths);
  };
  EXPECT_EQ(line(0, {10, 10, true}), "# errors: 0  # steered: all\n");
  EXPECT_EQ(line(3, {4, 10, true}), "# errors: 3  # steered: 4 of 10\n");
  EXPECT_EQ(line(0, {0, 10, true}), "# errors: 0  # steered: 0 of 10\n");
  EXPECT_EQ(line(0, {0, 0, true}), "# errors: 0  # steered: no operation\n");
  EXPECT_EQ(line(std::nullopt, {}), "# errors: unchecked  # steered: unknown\n");
  EXPECT_EQ(summaryLine(0, nullptr), "# errors: 0\n");
}

}  // namespace
}  // namespace hoccl::bench
