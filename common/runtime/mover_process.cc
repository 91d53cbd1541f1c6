#include "common/runtime/mover_process.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "common/base/config.h"
#include "common/base/log.h"
#include "common/base/random.h"
#include "common/base/shared_memory.h"
#include "common/base/unix_socket.h"
#include "common/gpu/doorbell.h"
#include "common/gpu/driver.h"
#include "common/gpu/lane.h"
#include "common/net/shm/shm_transport.h"
#include "common/net/tcp/tcp_transport.h"
#include "common/net/transport_set.h"
#include "common/net/verbs/verbs_transport.h"
#include "common/runtime/mover_control.h"
#include "common/runtime/mover_loop.h"
#include "common/runtime/mover_protocol.h"

namespace hoccl {
namespace {

/// What the mover owns, in the order in which it is set up; taken down in reverse.
struct MoverProcess {
  Config config = Config::defaults();
  UniqueFd applicationPidfd;
  UniqueFd loopEvent, controlEvent;
  SharedMemory segmentMemory;
  Segment segment;
  const Driver* driver = nullptr;
  CUdevice device = 0;
  CUcontext context = nullptr;
  HostRegistration segmentRegistration;
  MoverQueues queues;
  std::array<std::unique_ptr<Lane>, SharedLanes::kCount> out, in, peer;
  std::unique_ptr<Doorbell> doorbell;
  PeerId self;
  std::unique_ptr<TransportSet> transports;
  std::string tcpProblem, verbsProblem;  ///< why peers do not reach this mover that way

  Status open(int socket);
  Status openTransports();
  Status openDevice(const std::string& uuid, bool rings);
};

Status MoverProcess::open(int socket) {
  HOCCL_RETURN_IF_ERROR(Config::fromEnvironment(&config));
  MoverHello hello{};
  std::size_t bytes = 0;
  std::vector<UniqueFd> fds;
  HOCCL_RETURN_IF_ERROR(
      recvWithFdsWithin(socket, &hello, sizeof hello, &bytes, &fds, config.timeoutMs));
  if (bytes != sizeof hello || hello.magic != kMoverMagic || fds.size() != 2) {
    return Status::error(
        Code::InvalidArgument,
        fmt::format("hello of {} bytes and {} descriptors that is not HOCCL's", bytes, fds.size()));
  }
  if (hello.protocol != kMoverProtocol) {
    return Status::error(
        Code::InvalidArgument,
        fmt::format("protocol {} in the library, {} in hoccl-mover: they come from "
                    "different builds",
                    hello.protocol, kMoverProtocol));
  }
  applicationPidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, hello.applicationPid, 0)));
  if (!applicationPidfd) return Status::fromErrno("pidfd_open of the application", errno);
  HOCCL_RETURN_IF_ERROR(SharedMemory::map(std::move(fds[0]), hello.segmentBytes, &segmentMemory));
  loopEvent = std::move(fds[1]);
  HOCCL_RETURN_IF_ERROR(Segment::attach(segmentMemory.data(), segmentMemory.size(), &segment));
  controlEvent.reset(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!controlEvent) return Status::fromErrno("eventfd", errno);
  queues.loopEventFd = loopEvent.get();
  queues.controlEventFd = controlEvent.get();
  const bool rings = config.doorbell && hello.memoryOpWaits != 0;
  HOCCL_RETURN_IF_ERROR(openDevice(getText(hello.gpuUuid), rings));

  HOCCL_RETURN_IF_ERROR(random64(&self.high));
  HOCCL_RETURN_IF_ERROR(random64(&self.low));
  return openTransports();
}

