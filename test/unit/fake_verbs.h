#pragma once

// A verbs library without hardware: two hosts with devices that tests describe, queue pairs that
// record their attributes, writes that move memory when somebody polls, and completions that can be
// made to fail. What it refuses (a key that does not fit, a queue that overflows) is a bug in the
// caller, and fails the test.

#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "common/net/verbs/verbs_library.h"

namespace hoccl::test {

struct FakeGid {
  std::uint32_t index = 0;
  std::string address;  ///< "10.0.0.1" (mapped) or "fe80::1"
  std::uint32_t type = IBV_GID_TYPE_ROCE_V2;
};

struct FakeDevice : ibv_device {
  std::string title;
  int ports = 1;
  ibv_port_state state = IBV_PORT_ACTIVE;
  std::uint8_t linkLayer = IBV_LINK_LAYER_ETHERNET;
  std::uint16_t lid = 0;
  ibv_mtu mtu = IBV_MTU_1024;
  std::vector<FakeGid> gids;
  int mostRequests = 16384, mostCompletions = 1 << 20;
  std::uint32_t mostInline = 256;
  int openError = 0, registerError = 0, queueError = 0;
  int dmaBufError = 0;     ///< 0: only a descriptor that is none is refused
  bool cut = false;        ///< nothing leaves or reaches it
  bool silent = false;     ///< its completions are not to be had for now
  int connectError = 0;    ///< its queue pairs cannot be connected
  int stopError = 0;       ///< its queue pairs cannot be put into error
  bool pollFails = false;  ///< its completion queues are broken
  int queueTries = 0;      ///< queue pairs it was asked for
  std::uint32_t vendorError = 0x81;
  unsigned lastAccess = 0;  ///< of a registration

  explicit FakeDevice(std::string name) : ibv_device{}, title(std::move(name)) {}
  static ibv_gid parse(const std::string& text) {
    ibv_gid gid{};
    if (::inet_pton(AF_INET6, text.c_str(), gid.raw) != 1) {
      gid.raw[10] = gid.raw[11] = 0xff;
      EXPECT_EQ(::inet_pton(AF_INET, text.c_str(), gid.raw + 12), 1) << text;
    }
    return gid;
  }
};

/// One request to send, and what becomes of it.
struct FakeSend {
  std::uint64_t id = 0;
  ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE;
  bool signaled = false;
  std::uint32_t immediate = 0;
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::vector<std::byte> copy;  ///< inline
  std::uint64_t target = 0;
  std::uint32_t key = 0;
};

struct FakeContext : ibv_context {
  FakeDevice* its = nullptr;
};
struct FakePd : ibv_pd {};
struct FakeMr : ibv_mr {
  unsigned access = 0;
};
struct FakeCq : ibv_cq {
  std::deque<ibv_wc> done;
  std::size_t most = 0;
  bool neglected = false;  ///< it has given nothing for a while, and may hold too much
};
struct FakeQp : ibv_qp {
  FakeDevice* device = nullptr;
  FakeCq* cq = nullptr;
  ibv_qp_cap cap{};
  ibv_qp_attr attributes{};  ///< of all modifications so far
  std::deque<FakeSend> sends;
  std::deque<std::uint64_t> receives;
  std::deque<std::uint64_t> late;  ///< sends that have arrived, and whose completion comes later
  bool gap = false;                ///< a send has been lost: what is behind it is not taken
  std::uint32_t unpolled = 0;      ///< sends whose completion has not been taken
};

class FakeFabric {
 public:
  enum class Fate {
    Arrives,
    Lost,     ///< the sender gets an error, the receiver nothing
    AckLost,  ///< the receiver has it, and the sender gets an error
    AckLate,  ///< the receiver has it, and the sender hears so later
    Held,     ///< later
  };
  std::vector<std::unique_ptr<FakeDevice>> hosts[2];
  /// Asked for each request when its turn comes, under the fabric's lock.
  std::function<Fate(const FakeQp&, const FakeSend&)> fate;
  /// Asked for each request that is posted, under the lock: an errno value refuses it, and what is
  /// behind it in the same call.
  std::function<int(const FakeQp&, const ibv_send_wr&)> refusal;
  /// What a queue pair has to send when it fails or goes may be on the wire, and arrive later at
  /// one that still takes it.
  bool longWire = false;
  bool purgeOnDestroy = true;  ///< completions of a destroyed queue pair vanish (rxe keeps them)
  int openContexts = 0, pds = 0, mrs = 0, cqs = 0;

