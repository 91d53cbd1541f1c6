// A program with a CUDA run time of its own, linked statically: nobody sees its frees. One rank of two;
// the unique id goes through a file. Prints HOCCL's counters.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <nccl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#define CHECK(call)                                                            \
  do {                                                                         \
    const auto result_ = (call);                                               \
    if (static_cast<int>(result_) != 0) {                                      \
      std::fprintf(stderr, "%s gives %d\n", #call, static_cast<int>(result_)); \
      std::exit(1);                                                            \
    }                                                                          \
  } while (false)

namespace {

constexpr int kRounds = 20;

__global__ void fill(unsigned char* bytes, size_t count, unsigned seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    bytes[i] = static_cast<unsigned char>((i * 31 + i / 251 + seed) & 0xff);
}

template <typename Function>
Function found(const char* name, Function) {
  auto function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  if (!function) {
    std::fprintf(stderr, "no %s\n", name);
    std::exit(1);
  }
  return function;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int rank = std::atoi(argv[1]);
  const std::string file = std::string(argv[2]) + "/id";
  if (!dlopen(argv[3], RTLD_NOW | RTLD_GLOBAL)) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  using Stats = size_t (*)(char*, size_t);
  const auto getUniqueId = found("ncclGetUniqueId", static_cast<decltype(&ncclGetUniqueId)>(nullptr));
  const auto initRank = found("ncclCommInitRank", static_cast<decltype(&ncclCommInitRank)>(nullptr));
  const auto groupStart = found("ncclGroupStart", static_cast<decltype(&ncclGroupStart)>(nullptr));
  const auto groupEnd = found("ncclGroupEnd", static_cast<decltype(&ncclGroupEnd)>(nullptr));
  const auto send = found("ncclSend", static_cast<decltype(&ncclSend)>(nullptr));
  const auto recv = found("ncclRecv", static_cast<decltype(&ncclRecv)>(nullptr));
  const auto destroy = found("ncclCommDestroy", static_cast<decltype(&ncclCommDestroy)>(nullptr));
  const auto statsJson = found("hocclStatsJson", static_cast<Stats>(nullptr));

  ncclUniqueId id;
  if (rank == 0) {
    CHECK(getUniqueId(&id));
    std::ofstream(file + ".new", std::ios::binary).write(id.internal, sizeof id.internal);
    CHECK(std::rename((file + ".new").c_str(), file.c_str()));
  } else {
    for (int tries = 0; access(file.c_str(), R_OK) != 0; ++tries) {
      if (tries > 3000) return 1;
      usleep(10000);
    }
    std::ifstream(file, std::ios::binary).read(id.internal, sizeof id.internal);
  }
  ncclComm_t comm = nullptr;
  CHECK(initRank(&comm, 2, id, rank));
  cudaStream_t stream = nullptr;
  CHECK(cudaStreamCreate(&stream));
  for (int round = 0; round < kRounds; ++round) {
    const size_t bytes = (size_t{1} << 20) * (1 + round % 5) + 3 * round;
    unsigned char *out = nullptr, *in = nullptr;
    CHECK(cudaMalloc(&out, bytes));
    CHECK(cudaMalloc(&in, bytes));
    fill<<<64, 256, 0, stream>>>(out, bytes, 7 * round + rank);
    CHECK(groupStart());
    CHECK(send(out, bytes, ncclUint8, 1 - rank, comm, stream));
    CHECK(recv(in, bytes, ncclUint8, 1 - rank, comm, stream));
    CHECK(groupEnd());
    std::vector<unsigned char> got(bytes);
    CHECK(cudaMemcpyAsync(got.data(), in, bytes, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < bytes; ++i) {
      const auto want = static_cast<unsigned char>((i * 31 + i / 251 + 7 * round + 1 - rank) & 0xff);
      if (got[i] == want) continue;
      std::fprintf(stderr, "round %d: byte %zu is %u, not %u\n", round, i, got[i], want);
      return 1;
    }
    CHECK(cudaFree(out));  // at once, for the next round to get the same addresses
    CHECK(cudaFree(in));
  }
  std::vector<char> text(1 << 16);
  statsJson(text.data(), text.size());
  std::printf("%s\n", text.data());
  CHECK(destroy(comm));
  return 0;
}
