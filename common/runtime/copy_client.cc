#include "common/runtime/copy_client.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/base/log.h"
#include "common/base/time.h"
#include "common/base/unix_socket.h"
#include "common/runtime/mover_spawn.h"

namespace hoccl {
namespace {

constexpr std::uint64_t kLookEveryNs = 5'000'000;
constexpr useconds_t kNapUs = 50;
/// After a drop that ran out of time, until one does not: a mover that is stuck costs its time
/// once.
constexpr std::uint64_t kSilentMs = 100;
/// Slots under which the two directions could not hold the parts of one message each.
constexpr std::uint32_t kFewestSlots = 8;

}  // namespace

Status CopyClient::start(const Driver* driver, CUcontext context, const Config& config,
                         std::unique_ptr<CopyClient>* out) {
  std::unique_ptr<CopyClient> client(new CopyClient);
  client->context_ = context;
  client->timeoutMs_ = config.timeoutMs;
  std::string executable;
  HOCCL_RETURN_IF_ERROR(findMover(config, &executable));
  {
    const ContextGuard guard(driver, context);
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuCtxGetDevice(&client->device_)));
  }
  HOCCL_RETURN_IF_ERROR(deviceUuid(driver, client->device_, &client->gpuUuid_));

  const auto slots = std::max(
      kFewestSlots, static_cast<std::uint32_t>(config.netStagingBytes / kCopySlotBytes) / 2 * 2);
  HOCCL_RETURN_IF_ERROR(
      SharedMemory::create("hoccl-copies", CopySegment::bytesFor(slots), &client->memory_));
  client->segment_ = CopySegment::create(client->memory_.data(), slots);
  client->turns_.resize(slots);
  for (std::uint32_t i = slots; i-- > 0;) {
    Pool& pool = client->poolOf(i);
    pool.free.push_back(i);
    ++pool.total;
  }

  client->bell_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!client->bell_) return Status::fromErrno("eventfd", errno);
  UniqueFd moverSide;
  HOCCL_RETURN_IF_ERROR(makeSocketPair(&client->socket_, &moverSide));
  HOCCL_RETURN_IF_ERROR(
      spawnMover(executable, "--copies", moverSide.get(), &client->pid_, &client->pidfd_));
  moverSide.reset();
  // Pinning takes about half a second for 1 GiB.
  HOCCL_RETURN_IF_ERROR(client->greet(config.timeoutMs + client->memory_.size() / 200'000));
  *out = std::move(client);
  return {};
}

Status CopyClient::greet(std::uint64_t timeoutMs) {
  CopyHello hello{};
  hello.magic = kMoverMagic;
  hello.protocol = kMoverProtocol;
  hello.applicationPid = ::getpid();
  hello.segmentBytes = memory_.size();
  setText(hello.gpuUuid, gpuUuid_);
  const int fds[] = {memory_.fd(), bell_.get()};
  MoverReply reply{};
  std::size_t bytes = 0;
  std::vector<UniqueFd> received;
  Status status = sendWithFdsWithin(socket_.get(), &hello, sizeof hello, fds, timeoutMs);
  if (status) {
    status = recvWithFdsWithin(socket_.get(), &reply, sizeof reply, &bytes, &received, timeoutMs);
  }
  if (!status) {
    return status.inContext(fmt::format(
        "the mover (process {}) of GPU {} did not come up within {} ms (HOCCL_TIMEOUT_MS)", pid_,
        gpuUuid_, timeoutMs));
  }
  if (bytes != sizeof reply || reply.magic != kMoverMagic) {
    return Status::error(Code::Internal,
                         "the mover's answer is not HOCCL's: library and hoccl-mover "
                         "come from different builds");
  }
  if (reply.ok) return {};
  return Status::error(Code::System,
                       fmt::format("the mover of GPU {}: {}", gpuUuid_, getText(reply.text)));
}

CopyClient::~CopyClient() {
  socket_.reset();  // tells the mover to end
  if (pid_ <= 0 || !pidfd_) return;
  pollfd gone{pidfd_.get(), POLLIN, 0};
  if (::poll(&gone, 1, static_cast<int>(timeoutMs_)) <= 0) ::kill(pid_, SIGKILL);
  siginfo_t info{};
  ::waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(pidfd_.get()), &info, WEXITED);
}