  static FakeFabric& get() {
    static FakeFabric fabric;
    return fabric;
  }
  /// As after the start; nothing of an earlier test may be in use.
  void reset() {
    const std::lock_guard lock(mutex_);
    EXPECT_TRUE(qps_.empty()) << "a queue pair was not destroyed";
    EXPECT_EQ(openContexts + pds + mrs + cqs, 0) << "something was not released";
    hosts[0].clear();
    hosts[1].clear();
    fate = nullptr;
    refusal = nullptr;
    longWire = false;
    wire_.clear();
    purgeOnDestroy = true;
  }
  FakeDevice& add(int host, const std::string& name, const std::string& address = {}) {
    hosts[host].push_back(std::make_unique<FakeDevice>(name));
    FakeDevice& device = *hosts[host].back();
    if (!address.empty()) device.gids.push_back({1, address, IBV_GID_TYPE_ROCE_V2});
    return device;
  }
  static const VerbsLibrary& library(int host) {
    static const VerbsLibrary tables[2] = {table<0>(), table<1>()};
    return tables[host];
  }
  /// Runs under the fabric's lock: faults begin and end between two requests.
  void atomically(const std::function<void()>& change) {
    const std::lock_guard lock(mutex_);
    change();
  }
  /// The queue pairs of a device, by number.
  std::vector<FakeQp*> pairsOf(const FakeDevice& device) {
    const std::lock_guard lock(mutex_);
    std::vector<FakeQp*> found;
    for (auto& [number, qp] : qps_) {
      if (qp->device == &device) found.push_back(qp.get());
    }
    return found;
  }