Status MoverProcess::openTransports() {
  const StagingGeometry geometry{static_cast<std::uint32_t>(config.slots), config.slotBytes};
  HOCCL_RETURN_IF_ERROR(TransportSet::create(&transports));
  const auto wanted = [this](const char* transport) {
    return config.transport == "auto" || config.transport == transport;
  };
  if (wanted("shm")) {
    std::unique_ptr<Transport> shm;
    HOCCL_RETURN_IF_ERROR(makeShmTransport(self, geometry, &shm));
    HOCCL_RETURN_IF_ERROR(transports->add(std::move(shm)));
  }
  // Only communicators that need one of the others say why it is missing.
  if (wanted("verbs")) {
    std::unique_ptr<Transport> verbs;
    if (Status status = makeVerbsTransport(self, geometry, config, &verbs); status) {
      HOCCL_RETURN_IF_ERROR(transports->add(std::move(verbs)));
    } else {
      verbsProblem = status.message();
      // A variable to be put right is said even where tcp takes over.
      logf(status.code() == Code::InvalidConfig ? LogLevel::Warn : LogLevel::Info,
           "no verbs transport: {}", verbsProblem);
    }
  }
  if (wanted("tcp")) {
    std::unique_ptr<Transport> tcp;
    if (Status status = makeTcpTransport(self, geometry, config, &tcp); status) {
      HOCCL_RETURN_IF_ERROR(transports->add(std::move(tcp)));
    } else {
      tcpProblem = status.message();
    }
  }
  return {};
}

Status MoverProcess::openDevice(const std::string& uuid, bool rings) {
  HOCCL_RETURN_IF_ERROR(Driver::load(&driver));
  HOCCL_RETURN_IF_ERROR(deviceByUuid(driver, uuid, &device));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuDevicePrimaryCtxRetain(&context, device)));
  HOCCL_RETURN_IF_ERROR(HOCCL_CU(driver, cuCtxSetCurrent(context)));
  HOCCL_RETURN_IF_ERROR(HostRegistration::create(driver, segmentMemory.data(), segmentMemory.size(),
                                                 &segmentRegistration));
  for (std::size_t i = 0; i < SharedLanes::kCount; ++i) {
    HOCCL_RETURN_IF_ERROR(makeStreamLane(driver, LaneDirection::ToHost, &out[i]));
    HOCCL_RETURN_IF_ERROR(makeStreamLane(driver, LaneDirection::ToDevice, &in[i]));
    HOCCL_RETURN_IF_ERROR(makeStreamLane(driver, LaneDirection::Peer, &peer[i]));
  }
  if (rings) HOCCL_RETURN_IF_ERROR(makeStreamDoorbell(driver, &doorbell));
  return {};
}

/// The application's threads may be pinned; the mover gets every CPU its main thread may use.
void takeApplicationCpus(pid_t application) {
  cpu_set_t cpus;
  if (::sched_getaffinity(application, sizeof cpus, &cpus) == 0) {
    ::sched_setaffinity(0, sizeof cpus, &cpus);
  }
}

}  // namespace

int runMover(int socket) {
  ::prctl(PR_SET_NAME, "hoccl-mover");
  ::prctl(PR_SET_TIMERSLACK, 1);  // naps of microseconds end when they should
  setLogRole("mover");
  takeApplicationCpus(::getppid());

  MoverProcess process;
  const Status status = process.open(socket);
  MoverReply reply{};
  reply.magic = kMoverMagic;
  reply.ok = status ? 1 : 0;
  reply.mover = process.self;
  setText(reply.text, status.message());
  if (process.transports) {
    setText(reply.shmAddress, process.transports->addressOf("shm"));
    setText(reply.tcpAddress, process.transports->addressOf("tcp"));
    setText(reply.verbsAddress, process.transports->addressOf("verbs"));
    if (status) setText(reply.text, process.tcpProblem);
    setText(reply.verbsText, process.verbsProblem);
  }
  const Status sent = sendWithFdsWithin(socket, &reply, sizeof reply, {}, process.config.timeoutMs);
  if (!status || !sent) return 1;

  MoverControl control({.driver = process.driver,
                        .context = process.context,
                        .device = process.device,
                        .queues = &process.queues,
                        .transport = process.transports.get(),
                        .self = process.self,
                        .application = socket,
                        .applicationPidfd = std::move(process.applicationPidfd)},
                       process.config);
  std::thread controlThread([&control] { control.run(); });
  MoverLoop loop({.segment = process.segment,
                  .segmentRegistration = &process.segmentRegistration,
                  .queues = &process.queues,
                  .out = std::move(process.out),
                  .in = std::move(process.in),
                  .peer = std::move(process.peer),
                  .doorbell = std::move(process.doorbell)},
                 process.config);
  loop.run();
  // Whatever the driver does while everything is taken down: the process ends in bounded time.
  ::alarm(static_cast<unsigned>(process.config.timeoutMs / 1000 + 1));
  control.requestStop();
  controlThread.join();
  return 0;
}

}  // namespace hoccl