// --- Imports -------------------------------------------------------------------------------------

Status CopyClient::importHandle(CUdeviceptr base, std::uint64_t bytes, const CUipcMemHandle& handle,
                                std::uint64_t* id) {
  CopyMessage message{};
  message.kind = CopyMessageKind::ImportHandle;
  message.base = base;
  message.bytes = bytes;
  static_assert(sizeof handle == sizeof message.ipcHandle);
  std::memcpy(message.ipcHandle, &handle, sizeof handle);
  return import(message, {}, id);
}

Status CopyClient::importSegment(CUdeviceptr base, std::uint64_t bytes, UniqueFd segment,
                                 std::uint64_t* id) {
  CopyMessage message{};
  message.kind = CopyMessageKind::ImportSegment;
  message.base = base;
  message.bytes = bytes;
  return import(message, std::move(segment), id);
}

Status CopyClient::import(CopyMessage message, UniqueFd segment, std::uint64_t* id) {
  const std::lock_guard<std::mutex> lock(control_);
  if (imports_ == kMaxCopyImports) {
    return Status::error(Code::Unsupported,
                         fmt::format("more than {} allocations and segments registered at once; "
                                     "PyTorch's expandable_segments have one for every 20 MiB",
                                     kMaxCopyImports));
  }
  while (used_[nextImport_ % kMaxCopyImports]) ++nextImport_;
  *id = nextImport_++;
  used_[*id % kMaxCopyImports] = true;
  ++imports_;
  message.import = *id;
  queue(message, std::move(segment));  // waking the mover would cost more than all the rest
  return {};
}

void CopyClient::drop(std::span<const std::uint64_t> ids) {
  std::uint64_t patienceMs = timeoutMs_;
  {
    const std::lock_guard<std::mutex> lock(control_);
    for (const std::uint64_t id : ids) {
      CopyMessage message{};
      message.kind = CopyMessageKind::Drop;
      message.import = id;
      queue(message, {});
    }
    flushHeld();
    if (silent_) patienceMs = kSilentMs;
  }
  const Deadline deadline = Deadline::afterMs(patienceMs);
  bool timedOut = false;
  for (const std::uint64_t id : ids) {
    const CopyImport& import = segment_.import(id);
    while (import.gone.load(std::memory_order_acquire) != id && alive() && !timedOut) {
      timedOut = deadline.passed();
      flush();
      ::usleep(kNapUs);
    }
  }
  if (timedOut) {
    logWarn(
        "the mover (process {}) of GPU {} has not unmapped memory that NCCL gives back within {} "
        "ms "
        "(HOCCL_TIMEOUT_MS)",
        pid_, gpuUuid_, patienceMs);
  }
  const std::lock_guard<std::mutex> lock(control_);
  silent_ = timedOut;
  for (const std::uint64_t id : ids) {
    // One that is still mapped keeps its place: its answer would be taken for another's.
    if (segment_.import(id).gone.load(std::memory_order_acquire) != id && alive()) continue;
    used_[id % kMaxCopyImports] = false;
    --imports_;
  }
}

/// control_ is held.
void CopyClient::queue(CopyMessage message, UniqueFd segment) {
  message.magic = kMoverMagic;
  outbox_.push_back({message, std::move(segment)});
  waiting_.store(true, std::memory_order_release);
}

/// In order, and never waiting: what the socket has no room for goes with the next call.

void CopyClient::flushHeld() {
  while (!outbox_.empty()) {
    const Waiting& first = outbox_.front();
    const int fd = first.segment.get();
    bool sent = false;
    const Status status = sendWithFds(socket_.get(), &first.message, sizeof first.message,
                                      std::span<const int>(&fd, fd >= 0 ? 1 : 0), &sent);
    if (status && !sent) break;
    if (!status) {  // the mover has ended, which `alive` tells
      outbox_.clear();
      break;
    }
    outbox_.pop_front();
  }
  waiting_.store(!outbox_.empty(), std::memory_order_release);
}

