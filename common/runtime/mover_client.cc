#include "common/runtime/mover_client.h"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "common/base/light_fence.h"
#include "common/base/log.h"
#include "common/base/time.h"
#include "common/base/unix_socket.h"
#include "common/runtime/live_movers.h"
#include "common/runtime/mover_spawn.h"

namespace hoccl {
namespace {

/// How often a full pool or ring is tried before the thread sleeps between tries. Yielding instead
/// would keep the mover, which has to empty it, from a CPU where there are few.
constexpr int kSpins = 1000;
constexpr useconds_t kFullNapUs = 20;
/// Launch slots among which the launch path goes round as long as one of them is free: 8 KiB of
/// flags.
constexpr std::uint32_t kSlotWindow = 64;

}  // namespace

Status MoverClient::start(const Driver* driver, CUcontext context, const Config& config,
                          bool memoryOpWaits, std::unique_ptr<MoverClient>* out) {
  std::unique_ptr<MoverClient> client(new MoverClient);
  client->driver_ = driver;
  client->context_ = context;
  client->timeoutMs_ = config.timeoutMs;
  std::string executable;
  HOCCL_RETURN_IF_ERROR(findMover(config, &executable));

  const auto slots = static_cast<std::uint32_t>(config.flagPool);
  HOCCL_RETURN_IF_ERROR(
      SharedMemory::create("hoccl-segment", Segment::bytesFor(slots), &client->memory_));
  client->segment_ = Segment::create(client->memory_.data(), slots);
  client->segment_.header().lightFences.store(registerLightFences() ? 1 : 0);
  client->staging_ =
      std::make_unique<StagingPool>(driver, context, client.get(), config.appCopyBytes);
  client->spans_ = std::make_unique<MappedSpans>(driver, context, client.get(), client->segment_);
  client->drops_ = std::make_unique<ImportDrops>(client->segment_);
  client->lastSequence_ = std::make_unique<std::atomic<std::uint64_t>[]>(slots);
  {
    ContextGuard guard(driver, context);
    CUdevice device = 0;
    HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuCtxGetDevice(&device)));
    HOCCL_RETURN_IF_ERROR(deviceUuid(driver, device, &client->gpuUuid_));
    HOCCL_RETURN_IF_ERROR(HostRegistration::create(driver, client->memory_.data(),
                                                   client->memory_.size(), &client->registration_));
  }
  client->bell_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  client->stopWatch_.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!client->bell_ || !client->stopWatch_) return Status::fromErrno("eventfd", errno);
  UniqueFd moverSide;
  HOCCL_RETURN_IF_ERROR(makeSocketPair(&client->socket_, &moverSide));
  HOCCL_RETURN_IF_ERROR(client->spawn(executable, moverSide.get()));
  moverSide.reset();
  HOCCL_RETURN_IF_ERROR(client->greet(client->gpuUuid_, memoryOpWaits));

  // The watcher makes no CUDA call and takes no signal meant for the application.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  client->watcher_ = std::thread([self = client.get()] { self->watch(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  LiveMovers::ofThisProcess().add(client.get());
  *out = std::move(client);
  return {};
}

Status MoverClient::spawn(const std::string& executable, int socket) {
  return spawnMover(executable, "--serve", socket, &pid_, &moverPidfd_);
}

