#include "test/e2e/rank/device.h"

#include <dlfcn.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <optional>

#include "test/e2e/rank/check.h"

namespace e2e {
namespace {

using Clock = std::chrono::steady_clock;
constexpr useconds_t kPauseUs = 100;

unsigned char* pinned(std::size_t bytes) {
  void* memory = nullptr;
  REQUIRE_CU(cuda().memHostAlloc(&memory, bytes, 0));
  return static_cast<unsigned char*>(memory);
}

}  // namespace

#define E2E_TEXT_OF(name) #name
// Expands cuda.h's renaming first: cuMemAlloc becomes "cuMemAlloc_v2".
#define E2E_SYMBOL(name) E2E_TEXT_OF(name)

const DriverApi& cuda() {
  static const DriverApi api = [] {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
    REQUIRE(library, "{}", ::dlerror());
    DriverApi made;
#define X(member, name)                                                                      \
  made.member = reinterpret_cast<decltype(made.member)>(::dlsym(library, E2E_SYMBOL(name))); \
  REQUIRE(made.member, "libcuda.so.1 lacks {}", E2E_SYMBOL(name));
    E2E_DRIVER_FUNCTIONS(X)
#undef X
    made.sessionCounters = reinterpret_cast<decltype(made.sessionCounters)>(
        ::dlsym(library, "hocclEmuGetSessionCounters"));
    REQUIRE_CU(made.init(0));
    CUdevice device = 0;
    REQUIRE_CU(made.deviceGet(&device, 0));
    REQUIRE_CU(made.primaryRetain(&made.context, device));
    REQUIRE_CU(made.ctxSetCurrent(made.context));
    return made;
  }();
  return api;
}

void useDevice() { REQUIRE_CU(cuda().ctxSetCurrent(cuda().context)); }

HocclEmuCounters counters() {
  HocclEmuCounters now{};
  if (!cuda().sessionCounters) return now;  // a real driver counts nothing
  REQUIRE_CU(cuda().sessionCounters(0, &now));
  return now;
}

namespace {
std::optional<std::uint64_t> smOpsBefore;

std::uint64_t allSmOps() { return counters().smOps; }
}  // namespace

std::uint64_t smOps() {
  REQUIRE(cuda().sessionCounters && smOpsBefore, "no emulated driver, or no communicator yet");
  return allSmOps() - *smOpsBefore;
}

void markSmOps() {
  if (!smOpsBefore) smOpsBefore = allSmOps();
}

CUstream newStream() {
  CUstream stream = nullptr;
  REQUIRE_CU(cuda().streamCreate(&stream, CU_STREAM_NON_BLOCKING));
  return stream;
}

bool streamIdle(CUstream stream) {
  const CUresult result = cuda().streamQuery(stream);
  REQUIRE(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_READY, "cuStreamQuery returned {}",
          static_cast<int>(result));
  return result == CUDA_SUCCESS;
}

void awaitStream(CUstream stream, const std::string& what, int timeoutMs) {
  Patience patience{std::chrono::milliseconds(timeoutMs)};
  while (!streamIdle(stream)) {
    REQUIRE(!patience.over(), "{}: the stream is still busy after {} ms", what, timeoutMs);
    ::usleep(kPauseUs);
  }
}

void requireBusy(CUstream stream, int ms, const std::string& what) {
  const auto until = Clock::now() + std::chrono::milliseconds(ms);
  do {
    REQUIRE(!streamIdle(stream), "{}: the stream was released too early", what);
    ::usleep(kPauseUs * 10);
  } while (Clock::now() < until);
}

Gate::Gate() {
  flag_ = reinterpret_cast<volatile std::uint64_t*>(pinned(sizeof *flag_));
  *flag_ = 0;
  REQUIRE_CU(cuda().memHostGetDevicePointer(&device_, const_cast<std::uint64_t*>(flag_), 0));
}
Gate::~Gate() { cuda().memFreeHost(const_cast<std::uint64_t*>(flag_)); }
void Gate::hold(CUstream stream) {
  REQUIRE_CU(cuda().streamWaitValue(stream, device_, 1, CU_STREAM_WAIT_VALUE_GEQ));
}
void Gate::open() { __atomic_store_n(flag_, 1, __ATOMIC_RELEASE); }

Buffer::Buffer(std::size_t bytes, std::size_t offset)
    : bytes_(bytes), offset_(offset), memory_(total()), device_(memory_.address()) {
  poison_ = pinned(total());
  pattern_ = pinned(bytes_);
  seen_ = pinned(total());
  std::memset(poison_, kPoison, total());
}

Buffer::~Buffer() {
  for (unsigned char* area : {poison_, pattern_, seen_}) cuda().memFreeHost(area);
}

void Buffer::poison(CUstream stream) {
  REQUIRE_CU(cuda().copyToDevice(device_, poison_, total(), stream));
}

void Buffer::fill(std::uint64_t seed, CUstream stream) {
  makePattern(seed, pattern_, bytes_);
  REQUIRE_CU(cuda().copyToDevice(device_ + kGuard + offset_, pattern_, bytes_, stream));
}

void Buffer::put(const void* bytes, CUstream stream) {
  std::memcpy(pattern_, bytes, bytes_);
  REQUIRE_CU(cuda().copyToDevice(device_ + kGuard + offset_, pattern_, bytes_, stream));
}

void Buffer::fetch(CUstream stream) {
  std::memset(seen_, 0, total());
  REQUIRE_CU(cuda().copyToHost(seen_, device_, total(), stream));
}

std::size_t Buffer::firstOther(std::size_t from, std::size_t to) const {
  while (from < to && seen_[from] == kPoison) ++from;
  return from;
}

void Buffer::requirePattern(std::uint64_t seed, const std::string& what) const {
  std::vector<unsigned char> wanted(bytes_);
  makePattern(seed, wanted.data(), bytes_);
  if (std::memcmp(fetched(), wanted.data(), bytes_) != 0) {
    std::size_t at = 0, wrong = 0;
    for (std::size_t i = bytes_; i-- > 0;) {
      if (fetched()[i] == wanted[i]) continue;
      at = i;
      ++wrong;
    }
    failAt(__FILE__, __LINE__,
           fmt::format("{}: {} of {} bytes are wrong, the first at {}: {:#04x} for {:#04x}{}", what,
                       wrong, bytes_, at, fetched()[at], wanted[at],
                       fetched()[at] == kPoison ? " (poison)" : ""));
  }
  const std::size_t begin = kGuard + offset_, end = begin + bytes_;
  REQUIRE(firstOther(0, begin) == begin, "{}: a byte before the buffer was written", what);
  REQUIRE(firstOther(end, total()) == total(), "{}: a byte behind the buffer was written", what);
}

void Buffer::requirePoison(const std::string& what) const {
  const std::size_t at = firstOther(0, total());
  REQUIRE(at == total(), "{}: byte {} of the allocation was written", what, at);
}

void makePattern(std::uint64_t seed, unsigned char* out, std::size_t bytes) {
  // Knuth's MMIX multiplier and increment.
  std::uint64_t state = (seed + 1) * 6364136223846793005ull + 1442695040888963407ull;
  for (std::size_t i = 0; i < bytes; i += sizeof state) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const std::uint64_t word = state ^ (state >> 29);
    std::memcpy(out + i, &word, bytes - i < sizeof word ? bytes - i : sizeof word);
  }
}

}  // namespace e2e
