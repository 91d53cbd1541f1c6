// The operations of the stand-in NCCL on host memory, and memory's own functions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "test/nccl-standin/testing.h"

namespace hoccl {
namespace {

template <typename T>
void checkReductions(const Nccl& nccl, int rank, ncclComm_t comm, ncclDataType_t type) {
  std::vector<T> in(1001), out(1001, T(-1));
  std::iota(in.begin(), in.end(), T(rank * 1000));
  RANK_OK(nccl.ncclAllReduce(in.data(), out.data(), in.size(), type, ncclSum, comm, nullptr));
  for (std::size_t i = 0; i < in.size(); ++i) RANK_CHECK(out[i] == T(3 * i + 3000));
  RANK_OK(nccl.ncclAllReduce(in.data(), in.data(), in.size(), type, ncclAvg, comm, nullptr));
  for (std::size_t i = 0; i < in.size(); ++i) RANK_CHECK(in[i] == T(i + 1000));
}

TEST(NcclStandinCollectives, Collectives) {
  runRanks(3, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 3, id, rank));
    checkReductions<float>(nccl, rank, comm, ncclFloat32);
    checkReductions<double>(nccl, rank, comm, ncclFloat64);
    checkReductions<int>(nccl, rank, comm, ncclInt32);

    std::vector<int> in{rank, 10 + rank, 20 + rank}, out(3, -1);
    RANK_OK(nccl.ncclReduce(in.data(), rank == 2 ? out.data() : nullptr, 3, ncclInt32, ncclMax, 2,
                            comm, nullptr));
    RANK_CHECK(rank != 2 || (out == std::vector<int>{2, 12, 22}));
    int one = -1;
    RANK_OK(nccl.ncclReduceScatter(in.data(), &one, 1, ncclInt32, ncclSum, comm, nullptr));
    RANK_CHECK(one == 30 * rank + 3);
    RANK_OK(nccl.ncclAllGather(&rank, out.data(), 1, ncclInt32, comm, nullptr));
    RANK_CHECK((out == std::vector<int>{0, 1, 2}));
    RANK_OK(nccl.ncclAlltoAll(in.data(), out.data(), 1, ncclInt32, comm, nullptr));
    RANK_CHECK((out == std::vector<int>{10 * rank, 10 * rank + 1, 10 * rank + 2}));
    RANK_OK(nccl.ncclGather(&in[1], out.data(), 1, ncclInt32, 1, comm, nullptr));
    RANK_CHECK(rank != 1 || (out == std::vector<int>{10, 11, 12}));
    RANK_OK(nccl.ncclScatter(in.data(), &one, 1, ncclInt32, 2, comm, nullptr));
    RANK_CHECK(one == 10 * rank + 2);
    RANK_OK(nccl.ncclBcast(in.data(), 3, ncclInt32, 1, comm, nullptr));
    RANK_CHECK((in == std::vector<int>{1, 11, 21}));
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

constexpr int kRanks = 3;

std::vector<int> numbers(int seed, std::size_t count) {
  std::vector<int> made(count);
  for (std::size_t i = 0; i < count; ++i) made[i] = seed * 100000 + static_cast<int>(i) * 3;
  return made;
}

/// Blocks of `count`, one of each rank.
std::vector<int> blocksOfAll(std::size_t count) {
  std::vector<int> all;
  for (int from = 0; from < kRanks; ++from) {
    const std::vector<int> block = numbers(from, count);
    all.insert(all.end(), block.begin(), block.end());
  }
  return all;
}

TEST(NcclStandinCollectives, InPlaceAndOfNothing) {
  runRanks(kRanks, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, kRanks, id, rank));
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{70001}}) {
      const std::vector<int> all = blocksOfAll(count), mine = numbers(rank, count);
      std::vector<int> data(kRanks * count + 1, -7);
      const auto block = [&](int of) { return data.data() + of * count; };
      const auto guarded = [&] { return data.back() == -7; };

      std::copy(mine.begin(), mine.end(), block(rank));
      RANK_OK(nccl.ncclAllGather(block(rank), data.data(), count, ncclInt32, comm, nullptr));
      RANK_CHECK(std::equal(all.begin(), all.end(), data.begin()) && guarded());

      std::fill(data.begin(), data.end(), -7);
      std::copy(mine.begin(), mine.end(), block(rank));
      RANK_OK(nccl.ncclGather(block(rank), data.data(), count, ncclInt32, 2, comm, nullptr));
      RANK_CHECK(rank != 2 || std::equal(all.begin(), all.end(), data.begin()));
      RANK_CHECK(guarded());

      if (rank == 1) std::copy(all.begin(), all.end(), data.begin());
      RANK_OK(nccl.ncclScatter(data.data(), block(rank), count, ncclInt32, 1, comm, nullptr));
      RANK_CHECK(std::equal(mine.begin(), mine.end(), block(rank)) && guarded());

      std::copy(mine.begin(), mine.end(), data.begin());
      RANK_OK(nccl.ncclBroadcast(data.data(), data.data(), count, ncclInt32, 0, comm, nullptr));
      RANK_CHECK(std::equal(all.begin(), all.begin() + count, data.begin()) && guarded());

      std::copy(all.begin(), all.end(), data.begin());
      RANK_OK(nccl.ncclReduceScatter(data.data(), block(rank), count, ncclInt32, ncclSum, comm,
                                     nullptr));
      for (std::size_t i = 0; i < count; ++i) RANK_CHECK(block(rank)[i] == 3 * mine[i]);
      RANK_OK(
          nccl.ncclReduce(block(rank), block(rank), count, ncclInt32, ncclMin, 0, comm, nullptr));
      RANK_CHECK(guarded());
    }
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinCollectives, OneGroupOfEverythingOnTwoCommunicators) {
  runRanks(kRanks, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    constexpr std::size_t kCount = 5003;
    ncclComm_t comms[2] = {};
    RANK_OK(nccl.ncclCommInitRank(&comms[0], kRanks, id, rank));
    RANK_OK(nccl.ncclCommSplit(comms[0], 0, -rank, &comms[1], nullptr));  // ranks reversed
    const std::vector<int> all = blocksOfAll(kCount), mine = numbers(rank, kCount);
    std::vector<int> gathered(all.size()), exchanged(all.size()), sum(kCount), self(kCount),
        ring(kCount);
    RANK_OK(nccl.ncclGroupStart());
    RANK_OK(nccl.ncclAllGather(mine.data(), gathered.data(), kCount, ncclInt32, comms[0], nullptr));
    RANK_OK(
        nccl.ncclAllReduce(mine.data(), sum.data(), kCount, ncclInt32, ncclMax, comms[1], nullptr));
    RANK_OK(nccl.ncclSend(mine.data(), kCount, ncclInt32, rank, comms[0], nullptr));
    RANK_OK(nccl.ncclRecv(self.data(), kCount, ncclInt32, rank, comms[0], nullptr));
    const int other = kRanks - 1 - rank;  // this rank in comms[1]
    RANK_OK(nccl.ncclRecv(ring.data(), kCount, ncclInt32, (other + 1) % kRanks, comms[1], nullptr));
    RANK_OK(nccl.ncclSend(mine.data(), kCount, ncclInt32, (other + 2) % kRanks, comms[1], nullptr));
    RANK_OK(nccl.ncclAlltoAll(all.data(), exchanged.data(), kCount, ncclInt32, comms[0], nullptr));
    RANK_OK(nccl.ncclGroupEnd());
    RANK_CHECK(gathered == all && self == mine && sum == numbers(kRanks - 1, kCount));
    RANK_CHECK(ring == numbers((rank + 2) % kRanks, kCount));
    for (int from = 0; from < kRanks; ++from) {
      RANK_CHECK(std::equal(mine.begin(), mine.end(), exchanged.begin() + from * kCount));
    }
    for (ncclComm_t comm : comms) RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinCollectives, ConfigFormsDoTheSame) {
  runRanks(kRanks, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, kRanks, id, rank));
    alignas(16) unsigned char raw[256] = {};  // as large as a later NCCL's may be
    auto* config = reinterpret_cast<StandinCollConfig*>(raw);
    config->size = sizeof raw;
    config->version = 23102;
    std::vector<int> in{rank, 10 + rank, 20 + rank}, out(3, -1);
    RANK_CHECK(nccl.ncclAllGatherConfig(&rank, out.data(), 1, ncclInt32, comm, nullptr, config) ==
               ncclInvalidArgument);
    config->magic = 0xcafebeef;
    RANK_OK(nccl.ncclAllGatherConfig(&rank, out.data(), 1, ncclInt32, comm, nullptr, config));
    RANK_CHECK((out == std::vector<int>{0, 1, 2}));
    RANK_OK(nccl.ncclAlltoAllConfig(in.data(), out.data(), 1, ncclInt32, comm, nullptr, config));
    RANK_CHECK((out == std::vector<int>{10 * rank, 10 * rank + 1, 10 * rank + 2}));
    RANK_OK(nccl.ncclGatherConfig(&in[1], out.data(), 1, ncclInt32, 1, comm, nullptr, nullptr));
    RANK_CHECK(rank != 1 || (out == std::vector<int>{10, 11, 12}));
    int one = -1;
    RANK_OK(nccl.ncclScatterConfig(in.data(), &one, 1, ncclInt32, 2, comm, nullptr, config));
    RANK_CHECK(one == 10 * rank + 2);
    RANK_OK(nccl.ncclAllReduceConfig(&rank, &one, 1, ncclInt32, ncclSum, comm, nullptr, config));
    RANK_CHECK(one == 3);
    RANK_OK(nccl.ncclReduceConfig(&rank, &one, 1, ncclInt32, ncclMax, 0, comm, nullptr, config));
    RANK_CHECK(one == (rank == 0 ? 2 : 3));
    RANK_OK(nccl.ncclReduceScatterConfig(in.data(), &one, 1, ncclInt32, ncclSum, comm, nullptr,
                                         config));
    RANK_CHECK(one == 30 * rank + 3);
    RANK_OK(
        nccl.ncclBroadcastConfig(in.data(), out.data(), 3, ncclInt32, 1, comm, nullptr, config));
    RANK_CHECK((out == std::vector<int>{1, 11, 21}));
    RANK_CHECK(nccl.lines().find("ncclAllGatherConfig comm=1 rank=" + std::to_string(rank) +
                                 " peer=-1 bytes=4 dtype=2 stream=0x0 depth=0\n") !=
               std::string::npos);
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinCollectives, OperatorsOfTheApplicationAndHalf) {
  runRanks(2, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 2, id, rank));
    ncclRedOp_t op;
    double by = rank + 2;
    RANK_OK(nccl.ncclRedOpCreatePreMulSum(&op, &by, ncclFloat64, ncclScalarHostImmediate, comm));
    by = 1e9;  // was read at once
    const double in = 10 + rank;
    double out = 0;
    float wrongType = 0;
    RANK_CHECK(nccl.ncclAllReduce(&wrongType, &wrongType, 1, ncclFloat32, op, comm, nullptr) ==
               ncclInvalidArgument);
    RANK_OK(nccl.ncclGroupStart());
    RANK_OK(nccl.ncclAllReduce(&in, &out, 1, ncclFloat64, op, comm, nullptr));
    RANK_OK(nccl.ncclRedOpDestroy(op, comm));  // after the call that was given it
    RANK_OK(nccl.ncclGroupEnd());
    RANK_CHECK(out == 2 * 10 + 3 * 11 && in == 10 + rank);
    RANK_CHECK(nccl.ncclRedOpDestroy(op, comm) == ncclInvalidArgument);
    RANK_CHECK(nccl.ncclAllReduce(&in, &out, 1, ncclFloat64, op, comm, nullptr) ==
               ncclInvalidArgument);
    const std::uint16_t half = rank == 0 ? 0x3e00 : 0x4080;  // 1.5, 2.25
    std::uint16_t sum = 0;
    RANK_OK(nccl.ncclAllReduce(&half, &sum, 1, ncclFloat16, ncclSum, comm, nullptr));
    RANK_CHECK(sum == 0x4380);  // 3.75
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinCollectives, ASimulatedGroupMovesNothing) {
  runRanks(2, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 2, id, rank));
    RANK_CHECK(nccl.ncclGroupSimulateEnd(nullptr) == ncclInvalidUsage);
    std::vector<int> small(1, 5), large(100000, 5);
    float times[2] = {};
    for (int i = 0; i < 2; ++i) {
      std::vector<int>& data = i == 0 ? small : large;
      ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
      RANK_OK(nccl.ncclGroupStart());
      RANK_OK(nccl.ncclAllReduce(data.data(), data.data(), data.size(), ncclInt32, ncclSum, comm,
                                 nullptr));
      RANK_OK(nccl.ncclGroupSimulateEnd(&info));
      times[i] = info.estimatedTime;
      RANK_CHECK(data.back() == 5);
    }
    RANK_CHECK(times[0] > 0 && times[1] > times[0]);
    // With an information that is none the group fails, and is over; without any it is done.
    ncclSimInfo_t wrong{};
    RANK_OK(nccl.ncclGroupStart());
    RANK_OK(nccl.ncclAllReduce(small.data(), small.data(), 1, ncclInt32, ncclSum, comm, nullptr));
    RANK_CHECK(nccl.ncclGroupSimulateEnd(&wrong) == ncclInvalidArgument);
    RANK_CHECK(nccl.ncclGroupEnd() == ncclInvalidUsage && small[0] == 5);
    RANK_OK(nccl.ncclGroupStart());
    RANK_OK(nccl.ncclAllReduce(small.data(), small.data(), 1, ncclInt32, ncclSum, comm, nullptr));
    RANK_OK(nccl.ncclGroupSimulateEnd(nullptr));
    RANK_CHECK(small[0] == 10);
    RANK_OK(nccl.ncclCommDestroy(comm));
  });
}