 private:
  // --- Functions of the table.
  static FakeDevice* deviceOf(ibv_context* context) {
    return static_cast<FakeContext*>(context)->its;
  }
  template <int kHost>
  static ibv_device** getDeviceList(int* count) {
    auto& devices = get().hosts[kHost];
    auto** list = new ibv_device*[devices.size() + 1]();
    for (std::size_t i = 0; i < devices.size(); ++i) list[i] = devices[i].get();
    *count = static_cast<int>(devices.size());
    return list;
  }
  static ibv_context* openDevice(ibv_device* device) {
    auto* its = static_cast<FakeDevice*>(device);
    errno = its->openError;
    if (its->openError != 0) return nullptr;
    auto* context = new FakeContext{};
    context->device = device;
    context->its = its;
    context->ops.poll_cq = pollCq;
    context->ops.post_send = postSend;
    context->ops.post_recv = postReceive;
    ++get().openContexts;
    return context;
  }
  static int closeDevice(ibv_context* context) {
    --get().openContexts;
    delete static_cast<FakeContext*>(context);
    return 0;
  }
  static int queryDevice(ibv_context* context, ibv_device_attr* attributes) {
    *attributes = {};
    attributes->max_qp_wr = deviceOf(context)->mostRequests;
    attributes->max_cqe = deviceOf(context)->mostCompletions;
    attributes->phys_port_cnt = static_cast<std::uint8_t>(deviceOf(context)->ports);
    return 0;
  }
  static int queryPort(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) {
    const FakeDevice& device = *deviceOf(context);
    *attributes = {};
    if (port == 0 || port > device.ports) return EINVAL;
    attributes->state = device.state;
    attributes->active_mtu = device.mtu;
    attributes->lid = device.lid;
    attributes->link_layer = device.linkLayer;
    attributes->gid_tbl_len = 16;
    return 0;
  }
  static int queryGid(ibv_context* context, std::uint8_t port, std::uint32_t index,
                      ibv_gid_entry* entry) {
    *entry = {};
    for (const FakeGid& each : deviceOf(context)->gids) {
      if (each.index != index) continue;
      entry->gid = FakeDevice::parse(each.address);
      entry->gid_index = index;
      entry->port_num = port;
      entry->gid_type = each.type;
      return 0;
    }
    return ENODATA;
  }
  static ibv_pd* allocPd(ibv_context* context) {
    auto* pd = new FakePd{};
    pd->context = context;
    ++get().pds;
    return pd;
  }
  static int deallocPd(ibv_pd* pd) {
    --get().pds;
    delete static_cast<FakePd*>(pd);
    return 0;
  }
  static ibv_mr* regMr(ibv_pd* pd, void* address, std::size_t bytes, unsigned access) {
    FakeDevice& device = *deviceOf(pd->context);
    device.lastAccess = access;
    errno = device.registerError;
    if (device.registerError != 0) return nullptr;
    const std::lock_guard lock(get().mutex_);
    auto mr = std::make_unique<FakeMr>();
    mr->context = pd->context;
    mr->pd = pd;
    mr->addr = address;
    mr->length = bytes;
    mr->lkey = mr->rkey = ++get().lastKey_;
    mr->access = access;
    ++get().mrs;
    return (get().regions_[mr->rkey] = std::move(mr)).get();
  }
  static ibv_mr* regDmaBufMr(ibv_pd* pd, std::uint64_t /*offset*/, std::size_t bytes,
                             std::uint64_t iova, int fd, int access) {
    FakeDevice& device = *deviceOf(pd->context);
    errno = device.dmaBufError != 0 ? device.dmaBufError : fd < 0 ? EBADF : 0;
    if (errno != 0) return nullptr;
    return regMr(pd, reinterpret_cast<void*>(iova), bytes, static_cast<unsigned>(access));
  }
  static int deregMr(ibv_mr* mr) {
    const std::lock_guard lock(get().mutex_);
    --get().mrs;
    get().regions_.erase(mr->rkey);
    return 0;
  }
  static ibv_cq* createCq(ibv_context* context, int entries) {
    errno = deviceOf(context)->queueError;
    if (errno != 0) return nullptr;
    auto* cq = new FakeCq{};
    cq->context = context;
    cq->most = static_cast<std::size_t>(entries);
    ++get().cqs;
    return cq;
  }
  static int destroyCq(ibv_cq* cq) {
    --get().cqs;
    delete static_cast<FakeCq*>(cq);
    return 0;
  }
  static ibv_qp* createQp(ibv_pd* pd, ibv_qp_init_attr* init) {
    FakeDevice& device = *deviceOf(pd->context);
    ++device.queueTries;
    errno = device.queueError != 0 ? device.queueError : EINVAL;
    if (device.queueError != 0) return nullptr;
    if (init->cap.max_inline_data > device.mostInline) return nullptr;
    if (init->cap.max_send_wr > static_cast<std::uint32_t>(device.mostRequests) ||
        init->cap.max_recv_wr > static_cast<std::uint32_t>(device.mostRequests)) {
      return nullptr;
    }
    const std::lock_guard lock(get().mutex_);
    auto qp = std::make_unique<FakeQp>();
    qp->context = pd->context;
    qp->pd = pd;
    qp->qp_num = ++get().lastNumber_;
    qp->device = &device;
    qp->cq = static_cast<FakeCq*>(init->send_cq);
    qp->cap = init->cap;
    qp->attributes.qp_state = IBV_QPS_RESET;
    return (get().qps_[qp->qp_num] = std::move(qp)).get();
  }
  static int destroyQp(ibv_qp* qp) {
    const std::lock_guard lock(get().mutex_);
    auto* its = static_cast<FakeQp*>(qp);
    get().ontoWire(*its);
    if (get().purgeOnDestroy) {
      std::erase_if(its->cq->done, [qp](const ibv_wc& wc) { return wc.qp_num == qp->qp_num; });
    }
    get().qps_.erase(qp->qp_num);
    return 0;
  }
  static int modifyQp(ibv_qp* qp, ibv_qp_attr* attributes, int mask) {
    const std::lock_guard lock(get().mutex_);
    auto& its = *static_cast<FakeQp*>(qp);
    ibv_qp_attr& has = its.attributes;
    const auto take = [&](int bit, auto ibv_qp_attr::*field) {
      if (mask & bit) has.*field = attributes->*field;
    };
    const ibv_qp_state from = has.qp_state, to = attributes->qp_state;
    const bool allowed = to == IBV_QPS_ERR || (from == IBV_QPS_RESET && to == IBV_QPS_INIT) ||
                         (from == IBV_QPS_INIT && to == IBV_QPS_RTR) ||
                         (from == IBV_QPS_RTR && to == IBV_QPS_RTS);
    EXPECT_TRUE(allowed) << "queue pair from state " << from << " to " << to;
    if (!allowed) return EINVAL;
    if (to == IBV_QPS_RTR && its.device->connectError != 0) return its.device->connectError;
    if (to == IBV_QPS_ERR && its.device->stopError != 0) return its.device->stopError;
    take(IBV_QP_PKEY_INDEX, &ibv_qp_attr::pkey_index);
    take(IBV_QP_PORT, &ibv_qp_attr::port_num);
    take(IBV_QP_ACCESS_FLAGS, &ibv_qp_attr::qp_access_flags);
    take(IBV_QP_AV, &ibv_qp_attr::ah_attr);
    take(IBV_QP_PATH_MTU, &ibv_qp_attr::path_mtu);
    take(IBV_QP_DEST_QPN, &ibv_qp_attr::dest_qp_num);
    take(IBV_QP_RQ_PSN, &ibv_qp_attr::rq_psn);
    take(IBV_QP_SQ_PSN, &ibv_qp_attr::sq_psn);
    take(IBV_QP_TIMEOUT, &ibv_qp_attr::timeout);
    take(IBV_QP_RETRY_CNT, &ibv_qp_attr::retry_cnt);
    take(IBV_QP_RNR_RETRY, &ibv_qp_attr::rnr_retry);
    take(IBV_QP_MIN_RNR_TIMER, &ibv_qp_attr::min_rnr_timer);
    has.qp_state = to;
    if (to == IBV_QPS_ERR) get().flush(its);
    return 0;
  }
  static int queryQp(ibv_qp* qp, ibv_qp_attr* attributes, int, ibv_qp_init_attr*) {
    const std::lock_guard lock(get().mutex_);
    *attributes = static_cast<FakeQp*>(qp)->attributes;
    return 0;
  }

