// When a stream that waits for a value in memory sees it: by how long after the wait's start it is
// written, alone, when another process rings behind it as the mover does (common/gpu/doorbell.h),
// with waits of that process pending, and with kernels beside. And what rings cost kernels.
// docs/facts.md builds on it. Build: nvcc -arch=sm_90 -O2 -std=c++17 wakes.cu -o wakes -lcuda.
// Prints one JSON object.
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr unsigned kLimitS = 100;
constexpr int kOperations = 40;  // waits of one round, enqueued ahead
constexpr int kRounds = 7;
constexpr int kDelays = 20;  // 0 to 19 us
constexpr int kKernelUs = 200;
constexpr int kStreams = 7;  // that can wait in the other process
constexpr double kFirstLooksUs = 9.2;

void check(CUresult result, int line) {
  if (result == CUDA_SUCCESS) return;
  const char* text = "";
  cuGetErrorString(result, &text);
  std::fprintf(stderr, "wakes.cu:%d: %s\n", line, text);
  std::_Exit(1);
}
void check(cudaError_t result, int line) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "wakes.cu:%d: %s\n", line, cudaGetErrorString(result));
  std::_Exit(1);
}
#define CHECK(call) check(call, __LINE__)

double nowUs() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
void spinUs(double us) {
  for (const double until = nowUs() + us; nowUs() < until;) {
  }
}
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// What the measuring process tells the one beside it. Plain words in shared memory, one writer
/// each.
struct Shared {
  enum Mode : std::uint64_t { Idle, RingOnOrder, RingPeriodically, Wait };
  volatile std::uint64_t ready;
  volatile std::uint64_t mode, periodUs, waits, order;  // what to do; `order` counts
  volatile std::uint64_t turn, turnTaken;               // counts changes of the mode
  volatile std::uint64_t rings;
};

/// Words on lines of their own that streams and the CPU share.
struct Words {
  std::uint64_t* host = nullptr;
  CUdeviceptr device = 0;
  void create() {
    CHECK(cuMemHostAlloc(reinterpret_cast<void**>(&host), 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    std::memset(host, 0, 4096);
    CHECK(cuMemHostGetDevicePointer(&device, host, 0));
  }
  volatile std::uint64_t& operator[](int line) { return host[16 * line]; }
  CUdeviceptr at(int line) const { return device + 128ull * static_cast<unsigned>(line); }
};

/// The other process, in the mover's place: it rings when told, or keeps waits of its own pending.
[[noreturn]] void beside(Shared& shared) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(kLimitS);
  CHECK(cudaSetDevice(0));
  CHECK(cudaFree(nullptr));
  Words words;
  words.create();
  CUstream bell, waiting[kStreams];
  CHECK(cuStreamCreate(&bell, CU_STREAM_NON_BLOCKING));
  for (CUstream& stream : waiting) CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  std::uint64_t rung = 0, order = 0, released = 0;
  double last = 0;
  const auto ring = [&] {
    if (words[0] < rung) return;
    CHECK(cuStreamWriteValue64(bell, words.at(0), ++rung, 0));
    shared.rings = shared.rings + 1;
  };
  shared.ready = 1;
  for (;;) {
    if (shared.turn != shared.turnTaken) {
      words[1] = ++released;
      CHECK(cuCtxSynchronize());
      const std::uint64_t count = shared.mode == Shared::Wait ? shared.waits : 0;
      for (std::uint64_t i = 0; i < count; ++i) {
        CHECK(cuStreamWaitValue64(waiting[i], words.at(1), released + 1, CU_STREAM_WAIT_VALUE_GEQ));
        spinUs(kFirstLooksUs * (1 + 1.0 / static_cast<double>(count + 1)));  // not in step
      }
      order = shared.order;
      shared.rings = 0;
      shared.turnTaken = shared.turn;
    }
    if (shared.mode == Shared::RingOnOrder && shared.order != order) {
      order = shared.order;
      ring();
    }
    if (shared.mode == Shared::RingPeriodically &&
        nowUs() - last >= static_cast<double>(shared.periodUs)) {
      last = nowUs();
      ring();
    }
  }
}

__global__ void work(unsigned iterations, float* out) {
  float a = 1.0f, b = 1.5f, c = 2.0f;
  for (unsigned i = 0; i < iterations; ++i) {
    a = a * 1.0000001f + 0.5f;
    b = b * 1.0000001f + 0.5f;
    c = c * 1.0000001f + 0.5f;
  }
  if (a + b + c == 0.0f) *out = a;
}

class Measurement {
 public:
  explicit Measurement(Shared* shared) : shared_(*shared) {
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    CHECK(cudaMalloc(&out_, sizeof(float)));
    words_.create();
    CHECK(cuStreamCreate(&waits_, CU_STREAM_NON_BLOCKING));
    CHECK(cudaStreamCreateWithFlags(&kernels_, cudaStreamNonBlocking));
    runKernels(10);
    iterations_ = static_cast<unsigned>(iterations_ * kKernelUs / runKernels(50));
    runKernels(10);
    while (!shared_.ready) usleep(100);
  }

