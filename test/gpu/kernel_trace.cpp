// Records what a process asks of the GPU, so that the zero-SM check can look for kernels, copies
// inside one device and large memsets. The driver loads it by CUDA_INJECTION64_PATH, in the
// application and (the variable is inherited) in its mover.
//
// Every kFlushPeriod the whole record is written to $GPU_CHECK_TRACE_DIR/<pid>.json, by rename, so
// that a reader never sees half a file and a process ended by _exit or a signal loses at most one
// period. Timestamps are CLOCK_MONOTONIC in ns, the same clock in every process and in Python's
// time.monotonic_ns(). "flushed_ns" promises: work that had ended before it is in the file.

#include <cuda.h>
#include <cupti.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr auto kFlushPeriod = std::chrono::milliseconds(150);
constexpr size_t kBufferBytes = 1 << 20;
constexpr size_t kBufferAlign = 8;       // what CUPTI asks of a buffer
constexpr size_t kMaxEvents = 1u << 20;  // past it events are counted as lost, and the check fails

struct Event {
  const char* kind;
  uint64_t start, end, bytes;
  uint32_t name;  // index into names, for kernels
};

struct Trace {
  std::mutex mutex;
  std::vector<Event> events;
  std::vector<std::string> names{""};
  std::map<std::string, uint32_t> nameIndex;
  uint64_t lost = 0;
  std::string directory, executable, error;
};

// Never destroyed: CUPTI and the flushing thread may still use it while the process ends.
Trace& trace() {
  static Trace* instance = new Trace;
  return *instance;
}

uint64_t nowNs() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

uint64_t CUPTIAPI timestamp() { return nowNs(); }

void add(const char* kind, uint64_t start, uint64_t end, uint64_t bytes, const char* name) {
  Trace& t = trace();
  if (t.events.size() >= kMaxEvents) {
    t.lost++;
    return;
  }
  uint32_t index = 0;
  if (name != nullptr) {
    auto [entry, fresh] = t.nameIndex.try_emplace(name, static_cast<uint32_t>(t.names.size()));
    if (fresh) t.names.emplace_back(name);
    index = entry->second;
  }
  t.events.push_back({kind, start, end, bytes, index});
}

const char* copyKind(uint8_t kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOD:
      return "HtoD";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOH:
      return "DtoH";
    case CUPTI_ACTIVITY_MEMCPY_KIND_DTOD:
      return "DtoD";
    case CUPTI_ACTIVITY_MEMCPY_KIND_PTOP:
      return "PtoP";
    case CUPTI_ACTIVITY_MEMCPY_KIND_HTOH:
      return "HtoH";
    default:
      return "copy";
  }
}

void addRecord(const CUpti_Activity* record) {
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto* k = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
      add("kernel", k->start, k->end, 0, k->name != nullptr ? k->name : "unnamed");
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
      const auto* c = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
      add(copyKind(c->copyKind), c->start, c->end, c->bytes, nullptr);
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY2: {
      // A "peer" copy whose two ends are one device is a same-device copy: a kernel.
      const auto* c = reinterpret_cast<const CUpti_ActivityMemcpyPtoP4*>(record);
      add(c->srcDeviceId == c->dstDeviceId ? "DtoD" : "PtoP", c->start, c->end, c->bytes, nullptr);
      break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
      const auto* m = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      add("memset", m->start, m->end, m->bytes, nullptr);
      break;
    }
    default:
      break;
  }
}

void CUPTIAPI bufferRequested(uint8_t** buffer, size_t* size, size_t* maxRecords) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(kBufferAlign, kBufferBytes));
  *size = *buffer != nullptr ? kBufferBytes : 0;
  *maxRecords = 0;
}

void CUPTIAPI bufferCompleted(CUcontext context, uint32_t stream, uint8_t* buffer, size_t,
                              size_t validSize) {
  Trace& t = trace();
  {
    std::lock_guard<std::mutex> guard(t.mutex);
    CUpti_Activity* record = nullptr;
    while (validSize > 0 &&
           cuptiActivityGetNextRecord(buffer, validSize, &record) == CUPTI_SUCCESS) {
      addRecord(record);
    }
    size_t dropped = 0;
    if (cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS) {
      t.lost += dropped;
    }
  }
  std::free(buffer);
}

void appendQuoted(std::string& out, const std::string& text) {
  out += '"';
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  out += '"';
}

void writeFile(uint64_t flushedNs) {
  Trace& t = trace();
  std::string out;
  {
    std::lock_guard<std::mutex> guard(t.mutex);
    out.reserve(256 + t.events.size() * 64);
    out += "{\"pid\":" + std::to_string(getpid()) + ",\"executable\":";
    appendQuoted(out, t.executable);
    out += ",\"flushed_ns\":" + std::to_string(flushedNs) + ",\"lost\":" + std::to_string(t.lost);
    out += ",\"error\":";
    appendQuoted(out, t.error);
    out += ",\"names\":[";
    for (size_t i = 0; i < t.names.size(); i++) {
      if (i > 0) out += ',';
      appendQuoted(out, t.names[i]);
    }
    out += "],\"events\":[";
    char line[160];
    for (size_t i = 0; i < t.events.size(); i++) {
      const Event& e = t.events[i];
      snprintf(line, sizeof line, "%s[\"%s\",%llu,%llu,%llu,%u]", i > 0 ? ",\n" : "\n", e.kind,
               static_cast<unsigned long long>(e.start), static_cast<unsigned long long>(e.end),
               static_cast<unsigned long long>(e.bytes), e.name);
      out += line;
    }
    out += "]}\n";
  }
  const std::string base = t.directory + "/" + std::to_string(getpid());
  const std::string temporary = base + ".tmp";
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return;
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = write(fd, out.data() + done, out.size() - done);
    if (n <= 0) break;
    done += static_cast<size_t>(n);
  }
  close(fd);
  if (done == out.size()) rename(temporary.c_str(), (base + ".json").c_str());
}

std::mutex& flushMutex() {
  static std::mutex* instance = new std::mutex;
  return *instance;
}

void flush(uint32_t flag) {
  std::lock_guard<std::mutex> guard(flushMutex());
  const uint64_t before = nowNs();
  cuptiActivityFlushAll(flag);
  writeFile(before);
}

void flushLoop() {
  for (;;) {
    std::this_thread::sleep_for(kFlushPeriod);
    flush(0);
  }
}

void atExit() { flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED); }

void check(CUptiResult result, const char* call) {
  if (result == CUPTI_SUCCESS) return;
  const char* text = nullptr;
  cuptiGetResultString(result, &text);
  trace().error += std::string(call) + ": " + (text != nullptr ? text : "unknown") + "; ";
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  static std::atomic<bool> started{false};
  const char* directory = getenv("GPU_CHECK_TRACE_DIR");
  if (directory == nullptr || started.exchange(true)) return 1;
  Trace& t = trace();
  t.directory = directory;
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
  t.executable.assign(path, length > 0 ? static_cast<size_t>(length) : 0);

  // The clock has to be set before any kind is enabled.
  check(cuptiActivityRegisterTimestampCallback(timestamp),
        "cuptiActivityRegisterTimestampCallback");
  check(cuptiActivityRegisterCallbacks(bufferRequested, bufferCompleted),
        "cuptiActivityRegisterCallbacks");
  check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "enable CONCURRENT_KERNEL");
  check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY), "enable MEMCPY");
  check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY2), "enable MEMCPY2");
  check(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET), "enable MEMSET");
  writeFile(0);
  std::atexit(atExit);
  std::thread(flushLoop).detach();
  return 1;
}