Status MoverClient::greet(const std::string& gpuUuid, bool memoryOpWaits) {
  MoverHello hello{};
  hello.magic = kMoverMagic;
  hello.protocol = kMoverProtocol;
  hello.applicationPid = ::getpid();
  hello.segmentBytes = memory_.size();
  setText(hello.gpuUuid, gpuUuid);
  hello.memoryOpWaits = memoryOpWaits ? 1 : 0;
  const int fds[] = {memory_.fd(), bell_.get()};
  MoverReply reply{};
  std::size_t bytes = 0;
  std::vector<UniqueFd> received;
  Status status = sendWithFdsWithin(socket_.get(), &hello, sizeof hello, fds, timeoutMs_);
  if (status) {
    status = recvWithFdsWithin(socket_.get(), &reply, sizeof reply, &bytes, &received, timeoutMs_);
  }
  if (!status) {
    return status.inContext(fmt::format(
        "the mover (process {}) of GPU {} did not come up within {} ms (HOCCL_TIMEOUT_MS)", pid_,
        gpuUuid, timeoutMs_));
  }
  if (bytes != sizeof reply || reply.magic != kMoverMagic) {
    return Status::error(Code::Internal,
                         "the mover's answer is not HOCCL's: library and hoccl-mover "
                         "come from different builds");
  }
  if (!reply.ok) {
    return Status::error(Code::System,
                         fmt::format("the mover of GPU {}: {}", gpuUuid, getText(reply.text)));
  }
  up_ = true;
  id_ = reply.mover;
  shmAddress_ = getText(reply.shmAddress);
  tcpAddress_ = getText(reply.tcpAddress);
  tcpProblem_ = getText(reply.text);
  verbsAddress_ = getText(reply.verbsAddress);
  verbsProblem_ = getText(reply.verbsText);
  return {};
}

MoverClient::~MoverClient() {
  LiveMovers::ofThisProcess().remove(this);
  if (watcher_.joinable()) {
    const std::uint64_t one = 1;
    [[maybe_unused]] ssize_t put = ::write(stopWatch_.get(), &one, sizeof one);
    watcher_.join();
  }
  socket_.reset();  // tells the mover to end
  if (pid_ > 0 && moverPidfd_) {
    pollfd gone{moverPidfd_.get(), POLLIN, 0};
    // One that has not answered in its time gets no more of it.
    const int patience = up_ ? static_cast<int>(timeoutMs_) : 0;
    if (::poll(&gone, 1, patience) <= 0) ::kill(pid_, SIGKILL);
    siginfo_t info{};
    ::waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(moverPidfd_.get()), &info, WEXITED);
  }
  ContextGuard guard(driver_, context_);
  staging_.reset();
  registration_.reset();
}

/// The watcher thread: sleeps until the mover has ended, then releases whoever waits for it.
void MoverClient::watch() {
  ::prctl(PR_SET_NAME, "hoccl-watch");
  pollfd fds[] = {{moverPidfd_.get(), POLLIN, 0}, {stopWatch_.get(), POLLIN, 0}};
  while (::poll(fds, 2, -1) < 0 && errno == EINTR) {
  }
  if (fds[1].revents) return;
  siginfo_t info{};
  std::string how = "ended";
  if (::waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(moverPidfd_.get()), &info,
               WEXITED | WNOWAIT) == 0 &&
      info.si_pid == pid_) {
    how = info.si_code == CLD_EXITED ? fmt::format("exited with status {}", info.si_status)
                                     : fmt::format("was killed by signal {}", info.si_status);
  }
  releaseAll(fmt::format("the mover (process {}) of GPU {} {}: its transfers are lost", pid_,
                         gpuUuid_, how));
}

void MoverClient::releaseAll(const std::string& why) {
  bool open = false;
  for (std::uint32_t i = 0; i < kMaxCommunicators; ++i) {
    CommunicatorRecord& record = segment_.communicator(i);
    if (record.state.load() != static_cast<std::uint32_t>(CommunicatorState::Open)) continue;
    if (record.errorCode.load() != 0) continue;
    open = true;
    setText(record.errorText, why);
    record.errorCode.store(static_cast<std::uint32_t>(Code::Remote), std::memory_order_release);
  }
  segment_.header().moverDead.store(1, std::memory_order_seq_cst);
  for (std::uint32_t i = 0; i < segment_.launchSlots(); ++i) {
    LaunchFlags& flags = segment_.launch(i);
    const std::uint64_t last = lastSequence_[i].load(std::memory_order_seq_cst);
    if (!flags.finish.reached(last)) flags.finish.set(last);
    if (!flags.released.reached(last)) flags.released.set(last);
  }
  if (open) logError("{}", why);
}