  void mode(Shared::Mode mode, std::uint64_t waits = 0, std::uint64_t periodUs = 0) {
    shared_.mode = mode;
    shared_.waits = waits;
    shared_.periodUs = periodUs;
    shared_.turn = shared_.turn + 1;
    while (shared_.turnTaken != shared_.turn) usleep(100);
  }

  /// How long after the value was written an operation (write `start`, wait for the value) has
  /// ended, by how long after `start` it was written.
  std::vector<double> wakes(bool busy) {
    std::vector<double> result;
    for (int delay = 0; delay < kDelays; ++delay) {
      std::vector<double> rounds;
      for (int r = 0; r < kRounds; ++r) rounds.push_back(round(delay, busy) - delay);
      result.push_back(median(rounds));
    }
    return result;
  }

  /// us each.
  double runKernels(int count) {
    const double began = nowUs();
    launch(count);
    CHECK(cudaStreamSynchronize(kernels_));
    return (nowUs() - began) / count;
  }
  [[nodiscard]] std::uint64_t rings() const { return shared_.rings; }

 private:
  enum Line { Start, Finish, Gate };

  void launch(int count) {
    for (int i = 0; i < count; ++i) work<<<132 * 8, 256, 0, kernels_>>>(iterations_, out_);
    CHECK(cudaGetLastError());
  }

  double round(double delay, bool busy) {
    const std::uint64_t first = number_ + 1;
    CHECK(cuStreamWaitValue64(waits_, words_.at(Gate), first, CU_STREAM_WAIT_VALUE_GEQ));
    for (int i = 0; i < kOperations; ++i) {
      CUstreamBatchMemOpParams both[2] = {};
      both[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
      both[0].writeValue.address = words_.at(Start);
      both[0].writeValue.value64 = ++number_;
      both[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
      both[1].waitValue.address = words_.at(Finish);
      both[1].waitValue.value64 = number_;
      both[1].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
      CHECK(cuStreamBatchMemOp(waits_, 2, both, 0));
    }
    if (busy) launch(12);
    usleep(200);
    const double began = nowUs();
    words_[Gate] = first;
    for (std::uint64_t i = first; i <= number_; ++i) {
      while (words_[Start] < i) {
      }
      spinUs(delay);
      words_[Finish] = i;
      shared_.order = shared_.order + 1;
    }
    CHECK(cuStreamSynchronize(waits_));
    const double each = (nowUs() - began) / kOperations;
    CHECK(cudaStreamSynchronize(kernels_));
    return each;
  }

  Shared& shared_;
  Words words_;
  CUstream waits_ = nullptr;
  cudaStream_t kernels_ = nullptr;
  float* out_ = nullptr;
  unsigned iterations_ = 2000;
  std::uint64_t number_ = 0;
};

void print(const char* name, const std::vector<double>& wakes, bool busy, bool last = false) {
  double sum = 0;
  std::printf(" {\"beside\": \"%s\", \"kernels\": %s, \"us_by_delay\": [", name,
              busy ? "true" : "false");
  for (std::size_t i = 0; i < wakes.size(); ++i) {
    std::printf("%s%.1f", i ? ", " : "", wakes[i]);
    sum += wakes[i];
  }
  std::printf("], \"mean_us\": %.2f, \"worst_us\": %.1f}%s\n",
              sum / static_cast<double>(wakes.size()),
              *std::max_element(wakes.begin(), wakes.end()), last ? "" : ",");
}

}  // namespace

int main() {
  alarm(kLimitS);
  auto* shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (shared == MAP_FAILED) return 1;
  const pid_t other = fork();  // before either has a context
  if (other == 0) beside(*shared);
  Measurement measurement(shared);
  std::printf("{\"wakes\": [\n");
  for (const bool busy : {false, true}) {
    measurement.mode(Shared::Idle);
    print("nothing", measurement.wakes(busy), busy);
    measurement.mode(Shared::RingOnOrder);
    print("rings", measurement.wakes(busy), busy);
    for (const std::uint64_t waits : {1, 4, 7}) {
      measurement.mode(Shared::Wait, waits);
      const std::string name = std::to_string(waits) + " pending waits";
      print(name.c_str(), measurement.wakes(busy), busy, busy && waits == 7);
    }
  }
  std::printf("], \"kernels\": [\n");
  const std::uint64_t periods[] = {0, 1000, 200, 50, 20, 0};
  for (std::size_t i = 0; i < std::size(periods); ++i) {
    measurement.mode(periods[i] ? Shared::RingPeriodically : Shared::Idle, 0, periods[i]);
    std::vector<double> rounds;
    for (int r = 0; r < kRounds; ++r) rounds.push_back(measurement.runKernels(100));
    std::printf(" {\"ring_every_us\": %llu, \"kernel_us\": %.2f, \"rings\": %llu}%s\n",
                static_cast<unsigned long long>(periods[i]), median(rounds),
                static_cast<unsigned long long>(measurement.rings()),
                i + 1 < std::size(periods) ? "," : "");
  }
  std::printf("]}\n");
  kill(other, SIGKILL);
  waitpid(other, nullptr, 0);
  return 0;
}
