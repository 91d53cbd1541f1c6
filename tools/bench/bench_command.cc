#include "tools/bench/bench_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "tools/bench/bench_run.h"
#include "tools/bench/net_command.h"
#include "tools/bench/operations.h"
#include "tools/bench/options.h"
#include "tools/bench/rank_process.h"
#include "tools/bench/registration_command.h"
#include "tools/bench/remote_rank.h"

namespace hoccl {
namespace {

/// This process's command line, for the record in the JSON file.
std::string ownCommandLine() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  while (!text.empty() && text.back() == '\0') text.pop_back();
  for (char& c : text)
    if (c == '\0') c = ' ';
  return text;
}

/// Nothing escapes into CLI11, which would take it for a syntax error.
template <typename Work>
void runInto(int* exitCode, Work&& work) {
  try {
    *exitCode = work();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hoccl bench: %s\n", error.what());
    *exitCode = 1;
  }
}

void addSizeOptions(CLI::App* command, bench::CommandLine* line) {
  command->add_option("-b,--minbytes", line->minBytes,
                      "smallest size, with K, M, G or KiB, MiB, GiB (default 64KiB)");
  command->add_option("-e,--maxbytes", line->maxBytes,
                      "largest size (default 256MiB; 16MiB on the emulated driver)");
  command->add_option("-f,--stepfactor", line->stepFactor, "factor from size to size (default 4)");
  command->add_option("-i,--stepbytes", line->stepBytes, "step from size to size, instead of -f");
  command
      ->add_option("-d,--datatype", line->dataType,
                   "element type as nccl-tests names it; sets the count, not the bytes")
      ->capture_default_str();
  command->add_option("--offset", line->offset,
                      "buffers start this many bytes into their allocation");
}

void addRunOptions(CLI::App* command, bench::CommandLine* line) {
  command->add_option("-n,--iters", line->iters,
                      "iterations a batch (default: 2 to 20, by how long they take)");
  command->add_option("--batches", line->batches, "timed batches a size (default: 3 to 5)");
  command->add_option("-w,--warmup_iters", line->warmup, "warm-up iterations (default 5)");
  command->add_option("-c,--check", line->check,
                      "checked transfers a size; 0 checks nothing (default 1)");
  command->add_option("-g,--ranks", line->ranks,
                      "rank processes (default 2; up to 8 on the emulated driver)");
  command->add_flag("--same-node", line->sameNode,
                    "let NCCL see the ranks on one node; else each has an NCCL_HOSTID of its own");
  command->add_option("--impl", line->impl, "what is measured: hoccl, nccl, nccl-ce or bare")
      ->capture_default_str();
  command
      ->add_option("--compare", line->compare,
                   "measure this as well and set it beside: nccl, nccl-ce (NCCL's collectives by "
                   "copy engines), bare, or several, as nccl,bare")
      ->delimiter(',');
  command
      ->add_option("--remote", line->remotes,
                   "the last rank runs on another host, where `hoccl bench serve` has written "
                   "this file; with several files the last ranks, one each")
      ->delimiter(',');
  command->add_option("--json", line->jsonFile, "write the rows to this file");
  command->add_option("--timeout", line->timeoutSeconds,
                      "seconds a rank may be silent before the run ends (default 60)");
}

/// What only some operations have.
void addOperationOptions(CLI::App* command, bench::CommandLine* line) {
  const bench::OperationFacts& facts = bench::factsOf(line->operation);
  if (line->operation == bench::Operation::SendRecv)
    command->add_option("--pattern", line->pattern,
                        "oneway (default for 2 ranks: 0 sends to 1), ring (default else) or bidir");
  if (line->operation == bench::Operation::AlltoAllv)
    command->add_option("--skew", line->skew,
                        "a rank's largest block over its smallest (default 2; 1: all equal)");
  if (facts.rooted) command->add_option("-r,--root", line->root, "root rank (default 0)");
  if (facts.groupable)
    command->add_flag("--grouped", line->grouped,
                      "as grouped send/recv even where NCCL has a function for it");
}

}  // namespace

void addBenchCommand(CLI::App& app, int* exitCode) {
  CLI::App* bench = app.add_subcommand("bench", "Measure operations, steered and plain");
  bench->require_subcommand(1);

  for (int i = 0; i < bench::kOperations; ++i) {
    const bench::OperationFacts& facts = bench::operationAt(i);
    auto line = std::make_shared<bench::CommandLine>();
    line->operation = facts.operation;
    CLI::App* command =
        bench->add_subcommand(facts.name, std::string("in the manner of nccl-tests' ") +
                                              facts.name + "; size: " + facts.sizeMeaning);
    addSizeOptions(command, line.get());
    addRunOptions(command, line.get());
    addOperationOptions(command, line.get());
    command->callback([line, exitCode] {
      runInto(exitCode, [&] { return bench::runBench(*line, ownCommandLine()); });
    });
  }

  auto net = std::make_shared<bench::NetCommandLine>();
  bench::addNetCommand(*bench, net)->callback([net, exitCode] {
    runInto(exitCode, [&] { return bench::runNetBench(*net, ownCommandLine()); });
  });
  auto registration = std::make_shared<bench::RegistrationCommandLine>();
  bench::addRegistrationCommand(*bench, registration)->callback([registration, exitCode] {
    runInto(exitCode, [&] { return bench::runRegistrationBench(*registration, ownCommandLine()); });
  });

  auto file = std::make_shared<std::string>();
  CLI::App* serve =
      bench->add_subcommand("serve", "start ranks for a bench on another host (--remote there)");
  serve->add_option("--file", *file, "address and key are written to it; both hosts need it")
      ->required();
  serve->callback(
      [file, exitCode] { runInto(exitCode, [&] { return bench::serveRanks(*file); }); });

  auto parent = std::make_shared<int>(0);
  CLI::App* rank = app.add_subcommand("bench-rank", "One rank process of a bench");
  rank->group("");  // hidden: only the bench starts it
  rank->add_option("--parent", *parent, "process id of the bench")->required();
  rank->callback(
      [parent, exitCode] { runInto(exitCode, [&] { return bench::runRankProcess(*parent); }); });
}

}  // namespace hoccl
