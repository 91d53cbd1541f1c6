// Transfers out of and into host memory.

#include <cstring>
#include <vector>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kSizes[] = {64 << 10, (64 << 10) + 1, 300001, (4 << 20) + 3, 9000001};

/// Both ways at once, the send from allocated host memory, the receive into registered memory.
void hostMemory(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  const int peer = 1 - rank.rank;
  markSmOps();
  for (std::size_t bytes : kSizes) {
    const std::string what = fmt::format("{} bytes of host memory", bytes);
    void* out = nullptr;
    REQUIRE_CU(cuda().memHostAlloc(&out, bytes, 0));
    makePattern(seedOf(rank.rank, bytes), static_cast<unsigned char*>(out), bytes);
    std::vector<unsigned char> in(bytes + 2 * 4096, 0xa5), wanted(bytes);
    REQUIRE_CU(cuda().memHostRegister(in.data(), in.size(), CU_MEMHOSTREGISTER_DEVICEMAP));
    REQUIRE_NCCL(nccl().ncclGroupStart());
    REQUIRE_NCCL(nccl().ncclSend(out, bytes, ncclUint8, peer, comm, stream));
    REQUIRE_NCCL(nccl().ncclRecv(in.data() + 4096, bytes, ncclUint8, peer, comm, stream));
    REQUIRE_NCCL(nccl().ncclGroupEnd());
    awaitStream(stream, what);
    makePattern(seedOf(peer, bytes), wanted.data(), bytes);
    REQUIRE(std::memcmp(in.data() + 4096, wanted.data(), bytes) == 0, "{}: wrong bytes", what);
    REQUIRE(in[4095] == 0xa5 && in[4096 + bytes] == 0xa5, "{}: written beyond the buffer", what);
    REQUIRE_CU(cuda().memHostUnregister(in.data()));
    REQUIRE_CU(cuda().memFreeHost(out));
  }
  say("smOps", std::to_string(smOps()));
  sayStats();
  REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
}

/// Memory that CUDA does not know is refused, and the rank goes on to the end.
void unknownMemory(const Rank& rank) {
  ncclComm_t comm = rank.communicator();
  CUstream stream = newStream();
  std::vector<unsigned char> bytes(1 << 20);
  const ncclResult_t result =
      nccl().ncclSend(bytes.data(), bytes.size(), ncclUint8, 1 - rank.rank, comm, stream);
  REQUIRE(result == ncclInvalidArgument, "a send of unknown memory gives {}",
          static_cast<int>(result));
  say("error", nccl().ncclGetLastError(comm));
  REQUIRE_NCCL(nccl().ncclCommAbort(comm));
}

}  // namespace

const std::vector<Scenario> kHostMemoryScenarios = {
    {"hostMemory", hostMemory},
    {"unknownMemory", unknownMemory},
};

}  // namespace e2e
