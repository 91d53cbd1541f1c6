#include "common/runtime/copy_process.h"

#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

#include "common/base/config.h"
#include "common/base/log.h"
#include "common/base/shared_memory.h"
#include "common/base/unix_socket.h"
#include "common/gpu/driver.h"
#include "common/runtime/copy_loop.h"

namespace hoccl {
namespace {

struct CopyProcess {
  Config config = Config::defaults();
  UniqueFd application, bell;
  SharedMemory memory;
  CopySegment segment;
  const Driver* driver = nullptr;
  CUcontext context = nullptr;
  HostRegistration registration;
  std::array<std::unique_ptr<Lane>, CopyLoop::kLanes> out, in;

  Status open(int socket);
  Status openDevice(const std::string& uuid);
};

Status CopyProcess::open(int socket) {
  // A bad variable does not keep the plugin from working, which warns of it, too.
  if (const Status status = Config::fromEnvironment(&config); !status) config = Config::defaults();
  CopyHello hello{};
  std::size_t bytes = 0;
  std::vector<UniqueFd> fds;
  HOCCL_RETURN_IF_ERROR(
      recvWithFdsWithin(socket, &hello, sizeof hello, &bytes, &fds, config.timeoutMs));
  if (bytes != sizeof hello || hello.magic != kMoverMagic || hello.protocol != kMoverProtocol ||
      fds.size() != 2) {
    return Status::error(Code::InvalidArgument,
                         "a hello that is not of this build: libnccl-net-hoccl.so and hoccl-mover "
                         "come from different ones");
  }
  application.reset(static_cast<int>(::syscall(SYS_pidfd_open, hello.applicationPid, 0)));
  if (!application) return Status::fromErrno("pidfd_open of the application", errno);
  HOCCL_RETURN_IF_ERROR(SharedMemory::map(std::move(fds[0]), hello.segmentBytes, &memory));
  bell = std::move(fds[1]);
  if (!CopySegment::attach(memory.data(), memory.size(), &segment)) {
    return Status::error(Code::InvalidArgument, "torn segment");
  }
  return openDevice(getText(hello.gpuUuid));
}

Status CopyProcess::openDevice(const std::string& uuid) {
  HOCCL_RETURN_IF_ERROR(Driver::load(&driver));
  CUdevice device = 0;
  HOCCL_RETURN_IF_ERROR(deviceByUuid(driver, uuid, &device));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuDevicePrimaryCtxRetain(&context, device)));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuCtxSetCurrent(context)));
  HOCCL_RETURN_IF_ERROR(
      HostRegistration::create(driver, memory.data(), memory.size(), &registration)
          .inContext("HOCCL_NET_STAGING_BYTES makes it smaller"));
  for (std::size_t i = 0; i < CopyLoop::kLanes; ++i) {
    HOCCL_RETURN_IF_ERROR(makeStreamLane(driver, LaneDirection::ToHost, &out[i]));
    HOCCL_RETURN_IF_ERROR(makeStreamLane(driver, LaneDirection::ToDevice, &in[i]));
  }
  return {};
}

/// The second thread: imports and drops, until the application or its socket ends.
void serve(int socket, CopyProcess& process, CopyImports& imports, std::atomic<bool>& stop) {
  process.driver->cuCtxSetCurrent(process.context);
  for (;;) {
    pollfd fds[] = {{socket, POLLIN, 0}, {process.application.get(), POLLIN, 0}};
    if (::poll(fds, 2, -1) < 0) continue;
    if (fds[1].revents != 0) break;
    CopyMessage message{};
    std::size_t bytes = 0;
    std::vector<UniqueFd> descriptors;
    ReceiveState state = ReceiveState::WouldBlock;
    if (!recvWithFds(socket, &message, sizeof message, &bytes, &descriptors, &state) ||
        state == ReceiveState::Closed) {
      break;
    }
    if (state != ReceiveState::Message || bytes != sizeof message || message.magic != kMoverMagic) {
      continue;
    }
    imports.handle(message, std::move(descriptors));
  }
  stop.store(true, std::memory_order_release);
  const std::uint64_t one = 1;
  [[maybe_unused]] ssize_t put = ::write(process.bell.get(), &one, sizeof one);
}

}  // namespace

int runCopyMover(int socket) {
  ::prctl(PR_SET_NAME, "hoccl-mover");
  ::prctl(PR_SET_TIMERSLACK, 1);  // naps of microseconds end when they should
  setLogRole("mover");
  cpu_set_t cpus;
  if (::sched_getaffinity(::getppid(), sizeof cpus, &cpus) == 0) {
    ::sched_setaffinity(0, sizeof cpus, &cpus);  // the thread that spawned it may be pinned
  }
  CopyProcess process;
  const Status status = process.open(socket);
  MoverReply reply{};
  reply.magic = kMoverMagic;
  reply.ok = status ? 1 : 0;
  setText(reply.text, status.message());
  const Status sent = sendWithFdsWithin(socket, &reply, sizeof reply, {}, process.config.timeoutMs);
  if (!status || !sent) return 1;

  CopyImports imports(process.driver, process.segment);
  std::atomic<bool> stop{false};
  std::thread control([&] { serve(socket, process, imports, stop); });
  CopyLoop loop({.segment = process.segment,
                 .registration = &process.registration,
                 .imports = &imports,
                 .bell = process.bell.get(),
                 .out = std::move(process.out),
                 .in = std::move(process.in)},
                process.config);
  loop.run(stop);
  // Whatever the driver does while everything is taken down: the process ends in bounded time.
  ::alarm(static_cast<unsigned>(process.config.timeoutMs / 1000 + 1));
  control.join();
  return 0;
}

}  // namespace hoccl
