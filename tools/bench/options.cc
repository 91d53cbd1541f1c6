#include "tools/bench/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nccl.h>

#include <algorithm>

#include "common/base/config.h"

namespace hoccl::bench {
namespace {

constexpr std::size_t kMaxSizes = 1000;
constexpr std::uint64_t kMaxBytes = 1ull << 40;
constexpr int kMaxRanks = 64, kMaxEmulatedRanks = 8;

struct DataTypeAlias {
  const char* alias;
  DataType type;
};
// The name shown is the first of each type, as nccl-tests prints it.
constexpr DataTypeAlias kDataTypes[] = {
    {"int8", {"int8", 1, ncclInt8}},         {"uint8", {"uint8", 1, ncclUint8}},
    {"bytes", {"uint8", 1, ncclUint8}},      {"int32", {"int32", 4, ncclInt32}},
    {"uint32", {"uint32", 4, ncclUint32}},   {"int64", {"int64", 8, ncclInt64}},
    {"uint64", {"uint64", 8, ncclUint64}},   {"half", {"half", 2, ncclFloat16}},
    {"fp16", {"half", 2, ncclFloat16}},      {"float", {"float", 4, ncclFloat32}},
    {"fp32", {"float", 4, ncclFloat32}},     {"double", {"double", 8, ncclFloat64}},
    {"fp64", {"double", 8, ncclFloat64}},    {"bfloat16", {"bfloat16", 2, ncclBfloat16}},
    {"bf16", {"bfloat16", 2, ncclBfloat16}},
};

Status bad(std::string text) { return Status::error(Code::InvalidArgument, std::move(text)); }

Status parseSize(const char* option, const std::string& text, std::uint64_t* out) {
  std::uint64_t value = 0;
  Status status = parseBytes(text, &value);
  if (!status) return bad(fmt::format("{} {}: {}", option, text, status.message()));
  if (value < 1 || value > kMaxBytes)
    return bad(
        fmt::format("{} {}: allowed are 1 byte to {}", option, text, formatBytes(kMaxBytes)));
  *out = value;
  return {};
}

Status parseRange(const char* option, const std::optional<long long>& value, long long lowest,
                  long long highest, long long* inOut) {
  if (!value) return {};
  if (*value < lowest || *value > highest)
    return bad(fmt::format("{} {}: allowed are {} to {}", option, *value, lowest, highest));
  *inOut = *value;
  return {};
}

Status completeSizes(const CommandLine& line, bool emulated, Options* options) {
  std::uint64_t first = 64 << 10, last = emulated ? 16 << 20 : 256 << 20, factor = 4, step = 0;
  Status status;
  if (!line.minBytes.empty() && !(status = parseSize("--minbytes", line.minBytes, &first)))
    return status;
  if (!line.maxBytes.empty() && !(status = parseSize("--maxbytes", line.maxBytes, &last)))
    return status;
  // One end alone moves the other end's default out of its way.
  if (line.maxBytes.empty()) last = std::max(first, last);
  if (line.minBytes.empty()) first = std::min(first, last);
  if (first > last)
    return bad(
        fmt::format("--minbytes {} is larger than --maxbytes {}", line.minBytes, line.maxBytes));
  if (!line.stepFactor.empty() && !line.stepBytes.empty())
    return bad("--stepfactor and --stepbytes exclude each other: give one");
  if (!line.stepBytes.empty()) {
    if (!(status = parseSize("--stepbytes", line.stepBytes, &step))) return status;
    factor = 0;
  } else if (!line.stepFactor.empty()) {
    if (line.stepFactor.find_first_not_of("0123456789") != std::string::npos ||
        line.stepFactor.size() > 6 || (factor = std::stoull(line.stepFactor)) < 2)
      return bad(fmt::format("--stepfactor {}: allowed are whole numbers from 2 to 999999",
                             line.stepFactor));
  }
  std::vector<std::uint64_t> raw;
  if (!(status = sweepSizes(first, last, factor, step, &raw))) return status;
  const OperationFacts& facts = factsOf(options->operation);
  const std::uint64_t blocks = facts.blocks ? static_cast<std::uint64_t>(options->ranks) : 1;
  for (std::uint64_t bytes : raw) {
    bytes -= bytes % (options->dataType.bytes * blocks);
    if (bytes == 0 && blocks > 1)
      return bad(
          fmt::format("--minbytes {} is less than {} blocks of one {} element ({} bytes), "
                      "one for each rank: {} cuts its size into them",
                      line.minBytes.empty() ? formatBytes(first) : line.minBytes, blocks,
                      options->dataType.name, options->dataType.bytes, facts.name));
    if (bytes == 0)
      return bad(fmt::format("--minbytes {} is less than one {} element ({} bytes)",
                             line.minBytes.empty() ? formatBytes(first) : line.minBytes,
                             options->dataType.name, options->dataType.bytes));
    if (options->sizes.empty() || options->sizes.back() != bytes) options->sizes.push_back(bytes);
  }
  return {};
}

Status completePattern(const CommandLine& line, Options* options) {
  const int ranks = options->ranks;
  if (line.pattern.empty()) {
    options->pattern = ranks == 2 ? Pattern::Oneway : Pattern::Ring;
    return {};
  }
  if (line.pattern == "oneway") {
    options->pattern = Pattern::Oneway;
    if (ranks != 2)
      return bad(fmt::format("--pattern oneway takes 2 ranks, not {}: use --pattern ring", ranks));
  } else if (line.pattern == "ring") {
    options->pattern = Pattern::Ring;
  } else if (line.pattern == "bidir") {
    options->pattern = Pattern::Bidir;
    if (ranks % 2 != 0)
      return bad(fmt::format("--pattern bidir takes an even number of ranks, not {}", ranks));
  } else {
    return bad(fmt::format("--pattern {}: allowed are oneway, ring, bidir", line.pattern));
  }
  return {};
}

/// NCCL's copy engines work between buffers that all ranks map, so inside a node.
Status checkCopyEngines(const Options& options) {
  const OperationFacts& facts = factsOf(options.operation);
  if (!facts.copyEngines)
    return bad(
        fmt::format("nccl-ce: NCCL has no {} by copy engines, only allgather, alltoall, "
                    "gather and scatter",
                    facts.name));
  if (options.grouped)
    return bad("nccl-ce and --grouped exclude each other: NCCL's send/recv takes its kernels");
  if (!options.sameNode)
    return bad("nccl-ce needs --same-node: NCCL's copy engines work inside a node");
  return {};
}

}  // namespace

const char* patternName(Pattern pattern) {
  switch (pattern) {
    case Pattern::Oneway:
      return "oneway";
    case Pattern::Ring:
      return "ring";
    case Pattern::Bidir:
      return "bidir";
  }
  return "unknown";
}

Status dataTypeByName(const std::string& name, DataType* out) {
  std::vector<std::string> known;
  for (const DataTypeAlias& row : kDataTypes) {
    if (name == row.alias) {
      *out = row.type;
      return {};
    }
    known.emplace_back(row.alias);
  }
  return bad(fmt::format("--datatype {}: known are {}", name, fmt::join(known, ", ")));
}

Status sweepSizes(std::uint64_t first, std::uint64_t last, std::uint64_t factor, std::uint64_t step,
                  std::vector<std::uint64_t>* out) {
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t bytes = first; bytes <= last;) {
    sizes.push_back(bytes);
    if (sizes.size() > kMaxSizes)
      return bad(fmt::format("the sweep from {} to {} has more than {} sizes: take a larger step",
                             first, last, kMaxSizes));
    // Past the end (or past 64 bits) there is no next size.
    const std::uint64_t room = last - bytes;
    if (factor != 0 ? bytes > last / factor : step > room) break;
    bytes = factor != 0 ? bytes * factor : bytes + step;
  }
  *out = std::move(sizes);
  return {};
}

