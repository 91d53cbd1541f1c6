// Which NCCL calls an operation becomes.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tools/bench/issue.h"

namespace hoccl::bench {
namespace {

std::vector<std::string> calls;
char sendBuffer[4096], receiveBuffer[4096];

/// "s+100": 100 bytes into the send buffer; "r" is the receive buffer, "0" null.
std::string place(const void* pointer) {
  const auto* at = static_cast<const char*>(pointer);
  if (!at) return "0";
  if (at >= sendBuffer && at < sendBuffer + sizeof sendBuffer)
    return "s+" + std::to_string(at - sendBuffer);
  return "r+" + std::to_string(at - receiveBuffer);
}

ncclResult_t record(std::string text) {
  calls.push_back(std::move(text));
  return ncclSuccess;
}

NcclApi fakeNccl(bool newer) {
  NcclApi api;
  api.ncclGroupStart = [] { return record("start"); };
  api.ncclGroupEnd = [] { return record("end"); };
  api.ncclSend = [](const void* from, std::size_t count, ncclDataType_t, int peer, ncclComm_t,
                    cudaStream_t) {
    return record("send " + place(from) + " " + std::to_string(count) + " to " +
                  std::to_string(peer));
  };
  api.ncclRecv = [](void* to, std::size_t count, ncclDataType_t, int peer, ncclComm_t,
                    cudaStream_t) {
    return record("recv " + place(to) + " " + std::to_string(count) + " from " +
                  std::to_string(peer));
  };
  api.ncclAllGather = [](const void* in, void* out, std::size_t count, ncclDataType_t, ncclComm_t,
                         cudaStream_t) {
    return record("allgather " + place(in) + " " + place(out) + " " + std::to_string(count));
  };
  if (!newer) return api;
  api.alltoAll = [](const void* in, void* out, std::size_t count, ncclDataType_t, ncclComm_t,
                    cudaStream_t) {
    return record("alltoall " + place(in) + " " + place(out) + " " + std::to_string(count));
  };
  api.scatter = [](const void* in, void* out, std::size_t count, ncclDataType_t, int root,
                   ncclComm_t, cudaStream_t) {
    return record("scatter " + place(in) + " " + place(out) + " " + std::to_string(count) +
                  " root " + std::to_string(root));
  };
  return api;
}

std::vector<std::string> issued(const NcclApi& api, Operation operation, int rank,
                                const Shape& shape, bool grouped = false, int skew = 2) {
  calls.clear();
  Issuer issuer;
  issuer.nccl = &api;
  issuer.plan = {operation, 2, 0, Pattern::Ring, skew, 4};
  issuer.grouped = grouped;
  const RankLayout layout = layoutOf(issuer.plan, rank, shape);
  const void* from = layout.inPlace         ? receiveBuffer
                     : layout.sendBytes > 0 ? sendBuffer
                                            : static_cast<const void*>(nullptr);
  const Status status = issuer.issue(layout, from, receiveBuffer);
  EXPECT_TRUE(status) << status.message();
  return calls;
}

using Calls = std::vector<std::string>;

TEST(BenchIssue, CallsNcclsOwnFunction) {
  const NcclApi api = fakeNccl(true);
  EXPECT_EQ(issued(api, Operation::AllGather, 1, {800, false}), Calls{"allgather s+0 r+0 100"});
  EXPECT_EQ(issued(api, Operation::AllGather, 1, {800, true}), Calls{"allgather r+400 r+0 100"});
  EXPECT_EQ(issued(api, Operation::AlltoAll, 1, {800, false}), Calls{"alltoall s+0 r+0 100"});
  EXPECT_EQ(issued(api, Operation::Scatter, 1, {800, false}), Calls{"scatter 0 r+0 100 root 0"});
}

TEST(BenchIssue, AnOlderNcclGetsGroupedSendAndReceive) {
  const Calls expected{"start",
                       "send s+0 100 to 0",
                       "send s+400 100 to 1",
                       "recv r+0 100 from 0",
                       "recv r+400 100 from 1",
                       "end"};
  EXPECT_EQ(issued(fakeNccl(false), Operation::AlltoAll, 1, {800, false}), expected);
  // And so does a newer one on request.
  EXPECT_EQ(issued(fakeNccl(true), Operation::AlltoAll, 1, {800, false}, true), expected);
}

TEST(BenchIssue, InPlaceNothingIsSentToTheRankItself) {
  EXPECT_EQ(issued(fakeNccl(false), Operation::Gather, 0, {800, true}),
            Calls{"recv r+400 100 from 1"});
  EXPECT_EQ(issued(fakeNccl(false), Operation::Gather, 1, {800, true}), Calls{"send r+0 100 to 0"});
  EXPECT_EQ(issued(fakeNccl(false), Operation::Scatter, 0, {800, true}),
            Calls{"send r+400 100 to 1"});
}

TEST(BenchIssue, SkewedBlocks) {
  EXPECT_EQ(issued(fakeNccl(true), Operation::AlltoAllv, 1, {1200, false}),
            (Calls{"start", "send s+0 200 to 0", "send s+800 100 to 1", "recv r+0 200 from 0",
                   "recv r+800 100 from 1", "end"}));
}

TEST(BenchIssue, BlocksWithoutBytesAreNotIssued) {
  // Two elements, of which the skew leaves none for the rank itself.
  EXPECT_EQ(issued(fakeNccl(true), Operation::AlltoAllv, 1, {8, false}, false, 1000),
            (Calls{"start", "send s+0 2 to 0", "recv r+0 2 from 0", "end"}));
}

}  // namespace
}  // namespace hoccl::bench
