#include "plugin-net/net_plugin.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "common/base/config.h"
#include "common/base/host_identity.h"
#include "common/base/log.h"
#include "common/base/time.h"
#include "common/base/version.h"
#include "plugin-net/device_memory.h"
#include "plugin-net/devices.h"
#include "plugin-net/handle.h"
#include "plugin-net/rendezvous.h"

namespace hoccl::net_plugin {

/// What is open in it is kept by its address.
class Context {
 public:
  explicit Context(int trafficClass) : trafficClass(trafficClass) {}
  const int trafficClass;
};

namespace {

/// A connection that nobody asks for any more is given up after so long.
constexpr std::uint64_t kAbandonedMs = 60000;
struct Attempt {
  Context* context = nullptr;
  int device = 0;
  std::array<std::byte, nccl_abi::kHandleBytes> handle{};
  std::unique_ptr<Connecting> connecting;
  std::uint64_t askedNs = 0;
};

// Everything the process has of the plugin. Never destroyed: NCCL's threads may use connections
// while the process ends.
struct Process {
  std::mutex mutex;  // never held while a connection closes, nor on the data path
  std::vector<std::unique_ptr<DeviceList>> lists;  // all there have been: names are kept
  BundleOptions options;
  std::uint64_t inlineBytes = 0;
  std::vector<std::unique_ptr<Context>> contexts;
  std::vector<Attempt> attempts;
  struct OpenListener {
    Context* context;
    std::unique_ptr<Listener> listener;
  };
  struct OpenConnection {
    Context* context;
    std::unique_ptr<Connection> connection;
  };
  std::unordered_map<Listener*, OpenListener> listeners;
  std::unordered_map<Connection*, OpenConnection> connections;

  [[nodiscard]] const DeviceList& devices() const {
    static const auto* const kNone = new DeviceList;
    return lists.empty() ? *kNone : *lists.back();
  }
};

Process& process() {
  static auto* const instance = new Process;
  return *instance;
}

std::atomic<nccl_abi::Logger> ncclLogger{nullptr};

void logToNccl(LogLevel level, std::string_view text) {
  const nccl_abi::Logger logger = ncclLogger.load(std::memory_order_acquire);
  if (logger == nullptr) return;
  const int ncclLevel = level == LogLevel::Info    ? nccl_abi::kLogInfo
                        : level == LogLevel::Debug ? nccl_abi::kLogTrace
                                                   : nccl_abi::kLogWarn;
  logger(ncclLevel, nccl_abi::kSubsystemInit | nccl_abi::kSubsystemNet, "hoccl", 0,
         "NET/HOCCL : %.*s", static_cast<int>(text.size()), text.data());
}

// A bad variable changes nothing but itself: a rank that fell out here would leave the others
// waiting.
Config readConfig() {
  Config config = Config::defaults();
  if (const Status status = Config::fromEnvironment(&config); !status) {
    logWarn("{}; HOCCL's variables are ignored here", status.message());
  }
  return config;
}

Status chooseDevices(int abiVersion, const Config& config, Process& all) {
  BundleOptions options;
  if (const Status status = BundleOptions::fromEnvironment(config, &options); !status) {
    logWarn("{}; the defaults are used", status.message());
    options = BundleOptions{};
  }
  options.name = "hoccl-net";
  options.waitForAccept = true;
  options.keepHeld = true;
  all.options = options;
  all.inlineBytes = config.netInlineBytes;
  // While something is open, devices stay what they are.
  if (!all.lists.empty() && (!all.listeners.empty() || !all.connections.empty())) return {};
  auto list = std::make_unique<DeviceList>();
  std::string remark;
  if (Status status = findDevices(config, list.get(), &remark); !status) return status;
  if (!all.lists.empty() && sameDevices(*all.lists.back(), *list)) return {};
  const std::shared_ptr<const VerbsGround>& ground = list->front().ground;
  const std::string how =
      ground
          ? fmt::format("verbs ({} queue pairs a NIC and connection)", ground->settings.qpsPerPeer)
          : fmt::format("tcp ({} threads, {} data sockets a connection)", options.threads,
                        options.threads * options.socketsPerThread);
  logInfo("HOCCL {}, plugin interface v{}, transport {}, {} devices: {}{}{}", versionText(),
          abiVersion, how, list->size(), textOf(*list), remark.empty() ? "" : "; ", remark);
  all.lists.push_back(std::move(list));
  return {};
}

// Of a context that ends: all that is open in it, taken out of the tables.
struct Leftovers {
  std::vector<Process::OpenListener> listeners;
  std::vector<Process::OpenConnection> connections;
  std::vector<Attempt> attempts;
};

Leftovers takeLeftovers(Process& all, const Context* context) {
  Leftovers left;
  for (auto at = all.listeners.begin(); at != all.listeners.end();) {
    if (at->second.context == context) {
      left.listeners.push_back(std::move(at->second));
      at = all.listeners.erase(at);
    } else {
      ++at;
    }
  }
  for (auto at = all.connections.begin(); at != all.connections.end();) {
    if (at->second.context == context) {
      left.connections.push_back(std::move(at->second));
      at = all.connections.erase(at);
    } else {
      ++at;
    }
  }
  const auto stay = std::stable_partition(all.attempts.begin(), all.attempts.end(),
                                          [&](const Attempt& a) { return a.context != context; });
  left.attempts.assign(std::make_move_iterator(stay), std::make_move_iterator(all.attempts.end()));
  all.attempts.erase(stay, all.attempts.end());
  return left;
}

/// Beside queue pairs the sockets carry little.
BundleOptions optionsFor(const Process& all, const Device& device) {
  BundleOptions options = all.options;
  if (device.ground && !DeviceMemory::ofThisProcess().claimed()) {
    options.threads = options.socketsPerThread = 1;
    options.spinUs = 0;
  }
  return options;
}

Attempt* attemptTo(Process& all, Context* context, int device, const void* handle) {
  for (Attempt& attempt : all.attempts) {
    if (attempt.context == context && attempt.device == device &&
        std::memcmp(attempt.handle.data(), handle, attempt.handle.size()) == 0) {
      return &attempt;
    }
  }
  return nullptr;
}

Status deviceIn(const Process& all, int index, const Device** out) {
  const DeviceList& devices = all.devices();
  if (index < 0 || static_cast<std::size_t>(index) >= devices.size()) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("device {}, and there are {}", index, devices.size()));
  }
  *out = &devices[static_cast<std::size_t>(index)];
  return {};
}

}  // namespace