TEST(NcclStandinCollectives, RegistrationsAndWindowsGoThroughThePublicFunctions) {
  runRanks(1, [](const Nccl& nccl, int rank, ncclUniqueId id) {
    ncclComm_t comm = nullptr;
    RANK_OK(nccl.ncclCommInitRank(&comm, 1, id, rank));
    void *memory = nullptr, *handle = nullptr;
    RANK_OK(nccl.ncclMemAlloc(&memory, 8192));
    RANK_OK(nccl.ncclCommRegister(comm, memory, 8192, &handle));
    RANK_OK(nccl.ncclCommDeregister(comm, handle));
    RANK_CHECK(nccl.ncclCommDeregister(comm, handle) == ncclInvalidArgument);
    ncclWindow_t first = nullptr, left = nullptr;
    RANK_OK(nccl.ncclCommWindowRegister(comm, memory, 8192, &first, NCCL_WIN_COLL_SYMMETRIC));
    RANK_OK(nccl.ncclCommWindowRegister(comm, memory, 4096, &left, NCCL_WIN_DEFAULT));
    RANK_CHECK(first && left && first != left);
    RANK_OK(nccl.ncclCommWindowDeregister(comm, first));
    RANK_CHECK(nccl.ncclCommWindowDeregister(comm, first) == ncclInvalidArgument);
    RANK_OK(nccl.ncclCommDestroy(comm));
    RANK_OK(nccl.ncclMemFree(memory));
    std::string names;
    const std::string lines = nccl.lines();
    for (std::size_t at = 0; at < lines.size(); at = lines.find('\n', at) + 1) {
      names += lines.substr(at, lines.find(' ', at) - at) + "\n";
    }
    RANK_CHECK(names ==
               "ncclGetUniqueId\nncclCommInitRank\nncclMemAlloc\n"
               "ncclCommRegister\nncclCommDeregister\nncclCommDeregister\n"
               "ncclCommWindowRegister\nncclMemAlloc\nncclCommRegister\n"
               "ncclCommWindowRegister\nncclCommRegister\n"
               "ncclCommWindowDeregister\nncclCommDeregister\nncclCommWindowDeregister\n"
               "ncclCommDestroy\nncclCommWindowDeregister\nncclCommDeregister\nncclMemFree\n"
               "ncclMemFree\n");
  });
}

}  // namespace
}  // namespace hoccl
