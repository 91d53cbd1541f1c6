#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "test/emulator/hoccl_emu.h"
#include "test/emulator/settings.h"

namespace hoccl::emu {

/// A device's one-way resources; a copy holds one (over PCIe) or two (NVLink: out of one device and
/// into the other) for bytes / rate.
enum class Link { D2H, H2D, NvlinkOut, NvlinkIn, Count };

/// The members of HocclEmuCounters, in its order.
enum class Counter {
  Kernels,
  SameDeviceD2D,
  LargeMemsets,
  SmOps,
  CopiesH2D,
  CopiesD2H,
  CopiesP2P,
  BytesH2D,
  BytesD2H,
  BytesP2P,
  MemOps,
  H2DUnder32KiB,
  LateNanoseconds,
  InlinedH2D,
  FreedWhileMapped,
  Count
};
inline constexpr int kCounters = static_cast<int>(Counter::Count);
static_assert(sizeof(HocclEmuCounters) == kCounters * sizeof(std::uint64_t));

/// What the processes of one EMUCUDA_SESSION share: until when each link of each device is taken,
/// and the sum of everybody's counters. Lock-free, so a process that dies leaves nothing locked.
namespace session {

/// Maps the session's file (made on demand under TMPDIR or /tmp, removed by the last user that ends
/// normally), or private memory without EMUCUDA_SESSION. False and one line on failure.
bool open(std::string* error);

/// Takes the link for `duration` real nanoseconds, not before `from`; returns the start.
std::int64_t reserve(int physical, Link link, std::int64_t from, std::int64_t duration);

/// Exclusive-process mode: true if no other process of the session has a context on the device;
/// then it is this one's until `leaveDevice` or its end. Without a session always true.
bool takeDevice(int physical);
void leaveDevice(int physical);

/// Adds to this process's and to the session's counter.
void count(int physical, Counter counter, std::uint64_t amount = 1);
void readProcess(int physical, HocclEmuCounters* out);
void readAll(int physical, HocclEmuCounters* out);

}  // namespace session
}  // namespace hoccl::emu
