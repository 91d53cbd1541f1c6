#include "test/e2e/rank/soak_memory.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace e2e::soak {
namespace {

using Clock = std::chrono::steady_clock;
constexpr useconds_t kPauseUs = 100;
constexpr std::chrono::seconds kSlow{2};  ///< what is told, in case it never ends

constexpr std::size_t kSmallPage = 32 << 10;
constexpr std::size_t kSmallPages = 96, kLargePages = 48;
// Twice what a group can have: its inputs and outputs are all in cells of their own.
constexpr std::size_t kCellsAtLeast = 4 * Plan::kMostOperations;

/// A function of the driver that only this scenario needs.
template <typename Function>
Function* driverFunction(const char* name) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  REQUIRE(library, "libcuda.so.1 is not loaded");
  auto* found = reinterpret_cast<Function*>(::dlsym(library, name));
  REQUIRE(found, "libcuda.so.1 lacks {}", name);
  return found;
}

/// Null with a real driver.
template <typename Function>
Function* emulatorFunction(const char* name) {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return library ? reinterpret_cast<Function*>(::dlsym(library, name)) : nullptr;
}

/// A function as the loader finds it first.
template <typename Function>
Function* linked(const char* name) {
  auto* found = reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
  REQUIRE(found, "{} is not to be found", name);
  return found;
}

std::vector<CUevent>& freeEvents() {
  static auto* const made = new std::vector<CUevent>;
  return *made;
}

std::string inWords(unsigned char byte) {
  return fmt::format("{:#04x}{}", byte, byte == kPoison ? " (poison)" : "");
}

}  // namespace

Mark markOf(CUstream stream) {
  static auto* const create = driverFunction<CUresult(CUevent*, unsigned)>("cuEventCreate");
  static auto* const record = driverFunction<CUresult(CUevent, CUstream)>("cuEventRecord");
  std::vector<CUevent>& unused = freeEvents();
  CUevent event = nullptr;
  if (unused.empty()) {
    REQUIRE_CU(create(&event, CU_EVENT_DISABLE_TIMING));
  } else {
    event = unused.back();
    unused.pop_back();
  }
  REQUIRE_CU(record(event, stream));
  return {event, [](CUevent over) { freeEvents().push_back(over); }};
}

bool passed(const Mark& mark) {
  static auto* const query = driverFunction<CUresult(CUevent)>("cuEventQuery");
  const CUresult result = query(mark.get());
  REQUIRE(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY, "cuEventQuery returned {}",
          static_cast<int>(result));
  return result == CUDA_SUCCESS;
}

void await(CUstream stream, const Mark& mark) {
  static auto* const wait =
      driverFunction<CUresult(CUstream, CUevent, unsigned)>("cuStreamWaitEvent");
  REQUIRE_CU(wait(stream, mark.get(), 0));
}

unsigned char* pinnedMemory(std::size_t bytes) {
  void* memory = nullptr;
  REQUIRE_CU(cuda().memHostAlloc(&memory, bytes, 0));
  return static_cast<unsigned char*>(memory);
}

const unsigned char* poisonPage() {
  static const unsigned char* const made = [] {
    unsigned char* page = pinnedMemory(Cells::kBytes);
    std::memset(page, kPoison, Cells::kBytes);
    return page;
  }();
  return made;
}

Pages::Pages() {
  small_.bytes = kSmallPage;
  large_.bytes = Cells::kBytes;
  for (auto [pool, count] : {std::pair{&small_, kSmallPages}, std::pair{&large_, kLargePages}}) {
    unsigned char* memory = pinnedMemory(count * pool->bytes);
    for (std::size_t i = 0; i < count; ++i) pool->free.push_back(memory + i * pool->bytes);
  }
}

Page Pages::take(std::size_t bytes) {
  REQUIRE(bytes <= large_.bytes, "a page of {} bytes", bytes);
  Pool& pool = bytes <= small_.bytes ? small_ : large_;
  if (pool.free.empty()) return nullptr;
  unsigned char* memory = pool.free.back();
  pool.free.pop_back();
  return {memory, [&pool](unsigned char* over) { pool.free.push_back(over); }};
}

void Cells::make(Allocation& allocation, std::size_t cells, std::size_t extra) {
  static auto* const allocate = linked<CUresult(CUdeviceptr*, std::size_t)>("cuMemAlloc_v2");
  const char* const kind = std::getenv("E2E_MEMORY");
  if (kind && std::strcmp(kind, "mapped") == 0) {
    allocation.segments = std::make_unique<DeviceMemory>(cells * kBytes + extra);
    allocation.address = allocation.segments->address();
  } else {
    REQUIRE_CU(allocate(&allocation.address, cells * kBytes + extra));
  }
  allocation.cells.assign(cells, {});
  for (std::size_t i = 0; i < cells; ++i) {
    allocation.cells[i].address = allocation.address + i * kBytes;
  }
}