Status initialise(int abiVersion, nccl_abi::Logger logger, int trafficClass, Context** context) {
  if (logger != nullptr) {
    ncclLogger.store(logger, std::memory_order_release);
    setLogHandler(logToNccl);
  }
  const Config config = readConfig();
  Process& all = process();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (Status status = chooseDevices(abiVersion, config, all); !status) return status;
    if (const Device& first = all.devices().front(); first.ground) {
      VerbsSettings settings = first.ground->settings;
      if (Status s = settings.takeTrafficClass(trafficClass, isInfiniBand(first)); !s) return s;
    }
  }
  DeviceMemory::ofThisProcess().prepare(abiVersion, config);  // may take a second: without the lock
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (context != nullptr) {
    *context = all.contexts.emplace_back(std::make_unique<Context>(trafficClass)).get();
  }
  return {};
}

void finalise(Context* context) {
  Process& all = process();
  Leftovers left;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto known =
        std::find_if(all.contexts.begin(), all.contexts.end(),
                     [&](const std::unique_ptr<Context>& c) { return c.get() == context; });
    if (known == all.contexts.end()) return;
    left = takeLeftovers(all, context);
    all.contexts.erase(known);
  }
  const std::size_t open = left.listeners.size() + left.connections.size();
  if (open > 0) logInfo("finalize closes {} connections that were left open", open);
  left = {};
  DeviceMemory::ofThisProcess().report();
}

std::size_t deviceCount() {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.devices().size();
}

Status deviceAt(int index, const Device** out) {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return deviceIn(all, index, out);
}

Status makeVirtualDevice(std::span<const int> members, int* out) {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  Device merged;
  if (Status status = mergeDevices(all.devices(), members, &merged); !status) return status;
  DeviceList& list = *all.lists.back();
  for (std::size_t i = 0; i < list.size(); ++i) {
    *out = static_cast<int>(i);
    if (list[i].members == merged.members) return {};  // once for all communicators
  }
  logInfo("device {} is {}: {} NICs for each connection", list.size(), merged.name, members.size());
  *out = static_cast<int>(list.size());
  list.push_back(std::move(merged));
  return {};
}

Status listen(Context* context, int device, void* handle, Listener** out) {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const Device* on = nullptr;
  if (Status status = deviceIn(all, device, &on); !status) return status;
  std::unique_ptr<BundleListener> socket;
  if (Status status = BundleListener::open(on->interface.address, optionsFor(all, *on), &socket);
      !status) {
    return status.inContext(on->interface.name);
  }
  packHandle({socket->address(), socket->nonce()}, handle);
  auto listener = std::make_unique<Listener>(std::move(socket), on->ground);
  *out = listener.get();
  all.listeners.emplace(*out, Process::OpenListener{context, std::move(listener)});
  return {};
}