  // --- Operations of a context.
  static int postSend(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** bad) {
    const std::lock_guard lock(get().mutex_);
    auto& its = *static_cast<FakeQp*>(qp);
    for (; request; request = request->next) {
      *bad = request;
      if (its.attributes.qp_state != IBV_QPS_RTS && its.attributes.qp_state != IBV_QPS_ERR) {
        return EINVAL;
      }
      if (const int error = get().refusal ? get().refusal(its, *request) : 0; error != 0) {
        return error;
      }
      if (its.sends.size() + its.late.size() + its.unpolled >= its.cap.max_send_wr) {
        ADD_FAILURE() << "a send queue overflows";
        return ENOMEM;
      }
      FakeSend send;
      send.id = request->wr_id;
      send.opcode = request->opcode;
      send.signaled = (request->send_flags & IBV_SEND_SIGNALED) != 0;
      send.immediate = request->imm_data;
      send.target = request->wr.rdma.remote_addr;
      send.key = request->wr.rdma.rkey;
      if (request->num_sge > 0) {
        send.data = reinterpret_cast<const std::byte*>(request->sg_list[0].addr);
        send.bytes = request->sg_list[0].length;
        if (request->send_flags & IBV_SEND_INLINE) {
          EXPECT_LE(send.bytes, its.cap.max_inline_data);
          send.copy.assign(send.data, send.data + send.bytes);
        } else {
          EXPECT_TRUE(
              get().covered(request->sg_list[0].lkey, request->sg_list[0].addr, send.bytes, its.pd))
              << "a key that does not fit the memory sent from";
        }
      }
      its.sends.push_back(std::move(send));
    }
    if (its.attributes.qp_state == IBV_QPS_ERR) get().flush(its);
    return 0;
  }
  static int postReceive(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr** bad) {
    const std::lock_guard lock(get().mutex_);
    auto& its = *static_cast<FakeQp*>(qp);
    for (; request; request = request->next) {
      *bad = request;
      if (its.attributes.qp_state == IBV_QPS_RESET) return EINVAL;
      if (its.receives.size() >= its.cap.max_recv_wr) {
        ADD_FAILURE() << "a receive queue overflows";
        return ENOMEM;
      }
      its.receives.push_back(request->wr_id);
    }
    if (its.attributes.qp_state == IBV_QPS_ERR) get().flush(its);
    return 0;
  }
  static int pollCq(ibv_cq* cq, int most, ibv_wc* completions) {
    const std::lock_guard lock(get().mutex_);
    get().move();
    auto& done = static_cast<FakeCq*>(cq)->done;
    if (deviceOf(cq->context)->pollFails) return -1;
    if (deviceOf(cq->context)->silent) return 0;
    if (done.empty()) static_cast<FakeCq*>(cq)->neglected = false;
    int count = 0;
    for (; count < most && !done.empty(); ++count) {
      completions[count] = done.front();
      done.pop_front();
      const auto qp = get().qps_.find(completions[count].qp_num);
      const bool send = completions[count].opcode != IBV_WC_RECV_RDMA_WITH_IMM;
      if (qp != get().qps_.end() && send && qp->second->unpolled > 0) --qp->second->unpolled;
    }
    return count;
  }

