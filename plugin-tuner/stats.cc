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

}  // namespace

std::size_t statsJson(char* out, std::size_t capacity) {
  std::string text = "{\"communicators\":[";
  bool firstComm = true;
  ProcessCore::get().comms().forEach([&](SteeredComm& comm) {
    comm.countDirect();
    // By side: the four paths of HOCCL, then NCCL for whatever reason.
    constexpr int kNccl = 4;
    static_assert(static_cast<int>(Path::Staged) == 0 && static_cast<int>(Path::AppCopies) == 1 &&
                  static_cast<int>(Path::Direct) == 2 && static_cast<int>(Path::OwnBlock) == 3);
    std::uint64_t ops[kNccl + 1] = {}, bytes[kNccl + 1] = {};
    std::string reasons;
    for (int p = 0; p < kPaths; ++p) {
      const SteeredComm::Moved moved = comm.moved(static_cast<Path>(p));
      const int side = std::min(p, kNccl);
      ops[side] += moved.ops;
      bytes[side] += moved.bytes;
      if (side == kNccl && moved.ops > 0) {
        reasons += fmt::format("{}\"{}\":{}", reasons.empty() ? "" : ",",
                               pathName(static_cast<Path>(p)), moved.ops);
      }
    }
    text += fmt::format(
        "{}{{\"id\":\"{:016x}\",\"rank\":{},\"ranks\":{},\"steered\":{},\"transport\":{},\"why\":"
        "\"{}\",\"paths\":{{"
        "\"staged\":{{\"ops\":{},\"bytes\":{}}},\"app-copies\":{{\"ops\":{},\"bytes\":{}}},"
        "\"direct\":{{\"ops\":{},\"bytes\":{}}},\"own-block\":{{\"ops\":{},\"bytes\":{}}},\"nccl\":{{\"ops\":{},\"bytes\":{}}}}},\"reasons\":"
        "{{{"
        "}}}}}",
        firstComm ? "" : ",", comm.id, comm.rank, comm.ranks, comm.steering() ? "true" : "false",
        comm.steering() ? '"' + comm.transport + '"' : "null", escaped(comm.reason), ops[0], bytes[0], ops[1],
        bytes[1], ops[2], bytes[2], ops[3], bytes[3], ops[4], bytes[4], reasons);
    firstComm = false;
  });
  ProcessCore& core = ProcessCore::get();
  const CommTable::Forgotten old = core.comms().forgotten();
  text +=
      fmt::format("],\"forgotten\":{{\"communicators\":{},\"stagedOps\":{},\"stagedBytes\":{}}}",
                  old.communicators, old.ops[0], old.bytes[0]);
  text += fmt::format(",\"waits\":{{\"memop\":{},\"kernel\":{},\"parked\":{}}},\"doorbells\":{},\"ownBlocksByKernel\":{}}}",
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