void CopyClient::flush() {
  if (!waiting_.load(std::memory_order_acquire)) return;
  const std::lock_guard<std::mutex> lock(control_);
  flushHeld();
}

// --- Slots ---------------------------------------------------------------------------------------

std::uint32_t CopyClient::take(Direction direction, bool spare) {
  const std::lock_guard<std::mutex> lock(slots_);
  Pool& pool = pools_[direction == Direction::ToHost ? 0 : 1];
  if (!pool.parting.empty()) {
    std::erase_if(pool.parting, [&](std::uint32_t slot) {
      if (!over(slot)) return false;
      pool.free.push_back(slot);
      return true;
    });
  }
  if (pool.free.size() <= (spare ? pool.total / 2 : 0)) return kNoSlot;
  const std::uint32_t slot = pool.free.back();
  pool.free.pop_back();
  return slot;
}

void CopyClient::giveBack(std::uint32_t slot) {
  const std::lock_guard<std::mutex> lock(slots_);
  Pool& pool = poolOf(slot);
  (over(slot) ? pool.free : pool.parting).push_back(slot);
}

void CopyClient::copy(std::uint32_t index, std::span<const CopyPiece> pieces) {
  CopySlot& slot = segment_.slot(index);
  slot.turn = ++turns_[index];
  slot.toDevice = index < segment_.slots() / 2 ? 0 : 1;
  slot.pieces = static_cast<std::uint32_t>(pieces.size());
  std::copy(pieces.begin(), pieces.end(), slot.piece);
  segment_.push(index);
  ring();
}

bool CopyClient::over(std::uint32_t slot) const {
  return segment_.slot(slot).done.reached(turns_[slot]);
}

Status CopyClient::outcome(std::uint32_t index) const {
  const CopySlot& slot = segment_.slot(index);
  if (slot.failed.load(std::memory_order_acquire) < turns_[index]) return {};
  if (segment_.header().broken.load(std::memory_order_acquire) != 0) {
    return Status::error(Code::Cuda, fmt::format("the mover of GPU {}: {}", gpuUuid_,
                                                 getText(segment_.header().text)));
  }
  for (std::uint32_t i = 0; i < slot.pieces; ++i) {
    const CopyImport& import = segment_.import(slot.piece[i].import);
    if (import.failed.load(std::memory_order_acquire) == slot.piece[i].import) {
      return Status::error(Code::Cuda,
                           fmt::format("the mover of GPU {}: {}", gpuUuid_, getText(import.text)));
    }
  }
  return Status::error(Code::InvalidArgument,
                       "device memory was sent or received after its registration had ended");
}

// --- The mover -----------------------------------------------------------------------------------

void CopyClient::ring() {
  CopyHeader& header = segment_.header();
  // Between the push and the look whether the mover sleeps; the mover has its half.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (header.moverSleeps.load(std::memory_order_relaxed) != 0) {
    const std::uint64_t one = 1;
    [[maybe_unused]] ssize_t put = ::write(bell_.get(), &one, sizeof one);
  }
}

bool CopyClient::alive() {
  if (dead_.load(std::memory_order_relaxed)) return false;
  const std::uint64_t now = monotonicNs();
  if (now - lookedNs_.load(std::memory_order_relaxed) < kLookEveryNs) return true;
  lookedNs_.store(now, std::memory_order_relaxed);
  pollfd gone{pidfd_.get(), POLLIN, 0};
  if (::poll(&gone, 1, 0) > 0) dead_.store(true, std::memory_order_relaxed);
  return !dead_.load(std::memory_order_relaxed);
}

Status CopyClient::whyDead() const {
  siginfo_t info{};
  std::string how = "has ended";
  if (::waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(pidfd_.get()), &info,
               WEXITED | WNOHANG | WNOWAIT) == 0 &&
      info.si_pid == pid_) {
    how = info.si_code == CLD_EXITED ? fmt::format("exited with status {}", info.si_status)
                                     : fmt::format("was killed by signal {}", info.si_status);
  }
  return Status::error(
      Code::System,
      fmt::format("the mover (process {}) of GPU {}, which copies for the net plugin, {}", pid_,
                  gpuUuid_, how));
}

}  // namespace hoccl