  // --- The network. Under the lock.
  bool covered(std::uint32_t key, std::uint64_t address, std::size_t bytes, const ibv_pd* pd) {
    const auto found = regions_.find(key);
    if (found == regions_.end() || found->second->pd != pd) return false;
    const auto base = reinterpret_cast<std::uint64_t>(found->second->addr);
    return address >= base && bytes <= found->second->length &&
           address - base <= found->second->length - bytes;
  }
  void complete(FakeQp& qp, std::uint64_t id, ibv_wc_opcode opcode, ibv_wc_status status,
                std::uint32_t immediate = 0) {
    ibv_wc wc{};
    wc.wr_id = id;
    wc.status = status;
    wc.opcode = opcode;
    wc.vendor_err = status == IBV_WC_SUCCESS ? 0 : qp.device->vendorError;
    wc.qp_num = qp.qp_num;
    wc.imm_data = immediate;
    wc.wc_flags = opcode == IBV_WC_RECV_RDMA_WITH_IMM ? IBV_WC_WITH_IMM : 0;
    // One that gives nothing would be full at last, which nobody can help.
    qp.cq->neglected = qp.cq->neglected || qp.device->silent;
    EXPECT_TRUE(qp.cq->done.size() < qp.cq->most || qp.cq->neglected)
        << "a completion queue overflows";
    qp.cq->done.push_back(wc);
    if (opcode != IBV_WC_RECV_RDMA_WITH_IMM) ++qp.unpolled;
  }
  void ontoWire(FakeQp& qp) {
    if (!longWire || qp.gap || qp.attributes.dest_qp_num == 0) return;
    for (std::size_t left = random_() % 4; left > 0 && !qp.sends.empty(); --left) {
      FakeSend send = qp.sends.front();
      if (send.copy.empty() && send.bytes > 0) send.copy.assign(send.data, send.data + send.bytes);
      wire_.push_back({qp.qp_num, qp.attributes.dest_qp_num, std::move(send)});
      if (qp.attributes.qp_state == IBV_QPS_ERR) {
        complete(qp, qp.sends.front().id, IBV_WC_RDMA_WRITE, IBV_WC_WR_FLUSH_ERR);
      }
      qp.sends.pop_front();
    }
  }
  /// What is on the wire, in its order.
  void deliver() {
    while (!wire_.empty() && random_() % 64 == 0) {
      const OnWire each = std::move(wire_.front());
      wire_.pop_front();
      const auto found = qps_.find(each.to);
      if (found == qps_.end()) continue;
      FakeQp& to = *found->second;
      const FakeSend& send = each.send;
      const bool notifies = send.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
      if ((to.attributes.qp_state != IBV_QPS_RTR && to.attributes.qp_state != IBV_QPS_RTS) ||
          to.attributes.dest_qp_num != each.from || (notifies && to.receives.empty()) ||
          (send.bytes > 0 && !covered(send.key, send.target, send.bytes, to.pd))) {
        std::erase_if(wire_, [&](const OnWire& other) { return other.from == each.from; });
        continue;
      }
      land(send, to);
    }
  }
  /// In the memory of the other end, which hears of it.
  void land(const FakeSend& send, FakeQp& to) {
    if (send.bytes > 0) {
      std::memcpy(reinterpret_cast<void*>(send.target),
                  send.copy.empty() ? send.data : send.copy.data(), send.bytes);
    }
    if (send.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
      const std::uint64_t id = to.receives.front();
      to.receives.pop_front();
      complete(to, id, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_SUCCESS, send.immediate);
    }
  }
  void flush(FakeQp& qp) {
    ontoWire(qp);
    for (const std::uint64_t id : qp.late) {
      complete(qp, id, IBV_WC_RDMA_WRITE, IBV_WC_WR_FLUSH_ERR);
    }
    qp.late.clear();
    for (const FakeSend& send : qp.sends) {
      complete(qp, send.id, IBV_WC_RDMA_WRITE, IBV_WC_WR_FLUSH_ERR);
    }
    for (const std::uint64_t id : qp.receives) {
      complete(qp, id, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_WR_FLUSH_ERR);
    }
    qp.sends.clear();
    qp.receives.clear();
  }
  void fail(FakeQp& qp, ibv_wc_status status) {
    complete(qp, qp.sends.front().id, IBV_WC_RDMA_WRITE, status);
    qp.sends.pop_front();
    qp.attributes.qp_state = IBV_QPS_ERR;
    flush(qp);
  }
  /// Some requests of some queue pairs, so that their order differs from that of the posts.
  void move() {
    deliver();
    for (auto& [number, qp] : qps_) {
      if (!qp->late.empty() && random_() % 16 == 0) {
        for (const std::uint64_t id : qp->late) {
          complete(*qp, id, IBV_WC_RDMA_WRITE, IBV_WC_SUCCESS);
        }
        qp->late.clear();
      }
      for (std::uint32_t left = random_() % 4; left > 0 && !qp->sends.empty(); --left) {
        if (!step(*qp)) break;
      }
    }
  }
  bool step(FakeQp& qp) {
    if (qp.attributes.qp_state != IBV_QPS_RTS) return false;
    const FakeSend& send = qp.sends.front();
    const auto found = qps_.find(qp.attributes.dest_qp_num);
    FakeQp* to = found == qps_.end() ? nullptr : found->second.get();
    const bool heard =
        to && !qp.device->cut && !to->device->cut &&
        (to->attributes.qp_state == IBV_QPS_RTR || to->attributes.qp_state == IBV_QPS_RTS) &&
        to->attributes.dest_qp_num == qp.qp_num;
    const Fate its = !heard ? Fate::Lost : fate ? fate(qp, send) : Fate::Arrives;
    if (its == Fate::Held) return false;
    if (its == Fate::Lost) {
      qp.gap = true;
      fail(qp, IBV_WC_RETRY_EXC_ERR);
      return false;
    }
    EXPECT_EQ(qp.attributes.path_mtu, to->attributes.path_mtu);
    EXPECT_EQ(qp.attributes.sq_psn, to->attributes.rq_psn);
    const bool notifies = send.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    if (notifies && to->receives.empty()) return false;  // not ready: again later
    if (send.bytes > 0) {
      if (!covered(send.key, send.target, send.bytes, to->pd)) {
        ADD_FAILURE() << "a write to memory the peer has not registered";
        fail(qp, IBV_WC_REM_ACCESS_ERR);
        return false;
      }
    }
    land(send, *to);
    if (its == Fate::AckLost) {
      fail(qp, IBV_WC_RETRY_EXC_ERR);
      return false;
    }
    // In order: nothing passes an acknowledgement that is late.
    if (send.signaled && (its == Fate::AckLate || !qp.late.empty())) {
      qp.late.push_back(send.id);
    } else if (send.signaled) {
      complete(qp, send.id, IBV_WC_RDMA_WRITE, IBV_WC_SUCCESS);
    }
    qp.sends.pop_front();
    return true;
  }

