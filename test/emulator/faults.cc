// What goes wrong on purpose: delays and refusals, by variables.

#include "test/emulator/faults.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "test/emulator/settings.h"

namespace hoccl::emu {
namespace {

std::atomic<std::uint64_t> gImports{0};

bool namedHere(const std::string& name) {
  std::string own;
  std::getline(std::ifstream("/proc/self/comm"), own);
  // The kernel keeps 15 characters of a name.
  return own == name.substr(0, 15);
}

}  // namespace

void delayCall() {
  const std::uint32_t longest = settings().delayUs;
  if (longest == 0) return;
  static std::mutex mutex;
  // Another sequence than the scheduler's, which has a generator of its own.
  static auto* random = new std::mt19937_64(settings().seed * 2 + 1);
  std::uint64_t microseconds = 0;
  {
    std::lock_guard lock(mutex);
    microseconds = (*random)() % (longest + 1ull);
  }
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

bool refuseImport() {
  const Settings& values = settings();
  if (values.refuseImportsAfter < 0) return false;
  if (!values.refuseImportsIn.empty() && !namedHere(values.refuseImportsIn)) return false;
  return gImports.fetch_add(1) >= static_cast<std::uint64_t>(values.refuseImportsAfter);
}

}  // namespace hoccl::emu