/// A request and its answer; control_ is held.
Status MoverClient::ask(const void* request, std::size_t size, std::span<const int> fds,
                        std::uint64_t boundMs, MoverReply* reply, bool* answered) {
  *answered = false;
  if (silent_) {
    return Status::error(Code::Timeout, "the mover has not answered an earlier request");
  }
  std::size_t bytes = 0;
  std::vector<UniqueFd> none;
  Status status = sendWithFdsWithin(socket_.get(), request, size, fds, boundMs);
  if (status) {
    status = recvWithFdsWithin(socket_.get(), reply, sizeof *reply, &bytes, &none, boundMs);
  }
  if (!status) {
    silent_ = true;
    return status.inContext("the mover does not answer");
  }
  *answered = true;
  if (bytes != sizeof *reply || !reply->ok) {
    return Status::error(Code::System, getText(reply->text)).inContext("the mover");
  }
  return {};
}

Status MoverClient::ask(const void* request, std::size_t size, int fd, std::uint64_t boundMs) {
  MoverReply reply{};
  bool answered = false;
  return ask(request, size, {&fd, 1}, boundMs, &reply, &answered);
}

Status MoverClient::addSpan(const AddSpan& message, std::span<const int> segments,
                            MoverReply* reply, bool* answered) {
  std::lock_guard lock(control_);
  return ask(&message, bytesOf(message), segments, timeoutMs_, reply, answered);
}