  template <int kHost>
  static VerbsLibrary table() {
    VerbsLibrary t;
    t.getDeviceList = getDeviceList<kHost>;
    t.freeDeviceList = [](ibv_device** list) { delete[] list; };
    t.getDeviceName = [](ibv_device* d) -> const char* {
      return static_cast<FakeDevice*>(d)->title.c_str();
    };
    t.openDevice = openDevice;
    t.closeDevice = closeDevice;
    t.queryDevice = queryDevice;
    t.queryPort = queryPort;
    t.queryGid = queryGid;
    t.allocPd = allocPd;
    t.deallocPd = deallocPd;
    t.regMr = regMr;
    t.regDmaBufMr = regDmaBufMr;
    t.deregMr = deregMr;
    t.createCq = createCq;
    t.destroyCq = destroyCq;
    t.createQp = createQp;
    t.destroyQp = destroyQp;
    t.modifyQp = modifyQp;
    t.queryQp = queryQp;
    t.statusText = [](ibv_wc_status status) -> const char* {
      return status == IBV_WC_RETRY_EXC_ERR ? "transport retry counter exceeded" : "some error";
    };
    return t;
  }

  struct OnWire {
    std::uint32_t from = 0, to = 0;
    FakeSend send;
  };

  std::mutex mutex_;
  std::deque<OnWire> wire_;
  std::mt19937 random_{7};
  std::uint32_t lastKey_ = 100, lastNumber_ = 0x10;
  std::map<std::uint32_t, std::unique_ptr<FakeMr>> regions_;
  std::map<std::uint32_t, std::unique_ptr<FakeQp>> qps_;
};

}  // namespace hoccl::test