Status connect(Context* context, int device, const void* handle, int trafficClass,
               SendConnection** out) {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const std::uint64_t now = monotonicNs();
  Attempt* attempt = attemptTo(all, context, device, handle);
  if (attempt == nullptr) {
    std::erase_if(all.attempts, [&](const Attempt& other) {
      return now - other.askedNs > kAbandonedMs * 1000000u;
    });
    const Device* from = nullptr;
    if (Status status = deviceIn(all, device, &from); !status) return status;
    Attempt made;
    made.context = context;
    made.device = device;
    std::memcpy(made.handle.data(), handle, made.handle.size());
    if (Status status = Connecting::begin(*from, handle, optionsFor(all, *from), all.inlineBytes,
                                          context != nullptr ? context->trafficClass : trafficClass,
                                          &made.connecting);
        !status) {
      return status;
    }
    attempt = &all.attempts.emplace_back(std::move(made));
  }
  attempt->askedNs = now;
  std::unique_ptr<SendEnd> end;
  const Status status = attempt->connecting->advance(&end);
  if (status.ok() && !end) return {};
  all.attempts.erase(all.attempts.begin() + (attempt - all.attempts.data()));
  if (!status) return status;
  *out = end.get();
  Connection* const connection = end.get();
  all.connections.emplace(connection, Process::OpenConnection{context, std::move(end)});
  return {};
}

Status accept(Listener* listener, ReceiveConnection** out) {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.listeners.find(listener);
  if (known == all.listeners.end()) {
    return Status::error(Code::InvalidArgument, "the listener is closed");
  }
  std::unique_ptr<ReceiveEnd> end;
  if (Status status = listener->accept(&end); !status || !end) return status;
  *out = end.get();
  Connection* const connection = end.get();
  all.connections.emplace(connection,
                          Process::OpenConnection{known->second.context, std::move(end)});
  return {};
}

void close(Listener* listener) {
  Process& all = process();
  Process::OpenListener closed{};
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto known = all.listeners.find(listener);
  if (known == all.listeners.end()) return;
  closed = std::move(known->second);
  all.listeners.erase(known);
}

void close(Connection* connection) {
  Process& all = process();
  Process::OpenConnection closed{};
  bool last = false;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto known = all.connections.find(connection);
    if (known == all.connections.end()) return;
    closed = std::move(known->second);
    all.connections.erase(known);
    last = all.connections.empty();
  }
  closed.connection.reset();
  if (last) DeviceMemory::ofThisProcess().report();
}

bool claimsDeviceMemory() { return DeviceMemory::ofThisProcess().claimed(); }

Status registerDeviceMemory(void* data, std::size_t bytes, Memory** out) {
  auto memory = std::make_unique<Memory>();
  if (Status s = DeviceMemory::ofThisProcess().add(data, bytes, &memory->device); !s) return s;
  *out = memory.release();
  return {};
}

Status registerHostMemory(const Connection* connection, void* data, std::size_t bytes,
                          Memory** out) {
  if (connection == nullptr || !connection->ground() || bytes == 0) return {};
  auto memory = std::make_unique<Memory>();
  if (Status s = RailMemory::create(*connection->ground(), data, bytes, {}, &memory->rails); !s) {
    return s;
  }
  *out = memory.release();
  return {};
}

Status registerDirect(Connection* connection, void* data, std::size_t bytes, int fd,
                      std::uint64_t offset, Memory** out) {
  if (connection == nullptr || !connection->ground()) {
    return Status::error(Code::Unsupported, "device memory for a connection without NICs");
  }
  if (Status status = connection->prepareDirect(); !status) return status;
  auto memory = std::make_unique<Memory>();
  if (Status s = RailMemory::create(*connection->ground(), data, bytes,
                                    {.onDevice = true, .fd = fd, .offset = offset}, &memory->rails);
      !s) {
    return s;
  }
  *out = memory.release();
  return {};
}

void deregister(Memory* memory) {
  if (memory->device != nullptr) DeviceMemory::ofThisProcess().remove(memory->device);
  if (memory->rails) memory->rails->release();
  delete memory;
}

std::size_t openCount() {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.listeners.size() + all.connections.size() + all.attempts.size();
}

}  // namespace hoccl::net_plugin
