// What a flag behind each chunk costs the copy engines, with one and with two streams a direction, and
// whether a copy that waits on the device for its chunk beats one submitted when the CPU sees the flag.
// The staged path's lanes and chunk sizes follow from this (docs/staging.md).
// Build: nvcc -arch=sm_90 -O2 -std=c++17 copy_gaps.cu -o copy_gaps -lcuda. Prints one JSON object.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kBuffer = 256u << 20;
constexpr int kRepeats = 5;
constexpr int kRounds = 300;

void check(cudaError_t result, int line) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "copy_gaps.cu:%d: %s\n", line, cudaGetErrorString(result));
  std::exit(1);
}
void check(CUresult result, int line) {
  if (result == CUDA_SUCCESS) return;
  const char* text = "";
  cuGetErrorString(result, &text);
  std::fprintf(stderr, "copy_gaps.cu:%d: %s\n", line, text);
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

double nowUs() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Setup {
  char *deviceOut, *deviceIn, *hostOut, *hostIn;
  volatile std::uint64_t* flags;  // one each 64 bytes
  cudaStream_t out[2], in[2], user;
  std::uint64_t turn = 0;

  Setup() {
    CHECK(cudaSetDevice(0));
    CHECK(cudaMalloc(&deviceOut, kBuffer));
    CHECK(cudaMalloc(&deviceIn, kBuffer));
    CHECK(cudaHostAlloc(&hostOut, kBuffer, 0));
    CHECK(cudaHostAlloc(&hostIn, kBuffer, 0));
    CHECK(cudaHostAlloc((void**)&flags, 4096, 0));
    for (cudaStream_t* stream : {&out[0], &out[1], &in[0], &in[1], &user}) {
      CHECK(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    }
    // Primed with a copy, so that memory operations run on the copy channels.
    for (int i = 0; i < 2; ++i) {
      CHECK(cudaMemcpyAsync(hostOut, deviceOut, 1 << 20, cudaMemcpyDeviceToHost, out[i]));
      CHECK(cudaMemcpyAsync(deviceIn, hostIn, 1 << 20, cudaMemcpyHostToDevice, in[i]));
    }
    CHECK(cudaDeviceSynchronize());
  }
  CUdeviceptr flag(int i) const { return (CUdeviceptr)(flags + 8 * i); }
  volatile std::uint64_t& value(int i) { return flags[8 * i]; }
  void copyOut(std::size_t offset, std::size_t bytes, int lane, bool withFlag) {
    CHECK(cudaMemcpyAsync(hostOut + offset, deviceOut + offset, bytes, cudaMemcpyDeviceToHost, out[lane]));
    if (withFlag) CHECK(cuStreamWriteValue64(out[lane], flag(lane), turn, 0));
  }
  void copyIn(std::size_t offset, std::size_t bytes, int lane, bool withFlag) {
    CHECK(cudaMemcpyAsync(deviceIn + offset, hostIn + offset, bytes, cudaMemcpyHostToDevice, in[lane]));
    if (withFlag) CHECK(cuStreamWriteValue64(in[lane], flag(4 + lane), turn, 0));
  }
};

double chunkUs(Setup& s, std::size_t chunk, bool flag, int lanes, bool both) {
  std::vector<double> times;
  for (int r = 0; r < kRepeats; ++r) {
    const int count = static_cast<int>(std::min<std::size_t>(kBuffer / chunk, 64));
    const double begin = nowUs();
    for (int i = 0; i < count; ++i) {
      ++s.turn;
      s.copyOut(i * chunk, chunk, i % lanes, flag);
      if (both) s.copyIn(i * chunk, chunk, i % lanes, flag);
    }
    CHECK(cudaDeviceSynchronize());
    times.push_back((nowUs() - begin) / count);
  }
  return median(times);
}

/// 64 KiB out, then in, on two threads; the second copy is queued behind a device-side wait, or submitted
/// when its thread sees the flag.
double handOverUs(Setup& s, bool awaitOnDevice) {
  constexpr std::size_t kBytes = 64 << 10;
  std::atomic<std::uint64_t> go{0};
  const std::uint64_t first = s.turn + 1;
  std::thread receiver([&] {
    CHECK(cudaSetDevice(0));
    for (std::uint64_t turn = first; turn < first + kRounds; ++turn) {
      while (go.load() < turn) {
      }
      if (awaitOnDevice) {
        CHECK(cuStreamWaitValue64(s.in[0], s.flag(0), turn, CU_STREAM_WAIT_VALUE_GEQ));
      }
      CHECK(cudaMemcpyAsync(s.deviceIn, s.hostIn, kBytes, cudaMemcpyHostToDevice, s.in[0]));
      CHECK(cuStreamWriteValue64(s.in[0], s.flag(4), turn, 0));
    }
  });
  std::vector<double> times;
  for (int i = 0; i < kRounds; ++i) {
    ++s.turn;
    const double begin = nowUs();
    if (awaitOnDevice) go = s.turn;
    s.copyOut(0, kBytes, 0, true);
    if (!awaitOnDevice) {
      while (s.value(0) != s.turn) {
      }
      go = s.turn;
    }
    while (s.value(4) != s.turn) {
    }
    times.push_back(nowUs() - begin);
  }
  receiver.join();
  return median(times);
}

}  // namespace

int main() {
  Setup s;
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  std::printf("{\"schema\": \"hoccl-copy-gaps-1\", \"device\": \"%s\", \"chunks\": [", device.name);
  bool firstRow = true;
  for (std::size_t chunk : {64u << 10, 256u << 10, 1u << 20, 4u << 20}) {
    std::printf("%s\n  {\"bytes\": %zu, \"out_us\": %.2f, \"out_flag_us\": %.2f, \"out_flag_2_us\": %.2f, "
                "\"both_flag_us\": %.2f, \"both_flag_2_us\": %.2f}",
                firstRow ? "" : ",", chunk, chunkUs(s, chunk, false, 1, false),
                chunkUs(s, chunk, true, 1, false), chunkUs(s, chunk, true, 2, false),
                chunkUs(s, chunk, true, 1, true), chunkUs(s, chunk, true, 2, true));
    firstRow = false;
  }
  std::printf("],\n  \"handover_64KiB\": {\"cpu_us\": %.2f, \"device_wait_us\": %.2f}}\n",
              handOverUs(s, false), handOverUs(s, true));
  return 0;
}
