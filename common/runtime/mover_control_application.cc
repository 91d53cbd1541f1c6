// What the mover's control thread does at the application's word: communicators, with how each of
// their ranks is reached, memory that the application copies by itself, spans.

#include <fmt/format.h>
#include <sys/epoll.h>

#include <cstring>
#include <utility>

#include "common/base/log.h"
#include "common/base/shared_memory.h"
#include "common/base/unix_socket.h"
#include "common/gpu/peer_memory.h"
#include "common/runtime/link.h"
#include "common/runtime/mover_control.h"
#include "common/runtime/mover_protocol.h"

namespace hoccl {
namespace {

constexpr std::uint64_t kMaxRanks = 1u << 20;

}  // namespace

void MoverControl::applicationSays() {
  alignas(8) std::byte buffer[kMostMoverMessage];
  std::size_t bytes = 0;
  std::vector<UniqueFd> fds;
  ReceiveState state = ReceiveState::WouldBlock;
  Status status = recvWithFds(application_, buffer, sizeof buffer, &bytes, &fds, &state);
  if (status && state == ReceiveState::WouldBlock) return;
  // Of a message that could not be taken in (no descriptor left) the application hears.
  if (state == ReceiveState::Closed || (!status && state != ReceiveState::Message)) {
    // The application has let go of its mover, or is gone and its pidfd will say so too.
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, application_, nullptr);
    LoopEvent stop;
    stop.kind = LoopEvent::Kind::Stop;
    post(std::move(stop));
    return;
  }
  MoverReply reply{};
  reply.magic = kMoverMagic;
  if (!status) {
    reply.refused = static_cast<std::uint32_t>(kSpanPieces);  // none of them is at fault
  } else if (bytes == sizeof(AddStaging)) {
    status = addStaging(buffer, &fds);
  } else if (bytes == sizeof(AddSpan) || bytes == kShortAddSpan) {
    status = addSpan(buffer, bytes, fds, &reply.refused);
  } else {
    status = addCommunicator(buffer, bytes, &fds);
  }
  reply.ok = status ? 1 : 0;
  setText(reply.text, status.message());
  if (Status sent = sendWithFdsWithin(application_, &reply, sizeof reply, {}, timeoutMs_); !sent) {
    logWarn("the application takes no answer: {}", sent.message());
  }
}

/// Device memory through which the lanes copy between two places in host memory.
Status MoverControl::makeScratch() {
  LoopEvent event;
  event.kind = LoopEvent::Kind::Scratch;
  const std::size_t bytes = 2 * SharedLanes::kCount * loopback_.slotBytes;
  if (Status status = HOCCL_CU(driver_, cuMemAlloc(&event.address, bytes)); !status) {
    return status.inContext(
        fmt::format("{} bytes of device memory for copies between host memory (four times "
                    "HOCCL_SLOT_BYTES)",
                    bytes));
  }
  post(std::move(event));
  hasScratch_ = true;
  return {};
}

/// Once there are both operations of the rank with itself and a neighbour.
void MoverControl::makeDetour() {
  if (!hasLoopback_ || !neighbour_ || std::exchange(detourTried_, true)) return;
  LoopEvent event;
  event.kind = LoopEvent::Kind::DetourMade;
  event.peer = self_;
  event.detour = std::make_unique<Detour>();
  if (Status status = allocateDetour(event.detour.get()); !status) {
    logInfo("what this rank copies to itself goes through host memory: {}", status.message());
    return;
  }
  post(std::move(event));
}