Status completeOptions(const CommandLine& line, bool emulated, Options* out) {
  Options options;
  options.operation = line.operation;
  Status status = dataTypeByName(line.dataType, &options.dataType);
  if (!status) return status;

  long long iters = 0, batches = 0, warmup = options.warmup, check = options.check,
            ranks = options.ranks, offset = 0, timeout = 60, root = 0, skew = options.skew;
  const int maxRanks = emulated ? kMaxEmulatedRanks : kMaxRanks;
  if (!(status = parseRange("--iters", line.iters, 1, 1000000, &iters))) return status;
  if (!(status = parseRange("--batches", line.batches, 1, 10000, &batches))) return status;
  if (!(status = parseRange("--warmup_iters", line.warmup, 0, 1000000, &warmup))) return status;
  if (!(status = parseRange("--check", line.check, 0, 1000, &check))) return status;
  if (!(status = parseRange("--ranks", line.ranks, 2, maxRanks, &ranks)))
    return emulated ? status.inContext("on the emulated driver") : status;
  if (!(status = parseRange("--root", line.root, 0, ranks - 1, &root))) return status;
  if (!(status = parseRange("--skew", line.skew, 1, 1000, &skew))) return status;
  if (!(status = parseRange("--offset", line.offset, 0, 1 << 30, &offset))) return status;
  if (!(status = parseRange("--timeout", line.timeoutSeconds, 1, 86400, &timeout))) return status;
  if (line.iters) options.iters = static_cast<int>(iters);
  if (line.batches) options.batches = static_cast<int>(batches);
  options.warmup = static_cast<int>(warmup);
  options.check = static_cast<int>(check);
  options.ranks = static_cast<int>(ranks);
  options.root = static_cast<int>(root);
  options.skew = static_cast<int>(skew);
  options.grouped = line.grouped;
  options.offset = static_cast<std::uint64_t>(offset);
  options.timeoutMs = static_cast<std::uint64_t>(timeout) * 1000;
  options.jsonFile = line.jsonFile;
  options.sameNode = line.sameNode;
  options.remotes = line.remotes;
  if (options.remotes.size() >= static_cast<std::size_t>(options.ranks))
    return bad(fmt::format("--remote names {} hosts for {} ranks: the first rank runs here",
                           options.remotes.size(), options.ranks));
  if (!options.remotes.empty() && options.sameNode)
    return bad("--same-node and --remote exclude each other: ranks on two hosts are on two nodes");

  if (!(status = completeSizes(line, emulated, &options))) return status;
  if (options.operation == Operation::SendRecv && !(status = completePattern(line, &options)))
    return status;

  if (line.impl != "hoccl" && line.impl != "nccl" && line.impl != kCopyEngines &&
      line.impl != "bare")
    return bad(fmt::format("--impl {}: allowed are hoccl, nccl, nccl-ce, bare", line.impl));
  options.impl = line.impl;
  for (const std::string& other : line.compare) {
    if (other == "nccl") {
      options.compareNccl = true;
    } else if (other == kCopyEngines) {
      options.compareCopyEngines = true;
    } else if (other == "bare") {
      options.compareBare = true;
    } else {
      return bad(fmt::format(
          "--compare {}: allowed are nccl, nccl-ce, bare or several, as nccl,bare", other));
    }
    if (other == options.impl)
      return bad(fmt::format("--compare {} compares with itself: --impl is {}", other, other));
  }
  if (!options.remotes.empty() && (options.impl == "bare" || options.compareBare))
    return bad("the bare copies have nothing to do with another host: leave out --remote or bare");
  if ((options.compareCopyEngines || options.impl == kCopyEngines) &&
      !(status = checkCopyEngines(options)))
    return status;
  *out = std::move(options);
  return {};
}

IterationPlan planIterations(const Options& options, double iterationNs, double budgetNs) {
  const double each = std::max(iterationNs, 1.0);
  auto within = [](double value, int lowest, int highest) {
    return static_cast<int>(std::clamp(value, double(lowest), double(highest)));
  };
  IterationPlan plan;
  // Most of the budget goes to the timed batches, the rest to the launch samples, each of which is
  // four whole transfers as well.
  const double timed = budgetNs * 0.7 / each;
  plan.batches = options.batches.value_or(within(timed / 2, 3, 5));
  plan.iters = options.iters.value_or(within(timed / plan.batches, 2, 20));
  plan.singles = within(budgetNs * 0.1 / each, 10, 200);
  plan.burst = within(budgetNs * 0.7 / each / 3, 4, 20);
  plan.bursts = within(budgetNs * 0.1 / each / plan.burst, 3, 50);
  return plan;
}

}  // namespace hoccl::bench
