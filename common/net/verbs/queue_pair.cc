#include "common/net/verbs/queue_pair.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "common/base/random.h"

namespace hoccl {
namespace {

constexpr std::uint32_t kSequenceMask = 0xffffff;  // psn: 24 bits
/// Encoding 12: 0.64 ms between two tries while the peer has no receive posted.
constexpr std::uint8_t kRnrTimer = 12;
/// Without end: a peer that is stopped is waited for.
constexpr std::uint8_t kRnrRetry = 7;
constexpr std::uint8_t kHopLimit = 255;

int errorOf(int otherwise) { return errno != 0 ? errno : otherwise; }

unsigned accessOf(const VerbsSettings& settings) {
  const unsigned access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  return settings.relaxedOrdering == VerbsSettings::Choice::Off
             ? access
             : access | IBV_ACCESS_RELAXED_ORDERING;
}

/// What to do about memory that cannot be locked; drivers lock that of their queues, too.
std::string memlockText(int error) {
  rlimit limit{};
  if (error != ENOMEM && error != EAGAIN && error != EPERM) return {};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return fmt::format(
      ". RLIMIT_MEMLOCK is {} KiB here: raise it (ulimit -l unlimited, in Slurm "
      "PropagateResourceLimitsExcept=MEMLOCK, in a container --ulimit memlock=-1)",
      limit.rlim_cur / 1024);
}

}  // namespace

Status CompletionQueue::create(const Nic& nic, std::uint32_t entries, CompletionQueue* out) {
  CompletionQueue queue;
  queue.library_ = &nic.library();
  errno = 0;
  queue.cq_ = nic.library().createCq(nic.context(),
                                     static_cast<int>(std::min(entries, nic.mostCompletions())));
  if (!queue.cq_) {
    const int error = errorOf(ENOMEM);
    const Status why = Status::fromErrno(
        fmt::format("{} gives no completion queue of {} entries", nic.text(), entries), error);
    return Status::error(why.code(), why.message() + memlockText(error));
  }
  *out = std::move(queue);
  return {};
}

Status MemoryRegion::create(const Nic& nic, const VerbsSettings& settings, void* address,
                            std::size_t bytes, MemoryRegion* out, unsigned alsoAccess) {
  MemoryRegion region;
  region.library_ = &nic.library();
  const unsigned access = accessOf(settings) | alsoAccess;
  errno = 0;
  region.mr_ = nic.library().regMr(nic.pd(), address, bytes, access);
  if (!region.mr_) {
    const int error = errorOf(ENOMEM);
    const Status why = Status::fromErrno(
        fmt::format("{} cannot register {} bytes of memory", nic.text(), bytes), error);
    return Status::error(why.code(), why.message() + memlockText(error));
  }
  *out = std::move(region);
  return {};
}

Status MemoryRegion::createDmaBuf(const Nic& nic, const VerbsSettings& settings, void* address,
                                  std::size_t bytes, int fd, std::uint64_t offset,
                                  MemoryRegion* out, unsigned alsoAccess) {
  MemoryRegion region;
  region.library_ = &nic.library();
  if (!nic.library().regDmaBufMr) {
    return Status::error(Code::Unsupported,
                         "this libibverbs does not know DMA-BUF (rdma-core before 34)");
  }
  errno = 0;
  region.mr_ =
      nic.library().regDmaBufMr(nic.pd(), offset, bytes, reinterpret_cast<std::uint64_t>(address),
                                fd, static_cast<int>(accessOf(settings) | alsoAccess));
  if (!region.mr_) {
    return Status::fromErrno(
        fmt::format("{} cannot register {} bytes of a DMA-BUF", nic.text(), bytes), errorOf(EIO));
  }
  *out = std::move(region);
  return {};
}

ibv_qp_attr initAttributes(const Nic& nic, const VerbsSettings& settings) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = settings.pkeyIndex;
  attributes.port_num = nic.port();
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  return attributes;
}