Status MoverControl::allocateDetour(Detour* detour) {
  const std::uint64_t bytes = loopback_.slots * loopback_.slotBytes;
  Status status = PeerMemory::create(driver_, device_, *neighbour_, bytes, &detour_);
  if (!status) {
    return status.inContext(
        fmt::format("no {} bytes on GPU {} (HOCCL_SLOTS times "
                    "HOCCL_SLOT_BYTES)",
                    bytes, *neighbour_));
  }
  for (std::size_t i = 0; i < SharedLanes::kCount; ++i) {
    HOCCL_RETURN_IF_ERROR(makeStreamLane(driver_, LaneDirection::Peer, &detour->out.lanes[i]));
    HOCCL_RETURN_IF_ERROR(makeStreamLane(driver_, LaneDirection::Peer, &detour->in.lanes[i]));
  }
  detour->memory = detour_.address();
  detour->stride = loopback_.slotBytes;
  return {};
}

Status MoverControl::addStaging(const void* data, std::vector<UniqueFd>* fds) {
  AddStaging request{};
  std::memcpy(&request, data, sizeof request);
  if (request.magic != kMoverMagic || fds->size() != 1 || staging_.count(request.id) > 0) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("staging memory {:#x} with {} descriptors makes no sense",
                                     request.id, fds->size()));
  }
  if (!hasScratch_) HOCCL_RETURN_IF_ERROR(makeScratch());
  StagingMemory staging;
  HOCCL_RETURN_IF_ERROR(SharedMemory::map(std::move((*fds)[0]), request.bytes, &staging.memory));
  HOCCL_RETURN_IF_ERROR(HostRegistration::create(driver_, staging.memory.data(), request.bytes,
                                                 &staging.registration));
  staging.memory.closeFd();
  staging_.emplace(request.id, std::move(staging));
  return {};
}

Status MoverControl::addSpan(const void* data, std::size_t bytes, std::vector<UniqueFd>& fds,
                             std::uint32_t* refused) {
  AddSpan request{};
  std::memcpy(&request, data, bytes);
  if (request.magic != kMoverMagic || bytes != bytesOf(request) || !isSpan(request.id) ||
      slotOfSpan(request.id) >= kSpanSlots) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("a span {:#x} makes no sense", request.id));
  }
  bool whole = false;
  LoopEvent event;
  HOCCL_RETURN_IF_ERROR(spans_.add(request, fds, &whole, &event.address, refused));
  if (!whole) return {};
  // In the loop's cache before the application may name it.
  event.kind = LoopEvent::Kind::SpanAdded;
  event.buffer.kind = BufferKind::Span;
  event.buffer.allocationId = request.id;
  event.buffer.allocationBase = request.base;
  event.buffer.allocationBytes = request.bytes;
  post(std::move(event));
  return {};
}

/// How bytes go between this GPU and that one of the node. `why`: if not over NVLink.
Reach MoverControl::reachOf(const std::string& gpuUuid, std::string* why) {
  const Reach near = pullAlways_ ? Reach::Pull : Reach::Push;
  if (gpuUuid.empty()) return near;
  if (p2pLimit().level == P2pLevel::Loc) {
    *why = fmt::format("{} says that GPUs do not copy to each other (HOCCL_P2P=1 is ahead of it)",
                       p2pLimit().from);
    return Reach::None;
  }
  CUdevice peer = 0;
  if (!deviceByUuid(driver_, gpuUuid, &peer)) {
    *why = fmt::format("the mover does not see {}", gpuUuid);
    return Reach::None;
  }
  int access = 0, atomics = 0;
  using Attribute = CUdevice_P2PAttribute;
  const auto ask = [&](Attribute which, int* value) {
    return driver_->cuDeviceGetP2PAttribute(value, which, device_, peer) == CUDA_SUCCESS;
  };
  if (!ask(CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, &access) || !access) {
    *why = fmt::format("this GPU does not reach {}", gpuUuid);
    return Reach::None;
  }
  // Links with native atomics are NVLink.
  if (!ask(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, &atomics)) atomics = 0;
  if (atomics) return near;
  const P2pLevel distance = distanceTo(peer), most = p2pLimit().level;
  *why = fmt::format("this GPU reaches {} over PCIe ({})", gpuUuid, p2pLevelName(distance));
  if (pushOverPcie_) return Reach::Push;
  if (pullAlways_ || distance <= most) return Reach::Pull;
  *why +=
      fmt::format("; {} allows {} at most (NCCL_P2P_LEVEL={} would allow it, see docs/direct.md)",
                  p2pLimit().from.empty() ? "NCCL's rule" : p2pLimit().from, p2pLevelName(most),
                  p2pLevelName(distance));
  return Reach::None;
}

