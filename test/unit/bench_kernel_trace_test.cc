#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tools/bench/kernel_trace.h"

namespace hoccl::bench {
namespace {

class BenchKernelTrace : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("hoccl_bench_trace_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(int pid, const std::string& text) {
    std::ofstream(folder_ / (std::to_string(pid) + ".json")) << text;
  }
  void writeEvents(int pid, std::uint64_t flushed, const std::string& events) {
    write(pid, R"({"pid":)" + std::to_string(pid) + R"(,"flushed_ns":)" + std::to_string(flushed) +
                   R"(,"lost":0,"error":"","names":[""],"events":[)" + events + "]}");
  }
  std::vector<std::optional<std::uint64_t>> count(const std::vector<TimeWindow>& windows) {
    return countTracedKernels(folder_.string() + "/%p.json", {10, 11}, windows);
  }
  std::filesystem::path folder_;
};

TEST_F(BenchKernelTrace, CountsWhatNeedsAnSmInTheWindow) {
  writeEvents(10, 1000, R"(["kernel",50,60,0,0],["kernel",150,160,0,0],["HtoD",150,160,65536,0])");
  writeEvents(11, 1000,
              R"(["DtoD",199,210,64,0],["kernel",200,210,0,0],["memset",110,111,65536,0])");
  writeEvents(99, 1000, R"(["memset",120,121,65537,0])");  // a mover
  const auto counts = count({{100, 200}, {300, 400}});
  EXPECT_EQ(counts[0], 3u);
  EXPECT_EQ(counts[1], 0u);
}

TEST_F(BenchKernelTrace, UnknownWithoutEveryRanksFile) {
  writeEvents(10, 1000, "");
  EXPECT_FALSE(count({{100, 200}})[0]);
}

TEST_F(BenchKernelTrace, UnknownWhereAFileEndsTooEarlyOrLostEvents) {
  writeEvents(10, 1000, "");
  writeEvents(11, 150, "");
  const auto counts = count({{10, 100}, {100, 200}});
  EXPECT_EQ(counts[0], 0u);
  EXPECT_FALSE(counts[1]);
  write(11, R"({"pid":11,"flushed_ns":1000,"lost":2,"error":"","events":[]})");
  EXPECT_FALSE(count({{10, 100}})[0]);
  write(11, R"({"pid":11,"flushed_ns":1000,"lost":0,"error":"no CUPTI","events":[]})");
  EXPECT_FALSE(count({{10, 100}})[0]);
}

TEST_F(BenchKernelTrace, AnEarlierSetsProcessesDoNotMatter) {
  writeEvents(10, 1000, "");
  writeEvents(11, 1000, "");
  writeEvents(5, 50, R"(["kernel",10,20,0,0])");
  EXPECT_EQ(count({{100, 200}})[0], 0u);
}

TEST_F(BenchKernelTrace, DamagedFilesAreUnknown) {
  writeEvents(10, 1000, "");
  for (const char* text :
       {"", "{", R"({"flushed_ns":1000,"events":[["kernel"]]})", R"({"flushed_ns":1000})"}) {
    write(11, text);
    EXPECT_FALSE(count({{100, 200}})[0]) << text;
  }
}

}  // namespace
}  // namespace hoccl::bench