ibv_qp_attr receiveAttributes(const Nic& nic, const VerbsSettings& settings,
                              const QueuePairPeer& peer) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(std::min(nic.address().mtu, peer.address.mtu));
  attributes.dest_qp_num = peer.number;
  attributes.rq_psn = peer.sequence;
  attributes.max_dest_rd_atomic = 1;
  attributes.min_rnr_timer = kRnrTimer;
  ibv_ah_attr& way = attributes.ah_attr;
  way.sl = settings.serviceLevel;
  way.port_num = nic.port();
  way.dlid = peer.address.lid;
  // On InfiniBand the LID is enough inside a subnet, whose prefix is the GID's upper half.
  const ibv_gid &own = nic.address().gid, &its = peer.address.gid;
  way.is_global = nic.address().linkLayer != IBV_LINK_LAYER_INFINIBAND ||
                  own.global.subnet_prefix != its.global.subnet_prefix;
  if (way.is_global) {
    way.grh.dgid = its;
    way.grh.sgid_index = nic.gidIndex();
    way.grh.hop_limit = kHopLimit;
    way.grh.traffic_class = settings.trafficClass;
  }
  return attributes;
}

ibv_qp_attr sendAttributes(const VerbsSettings& settings, std::uint32_t sequence) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = settings.timeout;
  attributes.retry_cnt = settings.retryCount;
  attributes.rnr_retry = kRnrRetry;
  attributes.sq_psn = sequence;
  attributes.max_rd_atomic = 1;
  return attributes;
}

Status QueuePair::create(std::shared_ptr<const Nic> nic, const CompletionQueue& cq,
                         const VerbsSettings& settings, const QueuePairShape& shape,
                         QueuePair* out) {
  QueuePair pair;
  pair.nic_ = std::move(nic);
  const Nic& device = *pair.nic_;
  std::uint64_t random = 0;
  if (Status status = random64(&random); !status) return status;
  pair.sequence_ = static_cast<std::uint32_t>(random) & kSequenceMask;
  ibv_qp_init_attr attributes{};
  attributes.send_cq = cq.get();
  attributes.recv_cq = cq.get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = shape.sendDepth;
  attributes.cap.max_recv_wr = shape.receiveDepth;
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_recv_sge = 1;
  attributes.cap.max_inline_data = shape.inlineBytes;
  const ibv_qp_init_attr asked = attributes;
  errno = 0;
  pair.qp_ = device.library().createQp(device.pd(), &attributes);
  if (!pair.qp_ && shape.inlineBytes > 0) {
    attributes = asked;
    attributes.cap.max_inline_data = 0;
    errno = 0;
    pair.qp_ = device.library().createQp(device.pd(), &attributes);
  }
  if (!pair.qp_) {
    const int error = errorOf(ENOMEM);
    const Status why =
        Status::fromErrno(fmt::format("{} gives no queue pair of {} sends and {} receives "
                                      "(HOCCL_SLOTS, HOCCL_QPS_PER_PEER)",
                                      device.text(), shape.sendDepth, shape.receiveDepth),
                          error);
    return Status::error(why.code(), why.message() + memlockText(error));
  }
  pair.inlineBytes_ = attributes.cap.max_inline_data;
  ibv_qp_attr init = initAttributes(device, settings);
  init.qp_access_flags |= shape.alsoAccess;
  if (const int error = device.library().modifyQp(
          pair.qp_, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
      error != 0) {
    return Status::fromErrno(
        fmt::format("{}: a queue pair with partition key {} (HOCCL_IB_PKEY) cannot be set up",
                    device.text(), settings.pkeyIndex),
        error);
  }
  *out = std::move(pair);
  return {};
}

Status QueuePair::connect(const VerbsSettings& settings, const QueuePairPeer& peer) {
  ibv_qp_attr attributes = receiveAttributes(*nic_, settings, peer);
  int error = nic_->library().modifyQp(qp_, &attributes,
                                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
                                           IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error == 0) {
    attributes = sendAttributes(settings, sequence_);
    error =
        nic_->library().modifyQp(qp_, &attributes,
                                 IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                     IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  }
  if (error == 0) return {};
  return Status::fromErrno(
      fmt::format("{} cannot be connected to {}", nic_->text(), addressText(peer.address)), error);
}

Status QueuePair::toError() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  const int error = nic_->library().modifyQp(qp_, &attributes, IBV_QP_STATE);
  return error == 0 ? Status() : Status::fromErrno("a queue pair cannot be stopped", error);
}

Status QueuePair::query(ibv_qp_attr* attributes) const {
  ibv_qp_init_attr init{};
  const int error = nic_->library().queryQp(
      qp_, attributes,
      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT, &init);
  return error == 0 ? Status() : Status::fromErrno("ibv_query_qp", error);
}

}  // namespace hoccl
