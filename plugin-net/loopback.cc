#include "plugin-net/loopback.h"

#include <fmt/format.h>

#include <array>
#include <cstring>

namespace hoccl::net_plugin {

Status Loopback::create(const VerbsGround& ground, std::size_t rails,
                        std::unique_ptr<Loopback>* out) {
  auto loop = std::make_unique<Loopback>();
  loop->memory_.resize(kDepth * kEagerBytes + kLanding);
  loop->ways_.resize(rails);
  const QueuePairShape shape{.sendDepth = kDepth,
                             .receiveDepth = 1,
                             .inlineBytes = 0,
                             .alsoAccess = IBV_ACCESS_REMOTE_READ};
  for (std::size_t i = 0; i < rails; ++i) {
    const std::shared_ptr<const Nic>& nic = ground.nics[i];
    Way& way = loop->ways_[i];
    if (Status s = CompletionQueue::create(*nic, 2 * kDepth, &way.completions); !s) return s;
    if (Status s = MemoryRegion::create(*nic, ground.settings, loop->memory_.data(),
                                        loop->memory_.size(), &way.region);
        !s) {
      return s;
    }
    if (Status s = QueuePair::create(nic, way.completions, ground.settings, shape, &way.pair); !s) {
      return s;
    }
    const QueuePairPeer itself{nic->address(), way.pair.number(), way.pair.sequence()};
    if (Status s = way.pair.connect(ground.settings, itself); !s) return s;
  }
  *out = std::move(loop);
  return {};
}

/// A request of any way takes a place of its own.
bool Loopback::post(Way& way, ibv_send_wr& request, std::uint32_t* count) {
  counts_[request.wr_id] = count;
  request.send_flags = IBV_SEND_SIGNALED;
  bool someTaken = false;  // of one request none
  if (const int error = way.pair.postSend(&request, &someTaken); error != 0) {
    counts_[request.wr_id] = nullptr;
    failure_ = Status::fromErrno("a write into device memory cannot be posted", error);
    return false;
  }
  ++way.out;
  return true;
}

bool Loopback::write(const RailMemory& memory, void* to, const void* data, std::uint64_t bytes,
                     std::uint32_t* written) {
  for (std::uint32_t place = 0; place < kDepth; ++place) {
    if (counts_[place] != nullptr) continue;
    std::byte* const from = memory_.data() + place * kEagerBytes;
    std::memcpy(from, data, bytes);
    ibv_sge piece{reinterpret_cast<std::uint64_t>(from), static_cast<std::uint32_t>(bytes),
                  ways_[0].region.localKey()};
    ibv_send_wr request{};
    request.wr_id = place;
    request.opcode = IBV_WR_RDMA_WRITE;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.wr.rdma.remote_addr = reinterpret_cast<std::uint64_t>(to);
    request.wr.rdma.rkey = memory.remoteKey(0);
    return post(ways_[0], request, written);
  }
  return false;
}

bool Loopback::flush(const RailMemory& memory, const void* from, std::uint32_t* read) {
  std::array<std::uint32_t, kDepth> places{};
  std::uint32_t free = 0;
  for (std::uint32_t place = 0; place < kDepth; ++place) {
    if (counts_[place] == nullptr) places[free++] = place;
  }
  if (free < ways_.size()) return false;
  for (std::size_t rail = 0; rail < ways_.size(); ++rail) {
    ibv_sge piece{reinterpret_cast<std::uint64_t>(memory_.data() + kDepth * kEagerBytes), 1,
                  ways_[rail].region.localKey()};
    ibv_send_wr request{};
    request.wr_id = places[rail];
    request.opcode = IBV_WR_RDMA_READ;
    request.sg_list = &piece;
    request.num_sge = 1;
    request.wr.rdma.remote_addr = reinterpret_cast<std::uint64_t>(from);
    request.wr.rdma.rkey = memory.remoteKey(static_cast<std::uint32_t>(rail));
    if (!post(ways_[rail], request, read)) return false;
  }
  return true;
}

Status Loopback::progress() {
  if (!failure_) return failure_;
  std::array<ibv_wc, kDepth> done;
  for (Way& way : ways_) {
    if (way.out == 0) continue;
    const int count = way.completions.poll(done.data(), static_cast<int>(done.size()));
    if (count < 0) {
      return failure_ = Status::error(
                 Code::System,
                 fmt::format("a NIC's completion queue is broken (ibv_poll_cq: {})", count));
    }
    for (int i = 0; i < count; ++i) {
      const ibv_wc& completion = done[static_cast<std::size_t>(i)];
      if (completion.wr_id >= kDepth || counts_[completion.wr_id] == nullptr) continue;
      --way.out;
      if (completion.status == IBV_WC_SUCCESS) ++*counts_[completion.wr_id];
      counts_[completion.wr_id] = nullptr;
      if (completion.status != IBV_WC_SUCCESS && failure_.ok()) {
        failure_ = Status::error(
            Code::System, fmt::format("a NIC cannot reach the device memory of a receive (status "
                                      "{}, vendor error {:#x})",
                                      static_cast<int>(completion.status), completion.vendor_err));
      }
    }
  }
  return failure_;
}

void Loopback::stop() {
  for (Way& way : ways_) way.pair = QueuePair();
  counts_.fill(nullptr);
}

}  // namespace hoccl::net_plugin