const P2pLimit& MoverControl::p2pLimit() {
  int gpus = 0;
  if (!p2pLimit_) {
    if (driver_->cuDeviceGetCount(&gpus) != CUDA_SUCCESS) gpus = 0;
    p2pLimit_ = hoccl::p2pLimit(gpus);
  }
  return *p2pLimit_;
}

P2pLevel MoverControl::distanceTo(CUdevice peer) const {
  char own[32] = {}, other[32] = {};
  if (driver_->cuDeviceGetPCIBusId(own, sizeof own, device_) != CUDA_SUCCESS ||
      driver_->cuDeviceGetPCIBusId(other, sizeof other, peer) != CUDA_SUCCESS) {
    return P2pLevel::Sys;
  }
  return pciDistance(own, other);
}

Status MoverControl::addCommunicator(const void* data, std::size_t bytes,
                                     std::vector<UniqueFd>* fds) {
  AddCommunicator request{};
  if (bytes != sizeof request || fds->size() != 1) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("request of {} bytes and {} descriptors", bytes, fds->size()));
  }
  std::memcpy(&request, data, sizeof request);
  if (request.magic != kMoverMagic || request.index >= kMaxCommunicators || request.ranks == 0 ||
      request.ranks > kMaxRanks || request.rank < 0 ||
      static_cast<std::uint64_t>(request.rank) >= request.ranks) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("communicator {} with rank {} of {} makes no sense",
                                     request.index, request.rank, request.ranks));
  }
  SharedMemory table;
  HOCCL_RETURN_IF_ERROR(
      SharedMemory::map(std::move((*fds)[0]), peerTableBytes(request.ranks), &table));
  const auto* records = static_cast<const PeerRecord*>(table.data());
  LoopEvent event;
  event.kind = LoopEvent::Kind::CommunicatorAdded;
  event.communicator = std::make_unique<CommunicatorInfo>();
  event.communicator->index = request.index;
  event.communicator->id = request.id;
  event.communicator->rank = request.rank;
  for (std::uint64_t i = 0; i < request.ranks; ++i) {
    Reach reach = Reach::None;
    if (records[i].direct) {
      std::string why;
      reach = reachOf(getText(records[i].gpuUuid), &why);
      if (!why.empty()) {
        logInfo("what ranks {} and {} send each other is {}: {}", request.rank, i,
                reach == Reach::None   ? "staged"
                : reach == Reach::Pull ? "pulled by the receiver's mover"
                                       : "pushed by the sender's mover",
                why);
      }
    }
    event.communicator->peers.push_back({records[i].mover, getText(records[i].address),
                                         getText(records[i].host), records[i].pid, reach});
  }
  for (std::uint64_t step = 1; step < request.ranks && !neighbour_; ++step) {
    // The next rank, so that each GPU of a node is the neighbour of one.
    const std::uint64_t i = (static_cast<std::uint64_t>(request.rank) + step) % request.ranks;
    const std::string uuid = getText(records[i].gpuUuid);
    CUdevice device = 0;
    if (event.communicator->peers[i].reach == Reach::Push && !uuid.empty() &&
        deviceByUuid(driver_, uuid, &device) && device != device_) {
      neighbour_ = device;
    }
  }
  table.closeFd();
  event.communicator->counts = pairCountsOf(table.data(), request.ranks);
  event.communicator->table = std::move(table);
  post(std::move(event));
  makeDetour();
  return {};
}

}  // namespace hoccl