Status MoverClient::addStaging(std::uint64_t id, const SharedMemory& memory) {
  std::lock_guard lock(control_);
  const AddStaging request{kMoverMagic, id, memory.size()};
  // Pinning takes about a second for 2 GiB, several times that on a loaded machine.
  return ask(&request, sizeof request, memory.fd(), timeoutMs_ + memory.size() / 200'000);
}

Status MoverClient::addCommunicator(std::uint64_t id, std::int32_t rank,
                                    const std::vector<PeerRecord>& peers, std::uint32_t* index,
                                    SharedMemory* shared) {
  std::lock_guard lock(control_);
  std::uint32_t free = kMaxCommunicators;
  for (std::uint32_t i = 0; i < kMaxCommunicators && free == kMaxCommunicators; ++i) {
    const auto state = static_cast<CommunicatorState>(segment_.communicator(i).state.load());
    if (state == CommunicatorState::Free) free = i;
  }
  if (free == kMaxCommunicators) {
    return Status::error(Code::Unsupported,
                         fmt::format("more than {} communicators on one GPU", kMaxCommunicators));
  }
  CommunicatorRecord& record = segment_.communicator(free);
  record.errorCode.store(0);
  record.generation.fetch_add(1);
  for (auto* counter : {&record.sentBytes, &record.sentOps, &record.receivedBytes,
                        &record.receivedOps, &record.directCalls, &record.directBytes}) {
    counter->store(0);
  }
  SharedMemory table;
  HOCCL_RETURN_IF_ERROR(SharedMemory::create("hoccl-peers", peerTableBytes(peers.size()), &table));
  std::memcpy(table.data(), peers.data(), peers.size() * sizeof(PeerRecord));
  const AddCommunicator request{kMoverMagic, free, rank, id, peers.size()};
  HOCCL_RETURN_IF_ERROR(ask(&request, sizeof request, table.fd(), timeoutMs_));
  record.state.store(static_cast<std::uint32_t>(CommunicatorState::Open));
  *index = free;
  table.closeFd();
  *shared = std::move(table);
  return {};
}

Status MoverClient::endCommunicator(std::uint32_t index, OpKind kind) {
  CommunicatorRecord& record = segment_.communicator(index);
  const std::uint64_t before = record.closes.load();
  OpDescriptor descriptor{};
  descriptor.kind = kind;
  descriptor.communicator = index;
  descriptor.generation = record.generation.load();
  const Deadline deadline = Deadline::afterMs(timeoutMs_);
  bool told = false;
  // The ring is full where others are waiting for a mover that does not take anything.
  while (!segment_.tryPush(descriptor) && !segment_.header().moverDead.load()) {
    if (deadline.passed() && kind == OpKind::Abort) return endUnresponsive(index);
    ring();
    ::usleep(kFullNapUs);
  }
  ring();
  while (record.closes.load(std::memory_order_acquire) == before) {
    if (segment_.header().moverDead.load()) {
      record.state.store(static_cast<std::uint32_t>(CommunicatorState::Closed));
      return {};
    }
    if (deadline.passed() && kind == OpKind::Abort) return endUnresponsive(index);
    if (deadline.passed() && !std::exchange(told, true)) {
      logWarn(
          "a communicator is being destroyed while operations of it still wait for their peers; "
          "ncclCommAbort would end them");
    }
    ::usleep(50);
  }
  return {};
}

bool MoverClient::freeCommunicator(std::uint32_t index) {
  return segment_.communicator(index).leave();
}

/// A mover that does not answer (stopped, or stuck in the driver) may still have copies under way.
/// Its end is the only thing that is certain to end them; the watcher then releases the streams.
Status MoverClient::endUnresponsive(std::uint32_t index) {
  logError(
      "the mover (process {}) did not end a communicator within {} ms (HOCCL_TIMEOUT_MS) and is "
      "killed: the other communicators of GPU {} fail with it",
      pid_, timeoutMs_, gpuUuid_);
  ::kill(pid_, SIGKILL);
  const Deadline deadline = Deadline::afterMs(timeoutMs_);
  while (!segment_.header().moverDead.load()) {
    if (deadline.passed()) {
      return Status::error(Code::Timeout,
                           fmt::format("the mover (process {}) does not end although killed: the "
                                       "driver holds it",
                                       pid_));
    }
    ::usleep(1000);
  }
  segment_.communicator(index).state.store(static_cast<std::uint32_t>(CommunicatorState::Closed));
  return {};
}

Status MoverClient::communicatorStatus(std::uint32_t index) const {
  const CommunicatorRecord& record = segment_.communicator(index);
  const auto code = static_cast<Code>(record.errorCode.load(std::memory_order_acquire));
  if (code == Code::Ok) return {};
  return Status::error(code, getText(record.errorText));
}

/// The i-th slot to try after `last`: round in the window of slots last used, whose flags the
/// caches still know; on to the next window only when all of it is busy.
std::uint32_t MoverClient::candidate(std::uint32_t last, std::uint32_t i) const {
  const std::uint32_t count = segment_.launchSlots();
  const std::uint32_t size = std::min(kSlotWindow, count);
  const std::uint32_t window = last / size * size;
  return (window + (i < size ? (last + 1 + i) % size : i)) % count;
}

void MoverClient::prefetchLaunch() const {
  segment_.prefetchPush();
  const std::uint32_t slot = candidate(nextSlot_.load(std::memory_order_relaxed), 0);
  const LaunchFlags& flags = segment_.launch(slot);
  __builtin_prefetch(&flags.start);
  __builtin_prefetch(&flags.released);
  __builtin_prefetch(&lastSequence_[slot], 1);
}

bool MoverClient::tryTakeSlot(std::uint64_t sequence, Slot* slot) {
  const std::uint32_t last = nextSlot_.load(std::memory_order_relaxed);
  for (std::uint32_t i = 0; i < segment_.launchSlots(); ++i) {
    const std::uint32_t index = candidate(last, i);
    std::uint64_t before = lastSequence_[index].load(std::memory_order_acquire);
    if (before > sequence || !segment_.launch(index).free(before)) continue;
    if (lastSequence_[index].compare_exchange_strong(before, sequence, std::memory_order_seq_cst)) {
      nextSlot_.store(index, std::memory_order_relaxed);
      *slot = {index, sequence};
      return true;
    }
  }
  return false;
}

Status MoverClient::takeSlots(std::span<Slot* const> slots,
                              const std::function<bool()>& cancelled) {
  if (slots.size() > segment_.launchSlots()) {
    return Status::error(Code::InvalidConfig,
                         fmt::format("a group over {} streams needs as many launch slots, and "
                                     "HOCCL_FLAG_POOL is {}",
                                     slots.size(), segment_.launchSlots()));
  }
  for (int spins = 0;; ++spins) {
    std::size_t taken = 0;
    for (; taken < slots.size(); ++taken) {
      const std::uint64_t sequence = nextSequence_.fetch_add(1, std::memory_order_relaxed) + 1;
      if (!tryTakeSlot(sequence, slots[taken])) break;
    }
    if (taken == slots.size()) return {};
    // All or nothing: two groups that each hold a part would wait for each other.
    while (taken > 0) giveBack(*slots[--taken]);
    if (segment_.header().moverDead.load(std::memory_order_relaxed)) {
      return Status::error(Code::Remote, "the mover has ended");
    }
    if (cancelled && cancelled()) {
      return Status::error(Code::Aborted, "the communicator was aborted");
    }
    if (spins > kSpins) ::usleep(kFullNapUs);
  }
}

void MoverClient::giveBack(const Slot& slot) {
  LaunchFlags& flags = segment_.launch(slot.index);
  flags.start.set(slot.sequence);
  flags.finish.set(slot.sequence);
  flags.released.set(slot.sequence);
}

void MoverClient::letGo(const Slot& slot) {
  LaunchFlags& flags = segment_.launch(slot.index);
  flags.finish.set(slot.sequence);
  flags.released.set(slot.sequence);
}

DropRequest MoverClient::askDrop(OpKind kind, std::uint64_t allocation, const Deadline& deadline) {
  OpDescriptor descriptor{};
  descriptor.kind = kind;
  descriptor.buffer.allocationId = allocation;
  return askDrop(descriptor, deadline);
}

DropRequest MoverClient::askDropSpans(CUdeviceptr address, std::size_t bytes,
                                      const Deadline& deadline) {
  OpDescriptor descriptor{};
  descriptor.kind = OpKind::DropSpans;
  descriptor.buffer.allocationBase = address;
  descriptor.buffer.allocationBytes = bytes;
  return askDrop(descriptor, deadline);
}

DropRequest MoverClient::askDrop(OpDescriptor descriptor, const Deadline& deadline) {
  DropRequest request;
  const std::atomic<std::uint32_t>& dead = segment_.header().moverDead;
  while (!drops_->take(&descriptor, &request)) {
    if (dead.load(std::memory_order_relaxed) || deadline.passed()) return {};
    ::usleep(kFullNapUs);
  }
  while (!segment_.tryPush(descriptor)) {
    if (dead.load(std::memory_order_relaxed) || deadline.passed()) {
      drops_->giveBack(request);
      return {};
    }
    ring();
    ::usleep(kFullNapUs);
  }
  ring();
  return request;
}

void MoverClient::push(const OpDescriptor& descriptor) {
  for (int spins = 0; !segment_.tryPush(descriptor); ++spins) {
    if (segment_.header().moverDead.load(std::memory_order_relaxed)) return;
    ring();  // a full ring and a sleeping mover would be waiting for each other
    if (spins > kSpins) ::usleep(kFullNapUs);
  }
}

void MoverClient::ring() {
  SegmentHeader& header = segment_.header();
  // Between the push and the look whether the mover sleeps; the mover has its half in rest().
  if (header.lightFences.load(std::memory_order_relaxed)) {
    lightFence();
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  if (header.moverSleeps.load(std::memory_order_relaxed)) {
    const std::uint64_t one = 1;
    [[maybe_unused]] ssize_t put = ::write(bell_.get(), &one, sizeof one);
  }
  // A mover that died in between has released only the launches it knew of.
  if (header.moverDead.load(std::memory_order_relaxed)) releaseAll("the mover has ended");
}

}  // namespace hoccl
