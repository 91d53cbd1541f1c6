// The command line as a person types it: usage errors end with 2 and name the option.
#include "tools/bench/bench_command.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <CLI/CLI.hpp>

namespace hoccl {
namespace {

struct Outcome {
  int exitCode = -1;
  std::string errors;
};

Outcome run(const std::string& arguments) {
  CLI::App app("test", "hoccl");
  app.require_subcommand(1);
  Outcome outcome;
  addBenchCommand(app, &outcome.exitCode);
  testing::internal::CaptureStderr();
  try {
    app.parse(arguments, false);
  } catch (const CLI::ParseError& error) {
    outcome.exitCode = 2;
    outcome.errors = error.what();
  }
  outcome.errors += testing::internal::GetCapturedStderr();
  return outcome;
}

void expectUsage(const std::string& arguments, const std::string& named) {
  const Outcome outcome = run(arguments);
  EXPECT_EQ(outcome.exitCode, 2) << arguments;
  EXPECT_NE(outcome.errors.find(named), std::string::npos) << arguments << ": " << outcome.errors;
}

TEST(BenchCommand, BadValuesAreUsageErrors) {
  expectUsage("bench sendrecv -b 64Q", "64Q");
  expectUsage("bench sendrecv -b 2M -e 1M", "--maxbytes");
  expectUsage("bench sendrecv -n 0", "--iters 0");
  expectUsage("bench sendrecv -n many", "many");
  expectUsage("bench sendrecv -f 1", "--stepfactor 1");
  expectUsage("bench sendrecv -g 3 --pattern oneway", "oneway");
  expectUsage("bench sendrecv -d float7", "float7");
  expectUsage("bench allgather -b 1", "blocks");
  expectUsage("bench gather --root 2", "--root 2");
  expectUsage("bench alltoallv --skew 0", "--skew 0");
  // Options of other operations.
  expectUsage("bench allgather --root 0", "--root");
  expectUsage("bench alltoall --skew 2", "--skew");
  expectUsage("bench alltoall --pattern ring", "--pattern");
  expectUsage("bench broadcast --grouped", "--grouped");
  expectUsage("bench allreduce", "ubcommand");
  expectUsage("bench sendrecv --compare gloo", "gloo");
  expectUsage("bench sendrecv --bandwidth", "--bandwidth");
  expectUsage("bench", "ubcommand");
  expectUsage("bench-rank", "--parent");
}

TEST(BenchCommand, ABadVariableIsAUsageError) {
  ::setenv("HOCCL_EMULATE", "perhaps", 1);
  expectUsage("bench sendrecv", "HOCCL_EMULATE");
  ::unsetenv("HOCCL_EMULATE");
}

TEST(BenchCommand, TheRankCommandIsHidden) {
  CLI::App app("test", "hoccl");
  int exitCode = 0;
  addBenchCommand(app, &exitCode);
  EXPECT_EQ(app.help().find("bench-rank"), std::string::npos);
  EXPECT_NE(app.help().find("bench"), std::string::npos);
}

}  // namespace
}  // namespace hoccl
