#include "test/emulator/settings.h"

#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace hoccl::emu {
namespace {

Settings gSettings;

// Longest random delay that still lets tests end: one second an operation.
constexpr double kMaxDelayUs = 1e6;
// From "as fast as the CPU can" to a thousand times slower than the default.
constexpr double kMinDilation = 0.001, kMaxDilation = 20000;
constexpr double kMaxMemoryGib = 65536;

/// Overwrites `*out` if the variable is set; false and a line if it is not a number in the range.
bool readNumber(const char* variable, double lowest, double highest, bool whole, double* out,
                std::string* error) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return true;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (*end != '\0' || !(value >= lowest && value <= highest) ||
      (whole && value != std::floor(value))) {
    char line[256];
    std::snprintf(line, sizeof line, "%s=%s: must be a%s number from %g to %g", variable, text,
                  whole ? " whole" : "", lowest, highest);
    *error = line;
    return false;
  }
  *out = value;
  return true;
}

/// CUDA_VISIBLE_DEVICES as the real driver reads it: the list ends at the first entry it does not
/// know; entries are numbers or (prefixes of) UUIDs.
std::vector<int> visibleDevices(int devices) {
  std::vector<int> all;
  for (int i = 0; i < devices; ++i) all.push_back(i);
  const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
  if (text == nullptr) return all;
  std::vector<int> chosen;
  const std::string list = text;
  std::size_t from = 0;
  while (from <= list.size()) {
    std::size_t to = list.find(',', from);
    if (to == std::string::npos) to = list.size();
    const std::string entry = list.substr(from, to - from);
    from = to + 1;
    int found = -1;
    if (entry.rfind("GPU-", 0) == 0 && entry.size() > 4) {
      for (int i : all)
        if (uuidText(i).rfind(entry, 0) == 0) found = i;
    } else if (!entry.empty()) {
      char* end = nullptr;
      const long number = std::strtol(entry.c_str(), &end, 10);
      if (*end == '\0' && number >= 0 && number < devices) found = static_cast<int>(number);
    }
    if (found < 0) break;
    chosen.push_back(found);
  }
  return chosen;
}

/// "0-1,2-3"; false for anything else.
bool readPairs(const char* text, std::vector<std::pair<int, int>>* out) {
  while (*text != '\0') {
    int one = 0, other = 0, used = 0;
    if (std::sscanf(text, "%d-%d%n", &one, &other, &used) != 2) return false;
    out->emplace_back(one, other);
    text += used;
    if (*text == ',') {
      ++text;
    } else if (*text != '\0') {
      return false;
    }
  }
  return true;
}

/// CUDA_DEVICE_MAX_CONNECTIONS, 1 to 32. Not a variable of the emulator's: nonsense is no error.
int connections() {
  constexpr long kMost = 32;
  const char* text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const long value = text == nullptr ? 0 : std::strtol(text, nullptr, 10);
  return static_cast<int>(std::clamp(value, 0L, kMost));
}

}  // namespace

bool loadSettings(Settings* out, std::string* error) {
  Settings values;
  double devices = values.devices, seed = 1, delay = 0, memory = 139, peers = 1, nvlink = 1, refuse = -1,
         mode = 0, fabric = 0;
  if (!readNumber("EMUCUDA_DEVICES", 0, kMaxDevices, true, &devices, error) ||
      !readNumber("EMUCUDA_DILATION", kMinDilation, kMaxDilation, false, &values.dilation, error) ||
      !readNumber("EMUCUDA_SEED", 0, 1e15, true, &seed, error) ||
      !readNumber("EMUCUDA_DELAY_US", 0, kMaxDelayUs, true, &delay, error) ||
      !readNumber("EMUCUDA_MEM_GIB", 1.0 / 1024, kMaxMemoryGib, false, &memory, error) ||
      !readNumber("EMUCUDA_P2P", 0, 1, true, &peers, error) ||
      !readNumber("EMUCUDA_NVLINK", 0, 1, true, &nvlink, error) ||
      !readNumber("EMUCUDA_FABRIC", 0, 1, true, &fabric, error) ||
      !readNumber("EMUCUDA_REFUSE_IPC_OPEN", 0, 1e9, true, &refuse, error) ||
      !readNumber("EMUCUDA_COMPUTE_MODE", 0, 3, true, &mode, error))
    return false;
  if (mode == 1) {
    *error = "EMUCUDA_COMPUTE_MODE=1: must be 0 (default), 2 (prohibited) or 3 (exclusive process)";
    return false;
  }
  values.refuseImportsAfter = static_cast<long>(refuse);
  values.computeMode = static_cast<int>(mode);
  if (const char* name = std::getenv("EMUCUDA_REFUSE_IPC_IN")) values.refuseImportsIn = name;
  values.devices = static_cast<int>(devices);
  values.seed = static_cast<std::uint64_t>(seed);
  values.delayUs = static_cast<std::uint32_t>(delay);
  values.memoryBytes = static_cast<std::uint64_t>(memory * (1 << 30));
  values.peerAccess = peers != 0;
  values.nvlink = nvlink != 0;
  values.fabric = fabric != 0;
  values.connections = connections();
  if (const char* session = std::getenv("EMUCUDA_SESSION")) values.session = session;
  if (values.session.size() > 64 || values.session.find('/') != std::string::npos) {
    *error = "EMUCUDA_SESSION=" + values.session + ": must be at most 64 characters without '/'";
    return false;
  }
  if (const char* pairs = std::getenv("EMUCUDA_P2P_REFUSE");
      pairs != nullptr && !readPairs(pairs, &values.apart)) {
    *error = "EMUCUDA_P2P_REFUSE=" + std::string(pairs) + ": must be pairs of GPUs as in 0-1,2-3";
    return false;
  }
  values.visible = visibleDevices(values.devices);
  *out = values;
  return true;
}

bool reachEachOther(int a, int b) {
  return gSettings.peerAccess &&
         std::none_of(gSettings.apart.begin(), gSettings.apart.end(), [&](const auto& pair) {
           return pair == std::pair(a, b) || pair == std::pair(b, a);
         });
}

const Settings& settings() { return gSettings; }
void setSettings(const Settings& values) { gSettings = values; }

std::int64_t realNow() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

std::int64_t toReal(double modelNanoseconds) {
  const double real = modelNanoseconds * gSettings.dilation;
  // A kernel of "forever" must not overflow the clock it is added to.
  return real > 4e18 ? std::int64_t{4000000000000000000} : static_cast<std::int64_t>(real);
}

void uuidOf(int physical, unsigned char out[16]) {
  static const unsigned char kPrefix[15] = {0x48, 0x4f, 0x43, 0x43, 0x4c, 0x45, 0x4d, 0x55,
                                            0x80, 0x00, 0x47, 0x50, 0x55, 0x00, 0x00};
  std::memcpy(out, kPrefix, sizeof kPrefix);
  out[15] = static_cast<unsigned char>(physical);
}

std::string uuidText(int physical) {
  unsigned char b[16];
  uuidOf(physical, b);
  char text[48];
  std::snprintf(text, sizeof text,
                "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
                b[14], b[15]);
  return text;
}

}  // namespace hoccl::emu
