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
#include "plugin-net/handle.h"
#include "plugin-net/rendezvous.h"

namespace hoccl::net_plugin {

class Context {};  // what is open in it is kept by its address

namespace {

/// A connection that nobody asks for any more is given up after so long.
constexpr std::uint64_t kAbandonedMs = 60000;
/// What NCCL's sockets tell where the system does not know: the choice of algorithms stays the
/// same.
constexpr int kDefaultSpeedMbps = 10000;
constexpr std::size_t kDevicesNamed = 8;

using DeviceList = std::vector<Device>;

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
  std::vector<std::unique_ptr<const DeviceList>> lists;  // all there have been: names are kept
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

// The same on no other interface or host: FNV-1a, 64 bits (Fowler, Noll, Vo).
std::uint64_t guidOf(const std::string& host, const std::string& interface) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const unsigned char byte : host + '/' + interface) hash = (hash ^ byte) * 0x100000001b3ull;
  return hash;
}

bool sameInterfaces(const DeviceList& devices, const std::vector<Interface>& interfaces) {
  return std::equal(devices.begin(), devices.end(), interfaces.begin(), interfaces.end(),
                    [](const Device& device, const Interface& interface) {
                      return device.interface.name == interface.name &&
                             device.interface.address == interface.address;
                    });
}

std::string textOf(const DeviceList& devices) {
  std::string text;
  for (std::size_t i = 0; i < std::min(devices.size(), kDevicesNamed); ++i) {
    const Device& device = devices[i];
    std::string address = device.interface.address.text();
    address.resize(address.rfind(':'));  // the port, which is 0
    text += fmt::format("{}{} ({})", i == 0 ? "" : ", ", device.interface.name, address);
  }
  if (devices.size() > kDevicesNamed) {
    text += fmt::format(" and {} more", devices.size() - kDevicesNamed);
  }
  return text;
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

Status findDevices(int abiVersion, const Config& config, Process& all) {
  InterfaceChoice choice;
  if (Status status = InterfaceChoice::fromEnvironment(config, &choice); !status) return status;
  std::vector<Interface> interfaces;
  if (Status status = chooseInterfaces(choice, &interfaces); !status) return status;
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
  const bool inUse = !all.listeners.empty() || !all.connections.empty();
  if (!all.lists.empty() && (inUse || sameInterfaces(*all.lists.back(), interfaces))) return {};

  auto list = std::make_unique<DeviceList>();
  const std::string host = nodeKey();
  for (Interface& interface : interfaces) {
    Device device;
    device.guid = guidOf(host, interface.name);
    device.speedMbps =
        interface.speedMbps > 0 ? static_cast<int>(interface.speedMbps) : kDefaultSpeedMbps;
    device.interface = std::move(interface);
    list->push_back(std::move(device));
  }
  logInfo(
      "HOCCL {}, plugin interface v{}, transport tcp ({} threads, {} data sockets a connection), "
      "{} devices: {}",
      versionText(), abiVersion, options.threads, options.threads * options.socketsPerThread,
      list->size(), textOf(*list));
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

Status initialise(int abiVersion, nccl_abi::Logger logger, int /*trafficClass*/,
                  Context** context) {
  if (logger != nullptr) {
    ncclLogger.store(logger, std::memory_order_release);
    setLogHandler(logToNccl);
  }
  const Config config = readConfig();
  Process& all = process();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (Status status = findDevices(abiVersion, config, all); !status) return status;
  }
  DeviceMemory::ofThisProcess().prepare(abiVersion, config);  // may take a second: without the lock
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (context != nullptr) {
    *context = all.contexts.emplace_back(std::make_unique<Context>()).get();
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

Status listen(Context* context, int device, void* handle, Listener** out) {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const Device* on = nullptr;
  if (Status status = deviceIn(all, device, &on); !status) return status;
  std::unique_ptr<BundleListener> socket;
  if (Status status = BundleListener::open(on->interface.address, all.options, &socket); !status) {
    return status.inContext(on->interface.name);
  }
  packHandle({socket->address(), socket->nonce()}, handle);
  auto listener = std::make_unique<Listener>(std::move(socket));
  *out = listener.get();
  all.listeners.emplace(*out, Process::OpenListener{context, std::move(listener)});
  return {};
}

Status connect(Context* context, int device, const void* handle, SendConnection** out) {
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
    if (Status status =
            Connecting::begin(*from, handle, all.options, all.inlineBytes, &made.connecting);
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

Status registerDeviceMemory(void* data, std::size_t bytes, Registration** out) {
  return DeviceMemory::ofThisProcess().add(data, bytes, out);
}

void deregisterDeviceMemory(Registration* registration) {
  DeviceMemory::ofThisProcess().remove(registration);
}

std::size_t openCount() {
  Process& all = process();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.listeners.size() + all.connections.size() + all.attempts.size();
}

}  // namespace hoccl::net_plugin
