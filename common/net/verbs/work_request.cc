#include "common/net/verbs/work_request.h"

#include <algorithm>
#include <array>

namespace hoccl {

int postReceives(const QueuePair& pair, std::uint8_t path, std::uint32_t generation,
                 std::uint32_t count) {
  constexpr std::uint32_t kBatch = 32;
  const WorkId id{.kind = WorkId::Kind::Receive, .path = path, .generation = generation};
  std::array<ibv_recv_wr, kBatch> requests;
  while (count > 0) {
    const std::uint32_t now = std::min(count, kBatch);
    for (std::uint32_t i = 0; i < now; ++i) {
      requests[i] = {};
      requests[i].wr_id = id.pack();
      requests[i].next = i + 1 < now ? &requests[i + 1] : nullptr;
    }
    if (const int error = pair.postReceive(requests.data()); error != 0) return error;
    count -= now;
  }
  return 0;
}

}  // namespace hoccl
