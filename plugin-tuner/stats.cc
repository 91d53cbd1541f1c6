#include "plugin-tuner/stats.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "plugin-tuner/process_core.h"

namespace hoccl {
namespace {

constexpr int kPaths = static_cast<int>(Path::kCount);

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out;
}

/// By side, {"staged":{"ops":…,"bytes":…},…}: the four paths of HOCCL, then NCCL for whatever
/// reason.
std::string pathsJson(const std::uint64_t (&ops)[kPaths], const std::uint64_t (&bytes)[kPaths]) {
  constexpr int kNccl = 4;
  static_assert(static_cast<int>(Path::Staged) == 0 && static_cast<int>(Path::AppCopies) == 1 &&
                static_cast<int>(Path::Direct) == 2 && static_cast<int>(Path::OwnBlock) == 3);
  std::string text;
  for (int side = 0; side <= kNccl; ++side) {
    std::uint64_t sideOps = ops[side], sideBytes = bytes[side];
    for (int p = kNccl + 1; side == kNccl && p < kPaths; ++p) {
      sideOps += ops[p];
      sideBytes += bytes[p];
    }
    text +=
        fmt::format("{}\"{}\":{{\"ops\":{},\"bytes\":{}}}", side == 0 ? "{" : ",",
                    side == kNccl ? "nccl" : pathName(static_cast<Path>(side)), sideOps, sideBytes);
  }
  return text + "}";
}

}  // namespace

std::size_t statsJson(char* out, std::size_t capacity) {
  std::string text = "{\"communicators\":[";
  bool firstComm = true;
  ProcessCore::get().comms().forEach([&](SteeredComm& comm) {
    comm.countDirect();
    std::uint64_t ops[kPaths] = {}, bytes[kPaths] = {};
    std::string reasons;
    for (int p = 0; p < kPaths; ++p) {
      const SteeredComm::Moved moved = comm.moved(static_cast<Path>(p));
      ops[p] = moved.ops;
      bytes[p] = moved.bytes;
      if (p > static_cast<int>(Path::OwnBlock) && moved.ops > 0) {
        reasons += fmt::format("{}\"{}\":{}", reasons.empty() ? "" : ",",
                               pathName(static_cast<Path>(p)), moved.ops);
      }
    }
    text += fmt::format(
        "{}{{\"id\":\"{:016x}\",\"rank\":{},\"ranks\":{},\"steered\":{},\"transport\":{},\"why\":"
        "\"{}\",\"paths\":{},\"reasons\":{{{}}}}}",
        firstComm ? "" : ",", comm.id, comm.rank, comm.ranks, comm.steering() ? "true" : "false",
        comm.steering() ? '"' + comm.transport + '"' : "null", escaped(comm.reason),
        pathsJson(ops, bytes), reasons);
    firstComm = false;
  });
  ProcessCore& core = ProcessCore::get();
  const CommTable::Forgotten old = core.comms().forgotten();
  text += fmt::format("],\"forgotten\":{{\"communicators\":{},\"paths\":{}}}", old.communicators,
                      pathsJson(old.ops, old.bytes));
  text += fmt::format(
      ",\"waits\":{{\"memop\":{},\"kernel\":{},\"parked\":{}}},\"doorbells\":{},"
      "\"ownBlocksByKernel\":{}}}",
      core.waitCount(WaitKind::MemoryOp), core.waitCount(WaitKind::Kernel),
      core.waitCount(WaitKind::Parked), core.doorbells(), core.ownBlocks());
  if (capacity > 0) {
    const std::size_t length = std::min(text.size(), capacity - 1);
    std::memcpy(out, text.data(), length);
    out[length] = 0;
  }
  return text.size();
}

void printStats() {
  ProcessCore::get().comms().forEach([](SteeredComm& comm) {
    comm.countDirect();
    std::string line = fmt::format("hoccl stats: communicator {:016x} rank {} of {}:", comm.id,
                                   comm.rank, comm.ranks);
    for (int p = 0; p < kPaths; ++p) {
      const SteeredComm::Moved moved = comm.moved(static_cast<Path>(p));
      if (moved.ops == 0 && p != static_cast<int>(Path::Staged)) continue;
      line += fmt::format(" {} {} ops {} bytes;", pathName(static_cast<Path>(p)), moved.ops,
                          moved.bytes);
    }
    if (!comm.reason.empty()) line += fmt::format(" plain NCCL because {}", comm.reason);
    std::fprintf(stderr, "%s\n", line.c_str());
  });
  ProcessCore& core = ProcessCore::get();
  if (const CommTable::Forgotten old = core.comms().forgotten(); old.communicators > 0) {
    std::string line = fmt::format("hoccl stats: {} earlier communicators:", old.communicators);
    for (int p = 0; p < kPaths; ++p) {
      if (old.ops[p] == 0) continue;
      line += fmt::format(" {} {} ops {} bytes;", pathName(static_cast<Path>(p)), old.ops[p],
                          old.bytes[p]);
    }
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  // The kernels are the exceptions from using no SM, so they are named.
  const std::string line =
      fmt::format("hoccl stats: waits of streams: memop {}; kernel {}; parked {}; doorbells {}\n",
                  core.waitCount(WaitKind::MemoryOp), core.waitCount(WaitKind::Kernel),
                  core.waitCount(WaitKind::Parked), core.doorbells());
  std::fputs(line.c_str(), stderr);
  if (core.ownBlocksByKernel()) {
    std::fputs(fmt::format("hoccl stats: own blocks: {} by kernel\n", core.ownBlocks()).c_str(),
               stderr);
  }
}

}  // namespace hoccl