void Cells::release(Allocation& allocation) {
  static auto* const free = linked<CUresult(CUdeviceptr)>("cuMemFree_v2");
  if (allocation.segments) {
    allocation.segments.reset();
  } else {
    REQUIRE_CU(free(allocation.address));
  }
}

Cells::Cells(Random& random) {
  for (std::size_t cells = 0; cells < kCellsAtLeast;) {
    make(allocations_.emplace_back(), 1 + random.below(4), 0);
    cells += allocations_.back().cells.size();
  }
}

Cells::~Cells() {
  for (Allocation& allocation : allocations_) release(allocation);
}

Cell& Cells::take(std::uint64_t group, Random& random) {
  for (;;) {
    Allocation& allocation = allocations_[random.below(allocations_.size())];
    Cell& cell = allocation.cells[random.below(allocation.cells.size())];
    if (cell.group == group + 1) continue;
    cell.group = group + 1;
    return cell;
  }
}

void Cells::replaceOne(Random& random) {
  Allocation& allocation = allocations_[random.below(allocations_.size())];
  const std::size_t cells = allocation.cells.size();
  release(allocation);
  // Another size now and then, so that another address comes back.
  make(allocation, cells, random.below(3) * kBytes);
  ++replaced_;
}

void Checks::makeFirst() {
  const Check& check = pending_.front();
  const unsigned char* seen = check.seen.get();
  const std::size_t bytes = check.block * check.expected.size();
  const auto firstOther = [&](std::size_t from, std::size_t to) {
    while (from < to && seen[from] == kPoison) ++from;
    return from;
  };
  if (wanted_.size() < check.block) {
    wanted_.resize(check.block);
    part_.resize(check.block);
  }
  for (std::size_t i = 0; i < check.expected.size(); ++i) {
    const unsigned char* block = seen + check.before + i * check.block;
    bool first = true;
    for (const std::uint64_t seed : check.expected[i]) {
      makePattern(seed, first ? wanted_.data() : part_.data(), check.block);
      for (std::size_t at = 0; !first && at < check.block; ++at) {
        wanted_[at] = static_cast<unsigned char>(wanted_[at] + part_[at]);
      }
      first = false;
    }
    if (std::memcmp(block, wanted_.data(), check.block) == 0) continue;
    std::size_t wrong = 0, at = 0, last = 0;
    for (std::size_t n = check.block; n-- > 0;) {
      if (block[n] == wanted_[n]) continue;
      if (wrong++ == 0) last = n;
      at = n;
    }
    fail_(fmt::format("{}: {} of {} bytes of block {} are wrong, from {} to {}: {} for {:#04x}",
                      check.what, wrong, check.block, i, at, last, inWords(block[at]),
                      wanted_[at]));
  }
  const std::size_t end = check.before + bytes, total = end + check.after;
  const std::size_t lower = firstOther(0, check.before), upper = firstOther(end, total);
  if (lower != check.before) {
    fail_(fmt::format("{}: the byte {} before the buffer was written", check.what,
                      check.before - lower));
  }
  if (upper != total) {
    fail_(fmt::format("{}: the byte {} behind the buffer was written", check.what, upper - end));
  }
  bytes_ += total;
  pending_.pop_front();
}

void Checks::make() {
  while (!pending_.empty() && passed(pending_.front().fetched)) makeFirst();
}

std::string Checks::pending() const {
  std::string list;
  for (const Check& check : pending_) {
    if (!passed(check.fetched)) list += "; " + check.what;
  }
  using Describe = decltype(::hocclEmuDescribePending);
  constexpr std::size_t kLongest = 4096;
  if (auto* describe = emulatorFunction<Describe>("hocclEmuDescribePending")) {
    std::string streams(kLongest, '\0');
    streams.resize(std::min(describe(streams.data(), streams.size()), kLongest - 1));
    list += "; at the heads of streams: " + streams;
  }
  return list;
}

void Checks::await(bool all, int patienceMs) {
  auto since = Clock::now();
  bool one = false, told = false;
  while (!pending_.empty() && (all || !one)) {
    if (passed(pending_.front().fetched)) {
      makeFirst();
      one = true;
      told = false;
      since = Clock::now();
      continue;
    }
    const auto waited = Clock::now() - since;
    if (waited > std::chrono::milliseconds(patienceMs)) {
      fail_(fmt::format("pending for {} ms{}", patienceMs, pending()));
    }
    if (!told && waited > kSlow) say("slow", "pending for 2 s" + pending());
    told = told || waited > kSlow;
    ::usleep(kPauseUs);
  }
}

}  // namespace e2e::soak
