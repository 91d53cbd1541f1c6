#include <gtest/gtest.h>

#include <limits>

#include "tools/bench/options.h"

namespace hoccl::bench {
namespace {

using Sizes = std::vector<std::uint64_t>;

Sizes swept(std::uint64_t first, std::uint64_t last, std::uint64_t factor, std::uint64_t step) {
  Sizes sizes;
  const Status status = sweepSizes(first, last, factor, step, &sizes);
  EXPECT_TRUE(status) << status.message();
  return sizes;
}

Options completed(const CommandLine& line, bool emulated = false) {
  Options options;
  const Status status = completeOptions(line, emulated, &options);
  EXPECT_TRUE(status) << status.message();
  return options;
}

/// The message of the error that the command line must be.
std::string refused(const CommandLine& line) {
  Options options;
  const Status status = completeOptions(line, false, &options);
  EXPECT_FALSE(status);
  EXPECT_EQ(status.code(), Code::InvalidArgument);
  return status.message();
}

void expectNames(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << word << " is not in: " << message;
}

TEST(BenchSweep, MultipliesUpToTheLast) {
  EXPECT_EQ(swept(64, 4096, 4, 0), (Sizes{64, 256, 1024, 4096}));
  EXPECT_EQ(swept(64, 4095, 4, 0), (Sizes{64, 256, 1024}));
}

TEST(BenchSweep, StepsUpToTheLast) {
  EXPECT_EQ(swept(100, 350, 0, 100), (Sizes{100, 200, 300}));
  EXPECT_EQ(swept(100, 300, 0, 100), (Sizes{100, 200, 300}));
}

TEST(BenchSweep, OneSize) {
  EXPECT_EQ(swept(7, 7, 2, 0), Sizes{7});
  EXPECT_EQ(swept(7, 7, 0, 1), Sizes{7});
}

TEST(BenchSweep, EndsAtTheTopOf64Bits) {
  constexpr std::uint64_t top = std::numeric_limits<std::uint64_t>::max();
  EXPECT_EQ(swept(top / 2, top, 2, 0).size(), 2u);
  EXPECT_EQ(swept(top - 1, top, 0, top).size(), 1u);
}

TEST(BenchSweep, RefusesEndlessSweeps) {
  Sizes sizes{1};
  EXPECT_FALSE(sweepSizes(1, 1 << 30, 0, 1, &sizes));
  EXPECT_EQ(sizes, Sizes{1});
}

TEST(BenchOptions, Defaults) {
  const Options gpu = completed({}), emulated = completed({}, true);
  EXPECT_EQ(gpu.sizes.front(), 64u << 10);
  EXPECT_EQ(gpu.sizes.back(), 256u << 20);
  EXPECT_EQ(gpu.sizes.size(), 7u);
  EXPECT_EQ(emulated.sizes.back(), 16u << 20);
  EXPECT_EQ(gpu.ranks, 2);
  EXPECT_EQ(gpu.pattern, Pattern::Oneway);
  EXPECT_EQ(gpu.impl, "hoccl");
  EXPECT_FALSE(gpu.iters);
}

TEST(BenchOptions, OneEndMovesTheOther) {
  CommandLine line;
  line.minBytes = "1GiB";
  EXPECT_EQ(completed(line).sizes, Sizes{1u << 30});
  line = {};
  line.maxBytes = "4K";
  EXPECT_EQ(completed(line).sizes, Sizes{4096});
}

TEST(BenchOptions, RoundsDownToWholeElements) {
  CommandLine line;
  line.dataType = "float";
  line.minBytes = "1027";
  line.maxBytes = "1031";
  line.stepBytes = "1";
  EXPECT_EQ(completed(line).sizes, (Sizes{1024, 1028}));
}

TEST(BenchOptions, RoundsDownToWholeElementsOfEveryBlock) {
  CommandLine line;
  line.operation = Operation::AllGather;
  line.ranks = 3;
  line.dataType = "float";
  line.minBytes = line.maxBytes = "1000";
  EXPECT_EQ(completed(line).sizes, Sizes{996});
  line.operation = Operation::Broadcast;
  EXPECT_EQ(completed(line).sizes, Sizes{1000});
  line.operation = Operation::Scatter;
  line.minBytes = line.maxBytes = "11";
  expectNames(refused(line), {"--minbytes 11", "3 blocks", "float", "scatter"});
}

TEST(BenchOptions, RootAndSkew) {
  CommandLine line;
  line.operation = Operation::Gather;
  EXPECT_EQ(completed(line).root, 0);
  line.root = 1;
  EXPECT_EQ(completed(line).root, 1);
  line.root = 2;
  expectNames(refused(line), {"--root 2", "0 to 1"});
  line = {};
  line.operation = Operation::AlltoAllv;
  EXPECT_EQ(completed(line).skew, 2);
  line.skew = 0;
  expectNames(refused(line), {"--skew 0"});
}

TEST(BenchOptions, EightRanksOnTheEmulatedDriver) {
  CommandLine line;
  line.ranks = 9;
  EXPECT_EQ(completed(line).ranks, 9);
  Options options;
  const Status status = completeOptions(line, true, &options);
  ASSERT_FALSE(status);
  expectNames(status.message(), {"emulated", "--ranks 9", "2 to 8"});
}

TEST(BenchOptions, DataTypesByEitherName) {
  for (const auto& [name, bytes] : std::vector<std::pair<std::string, unsigned>>{
           {"uint8", 1}, {"bf16", 2}, {"bfloat16", 2}, {"half", 2}, {"float", 4}, {"double", 8}}) {
    DataType type{};
    ASSERT_TRUE(dataTypeByName(name, &type)) << name;
    EXPECT_EQ(type.bytes, bytes) << name;
  }
  CommandLine line;
  line.dataType = "float7";
  expectNames(refused(line), {"--datatype", "float7", "bf16"});
}

TEST(BenchOptions, RefusesBadSizes) {
  CommandLine line;
  line.minBytes = "64Q";
  expectNames(refused(line), {"--minbytes", "64Q"});
  line.minBytes = "0";
  expectNames(refused(line), {"--minbytes", "0"});
  line.minBytes = "-1";
  expectNames(refused(line), {"--minbytes", "-1"});
  line.minBytes = "2M";
  line.maxBytes = "1M";
  expectNames(refused(line), {"--minbytes", "--maxbytes", "2M", "1M"});
  line = {};
  line.maxBytes = "2000T";
  expectNames(refused(line), {"--maxbytes"});
  line = {};
  line.minBytes = line.maxBytes = "3";
  line.dataType = "float";
  expectNames(refused(line), {"--minbytes", "float"});
}

TEST(BenchOptions, RefusesBadSteps) {
  CommandLine line;
  for (const char* factor : {"1", "0", "-2", "2.5", "x", "99999999999999999999"}) {
    line.stepFactor = factor;
    expectNames(refused(line), {"--stepfactor", factor});
  }
  line.stepFactor = "2";
  line.stepBytes = "1M";
  expectNames(refused(line), {"--stepfactor", "--stepbytes"});
  line.stepFactor = "";
  line.stepBytes = "0";
  expectNames(refused(line), {"--stepbytes"});
  line.stepBytes = "1";
  expectNames(refused(line), {"1000 sizes"});
}

TEST(BenchOptions, RefusesCountsOutOfRange) {
  CommandLine line;
  line.iters = 0;
  expectNames(refused(line), {"--iters 0"});
  line = {};
  line.batches = 0;
  expectNames(refused(line), {"--batches 0"});
  line = {};
  line.warmup = -1;
  expectNames(refused(line), {"--warmup_iters -1"});
  line = {};
  line.ranks = 1;
  expectNames(refused(line), {"--ranks 1"});
  line = {};
  line.offset = -4;
  expectNames(refused(line), {"--offset -4"});
  line = {};
  line.timeoutSeconds = 0;
  expectNames(refused(line), {"--timeout 0"});
  line = {};
  line.check = -1;
  expectNames(refused(line), {"--check -1"});
}

TEST(BenchOptions, PatternFitsTheRanks) {
  CommandLine line;
  line.ranks = 3;
  EXPECT_EQ(completed(line).pattern, Pattern::Ring);
  line.pattern = "oneway";
  expectNames(refused(line), {"oneway", "3"});
  line.pattern = "bidir";
  expectNames(refused(line), {"bidir", "3"});
  line.ranks = 4;
  EXPECT_EQ(completed(line).pattern, Pattern::Bidir);
  line.pattern = "star";
  expectNames(refused(line), {"star", "oneway, ring, bidir"});
}

TEST(BenchOptions, Comparisons) {
  CommandLine line;
  line.compare = {"nccl", "bare"};
  EXPECT_TRUE(completed(line).compareNccl);
  EXPECT_TRUE(completed(line).compareBare);
  line.compare = {"gloo"};
  expectNames(refused(line), {"--compare", "gloo"});
  line.compare = {"nccl"};
  line.impl = "nccl";
  expectNames(refused(line), {"itself"});
  line.compare = {};
  line.impl = "mpi";
  expectNames(refused(line), {"--impl", "mpi"});
}

TEST(BenchOptions, NcclsCopyEngines) {
  CommandLine line;
  line.operation = Operation::AllGather;
  line.sameNode = true;
  line.compare = {"nccl", "nccl-ce"};
  EXPECT_TRUE(completed(line).compareNccl);
  EXPECT_TRUE(completed(line).compareCopyEngines);
  line.compare = {};
  line.impl = kCopyEngines;
  EXPECT_FALSE(completed(line).compareCopyEngines);
  line.compare = {"nccl-ce"};
  expectNames(refused(line), {"--compare nccl-ce", "itself"});
  line.compare = {};
  line.sameNode = false;
  expectNames(refused(line), {"nccl-ce", "--same-node"});
  line.sameNode = true;
  for (const Operation operation : {Operation::AlltoAll, Operation::Gather, Operation::Scatter}) {
    line.operation = operation;
    EXPECT_EQ(completed(line).impl, "nccl-ce");
  }
  line.grouped = true;
  expectNames(refused(line), {"nccl-ce", "--grouped"});
  line.grouped = false;
  for (const Operation operation :
       {Operation::SendRecv, Operation::AlltoAllv, Operation::Broadcast}) {
    line.operation = operation;
    expectNames(refused(line), {"nccl-ce", factsOf(operation).name});
  }
}

TEST(BenchPlan, KeepsWhatTheUserFixed) {
  Options options;
  options.iters = 7;
  options.batches = 2;
  const IterationPlan plan = planIterations(options, 1e9, 1e9);
  EXPECT_EQ(plan.iters, 7);
  EXPECT_EQ(plan.batches, 2);
}

TEST(BenchPlan, FitsTheBudgetWithinItsLimits) {
  const Options options;
  const IterationPlan fast = planIterations(options, 1e3, 2e9);
  EXPECT_EQ(fast.iters, 20);
  EXPECT_EQ(fast.batches, 5);
  EXPECT_EQ(fast.singles, 200);
  EXPECT_EQ(fast.burst, 20);
  EXPECT_EQ(fast.bursts, 50);
  const IterationPlan slow = planIterations(options, 1e10, 2e9);
  EXPECT_EQ(slow.iters, 2);
  EXPECT_EQ(slow.batches, 3);
  EXPECT_EQ(slow.singles, 10);
  EXPECT_EQ(slow.burst, 4);
  EXPECT_EQ(slow.bursts, 3);
  const IterationPlan between = planIterations(options, 40e6, 2e9);
  EXPECT_LE(between.iters * between.batches * 40e6, 2e9 * 0.7);
  EXPECT_GT(between.iters * between.batches * 40e6, 2e9 * 0.3);
}

}  // namespace
}  // namespace hoccl::bench
