// FACTS 5 in the emulated driver: where a pending wait sits, and what it holds up there. FACTS 4:
// which copies from the host go through the compute channel.

#include <map>
#include <string>
#include <vector>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

// Long enough to see that something does not move; what must move gets seconds.
constexpr auto kStuck = 30ms;
constexpr std::size_t kCopy = 64 << 10;

enum class Last { Fresh, Kernel, SmallH2D, H2D, D2H };
enum class Probe { Kernel, MemoryOp, SmallH2D, H2D, D2H, CopyThenMemoryOp };
constexpr Probe kAll[] = {Probe::Kernel, Probe::MemoryOp, Probe::SmallH2D,
                          Probe::H2D,    Probe::D2H,      Probe::CopyThenMemoryOp};

const char* nameOf(Probe probe) {
  switch (probe) {
    case Probe::Kernel:
      return "kernel";
    case Probe::MemoryOp:
      return "memory op";
    case Probe::SmallH2D:
      return "H2D of 8 KiB";
    case Probe::H2D:
      return "H2D";
    case Probe::D2H:
      return "D2H";
    case Probe::CopyThenMemoryOp:
      return "D2H, memory op";
  }
  return "?";
}

/// A process with waits pending on streams of its own.
class Machine {
 public:
  Machine() : device_(0) {
    openDevice();
    device_ = allocate(kMiB);
    host_ = pinned(kMiB);
    flag_ = reinterpret_cast<std::uint64_t*>(pinned(4096));
  }

  /// A new stream whose last engine is `last`, with a wait behind it.
  CUstream park(Last last, int priority = 0) {
    CUstream stream = nullptr;
    REQUIRE_OK(CU(cuStreamCreateWithPriority)(&stream, CU_STREAM_NON_BLOCKING, priority));
    switch (last) {
      case Last::Fresh:
        break;
      case Last::Kernel:
        submit(Probe::Kernel, stream);
        break;
      case Last::SmallH2D:
        submit(Probe::SmallH2D, stream);
        break;
      case Last::H2D:
        submit(Probe::H2D, stream);
        break;
      case Last::D2H:
        submit(Probe::D2H, stream);
        break;
    }
    EXPECT_OK(CU(cuStreamWaitValue64)(stream, asDevice(flag_), 1, CU_STREAM_WAIT_VALUE_GEQ));
    parked_.push_back(stream);
    return stream;
  }

  void submit(Probe probe, CUstream stream) {
    switch (probe) {
      case Probe::Kernel:
        EXPECT_OK(CU(hocclEmuLaunchKernel)(stream, 100, 1));
        break;
      case Probe::MemoryOp:
        EXPECT_OK(CU(cuStreamWriteValue64)(stream, asDevice(&flag_[8]), 1, 0));
        break;
      case Probe::SmallH2D:
        EXPECT_OK(CU(cuMemcpyHtoDAsync)(device_, host_, 8 << 10, stream));
        break;
      case Probe::H2D:
        EXPECT_OK(CU(cuMemcpyHtoDAsync)(device_, host_, kCopy, stream));
        break;
      case Probe::D2H:
        EXPECT_OK(CU(cuMemcpyDtoHAsync)(host_, device_, kCopy, stream));
        break;
      case Probe::CopyThenMemoryOp:
        submit(Probe::D2H, stream);
        submit(Probe::MemoryOp, stream);
        break;
    }
  }

  void expectRuns(Probe probe, CUstream stream, const std::string& what) {
    submit(probe, stream);
    EXPECT_TRUE(eventually([&] { return CU(cuStreamQuery)(stream) == CUDA_SUCCESS; }, 5s))
        << nameOf(probe) << ", " << what;
  }
  void expectRuns(Probe probe, const std::string& what) { expectRuns(probe, makeStream(), what); }

  /// What is held up goes on when the waits end.
  void expectHeldUp(Probe probe, CUstream stream, const std::string& what) {
    submit(probe, stream);
    std::this_thread::sleep_for(kStuck);
    EXPECT_EQ(CU(cuStreamQuery)(stream), CUDA_ERROR_NOT_READY) << nameOf(probe) << ", " << what;
    heldUp_.push_back(stream);
  }
  void expectHeldUp(Probe probe, const std::string& what) {
    expectHeldUp(probe, makeStream(), what);
  }

  void release() {
    for (CUstream stream : parked_) EXPECT_EQ(CU(cuStreamQuery)(stream), CUDA_ERROR_NOT_READY);
    store(flag_, 1);
    for (CUstream stream : parked_) EXPECT_OK(CU(cuStreamSynchronize)(stream));
    for (CUstream stream : heldUp_) EXPECT_OK(CU(cuStreamSynchronize)(stream));
  }

 private:
  CUdeviceptr device_;
  unsigned char* host_ = nullptr;
  std::uint64_t* flag_ = nullptr;
  std::vector<CUstream> parked_, heldUp_;
};

Environment connections(int count) {
  return {{"CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(count)}, {"EMUCUDA_DILATION", "1"}};
}

// Row: "one pending wait on a compute channel stops every kernel and memory op of all other streams
// in the process. With 8 connections, 8 pending waits do it; with 32, 32."
TEST(Emulator, Facts5AsManyWaitsAsConnectionsStopKernelsAndMemoryOps) {
  for (const int count : {1, 8, 32})
    for (const Last last : {Last::Fresh, Last::Kernel, Last::SmallH2D})
      isolated(connections(count), [&] {
        const std::string what = std::to_string(count) + " waits and as many connections";
        Machine machine;
        for (int i = 0; i < count - 1; ++i) machine.park(last);
        if (count > 1)
          for (const Probe probe : kAll) machine.expectRuns(probe, "one wait fewer: " + what);
        machine.park(last);
        machine.expectHeldUp(Probe::Kernel, what);
        machine.expectHeldUp(Probe::MemoryOp, what);
        machine.expectHeldUp(Probe::SmallH2D, what);
        machine.expectHeldUp(Probe::Kernel, nullptr, what);  // the default stream
        for (const Probe probe : {Probe::D2H, Probe::H2D, Probe::CopyThenMemoryOp})
          machine.expectRuns(probe, what);
        machine.release();
      });
}

// The same without the variable: 8 waits stop kernels, and 4 stop the copies of a direction. (Seen
// on an H200 with a probe like FACTS 5's; 7 and 3 do not.)
TEST(Emulator, Facts5ChannelsWithoutTheVariable) {
  for (const char* value : {"", "nonsense", "-3"})
    isolated({{"EMUCUDA_DILATION", "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS", value}}, [&] {
      Machine machine;
      for (int i = 0; i < 7; ++i) machine.park(Last::Fresh);
      for (const Last last : {Last::D2H, Last::H2D})
        for (int i = 0; i < 3; ++i) machine.park(last);
      for (const Probe probe : kAll) machine.expectRuns(probe, "7 and 3 waits");
      machine.park(Last::Fresh);
      machine.expectHeldUp(Probe::Kernel, "8 waits");
      machine.expectRuns(Probe::D2H, "8 waits, 3 after copies");
      machine.park(Last::D2H);
      machine.expectHeldUp(Probe::D2H, "4 waits after copies");
      machine.expectRuns(Probe::H2D, "3 waits after copies");
      machine.release();
    });
}

// Row: "Stream priority does not help."
TEST(Emulator, Facts5PriorityDoesNotHelp) {
  isolated(connections(1), [] {
    Machine machine;
    machine.park(Last::Fresh);
    CUstream urgent = nullptr;
    REQUIRE_OK(CU(cuStreamCreateWithPriority)(&urgent, CU_STREAM_NON_BLOCKING, -5));
    machine.expectHeldUp(Probe::Kernel, urgent, "high priority");
    machine.release();
  });
}

// Row: "After a small copy on the same stream the wait parks on the copy channel: kernels, memory
// ops and copies of other directions go on; copies of that direction from the same context wait
// when channels are scarce (1 connection, or more waits than connections)."
TEST(Emulator, Facts5AWaitAfterACopyParksOnThatCopysChannel) {
  const auto others = [](Machine* machine, Probe opposite, const std::string& what) {
    for (const Probe probe : {Probe::Kernel, Probe::MemoryOp, Probe::SmallH2D, opposite})
      machine->expectRuns(probe, what);
    machine->expectRuns(Probe::Kernel, nullptr, what);  // the default stream
  };
  for (const Last last : {Last::D2H, Last::H2D}) {
    const Probe same = last == Last::D2H ? Probe::D2H : Probe::H2D;
    const Probe opposite = last == Last::D2H ? Probe::H2D : Probe::D2H;
    const std::string direction = nameOf(same);
    for (const auto& [count, waits] : {std::pair{1, 1}, std::pair{8, 12}, std::pair{32, 40}})
      isolated(connections(count), [&] {
        const std::string what = "scarce, after " + direction;
        Machine machine;
        for (int i = 0; i < waits; ++i) machine.park(last);
        others(&machine, opposite, what);
        machine.expectHeldUp(same, what);
        machine.release();
      });
    for (const auto& [count, waits] : {std::pair{8, 1}, std::pair{8, 4}, std::pair{32, 12}})
      isolated(connections(count), [&] {
        const std::string what = "not scarce, after " + direction;
        Machine machine;
        for (int i = 0; i < waits; ++i) machine.park(last);
        others(&machine, opposite, what);
        machine.expectRuns(same, what);
        machine.release();
      });
  }
}

// Row: "PyTorch's 32 + 32 pool streams against its default stream: no aliasing with one wait and 8
// or 32 connections; always with 1."
TEST(Emulator, Facts5PyTorchsStreamPools) {
  for (const int count : {1, 8, 32})
    isolated(connections(count), [&] {
      Machine machine;
      std::vector<CUstream> pool(64);
      for (std::size_t i = 0; i < pool.size(); ++i) {
        REQUIRE_OK(
            CU(cuStreamCreateWithPriority)(&pool[i], CU_STREAM_NON_BLOCKING, i < 32 ? 0 : -1));
        machine.submit(Probe::Kernel, pool[i]);
      }
      EXPECT_OK(CU(cuCtxSynchronize)());
      auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
      std::uint64_t round = 0;
      for (CUstream stream : pool) {
        EXPECT_OK(
            CU(cuStreamWaitValue64)(stream, asDevice(flag), ++round, CU_STREAM_WAIT_VALUE_GEQ));
        machine.submit(Probe::Kernel, nullptr);
        const auto ran = [] { return CU(cuStreamQuery)(nullptr) == CUDA_SUCCESS; };
        EXPECT_EQ(eventually(ran, count > 1 ? Clock::duration(5s) : 2ms), count > 1);
        store(flag, round);
        EXPECT_OK(CU(cuCtxSynchronize)());
      }
    });
}

// Row: "A one-warp kernel that waits holds no channel, but it is a kernel."
TEST(Emulator, Facts5AWaitingKernelHoldsNoChannel) {
  isolated(connections(1), [] {
    Machine machine;
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    std::vector<CUstream> waiting;
    for (int i = 0; i < 4; ++i) {
      waiting.push_back(makeStream());
      EXPECT_OK(CU(hocclEmuLaunchWaitKernel)(waiting.back(), asDevice(flag), 1, 1));
    }
    for (const Probe probe : kAll) machine.expectRuns(probe, "4 waiting kernels");
    store(flag, 1);
    for (CUstream stream : waiting) EXPECT_OK(CU(cuStreamSynchronize)(stream));
    HocclEmuCounters counters{};
    EXPECT_OK(CU(hocclEmuGetCounters)(0, &counters));
    EXPECT_GE(counters.kernels, 4u);
  });
}

// Whatever is behind a pending wait in its stream holds a channel too, of its own kind: a kernel
// behind a parked wait, and a kernel behind a waiting kernel or behind a wait for an event. (Seen
// on an H200; a wait for an event with nothing behind it holds nothing.)
TEST(Emulator, Facts5WhatIsBehindAWaitHoldsItsChannelToo) {
  isolated(connections(1), [] {
    Machine machine;
    CUstream parked = machine.park(Last::D2H);
    machine.expectRuns(Probe::Kernel, "parked wait");
    machine.submit(Probe::Kernel, parked);
    machine.expectHeldUp(Probe::Kernel, "parked wait, kernel");
    machine.expectHeldUp(Probe::MemoryOp, "parked wait, kernel");
    machine.expectRuns(Probe::H2D, "parked wait, kernel");
    machine.release();
  });
  for (const bool byEvent : {false, true})
    isolated(connections(1), [&] {
      Machine machine;
      auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
      CUstream waiting = makeStream(), behind = waiting;
      EXPECT_OK(CU(hocclEmuLaunchWaitKernel)(waiting, asDevice(flag), 1, 1));
      if (byEvent) {
        CUevent event = nullptr;
        REQUIRE_OK(CU(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING));
        EXPECT_OK(CU(cuEventRecord)(event, waiting));
        behind = makeStream();
        EXPECT_OK(CU(cuStreamWaitEvent)(behind, event, 0));
      }
      for (const Probe probe : kAll) machine.expectRuns(probe, "waiting kernel");
      machine.submit(Probe::Kernel, behind);
      machine.expectHeldUp(Probe::Kernel, "waiting kernel, kernel");
      machine.expectHeldUp(Probe::SmallH2D, "waiting kernel, kernel");
      machine.expectRuns(Probe::CopyThenMemoryOp, "waiting kernel, kernel");
      store(flag, 1);
      machine.release();
    });
}

// The consequence: a flag whose writer is behind its waiter.
TEST(Emulator, Facts5OneConnectionAndTwoDependentStreamsDeadlock) {
  isolated(connections(1), [] {
    openDevice();
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    CUstream waiting = makeStream(), writing = makeStream();
    EXPECT_OK(CU(cuStreamWaitValue64)(waiting, asDevice(flag), 1, CU_STREAM_WAIT_VALUE_GEQ));
    EXPECT_OK(CU(cuStreamWriteValue64)(writing, asDevice(flag), 1, 0));
    std::this_thread::sleep_for(kStuck);
    EXPECT_EQ(CU(cuStreamQuery)(waiting), CUDA_ERROR_NOT_READY);
    EXPECT_EQ(load(flag), 0u);
    store(flag, 1);  // only the CPU, or another process, gets them out
    EXPECT_OK(CU(cuCtxSynchronize)());
  });
}

// Another process has channels of its own.
TEST(Emulator, Facts5AnotherProcessIsNotHeldUp) {
  isolated(connections(1), [] {
    auto* stage = sharedMemory<std::atomic<int>>();
    const pid_t other = start(connections(1), [&] {
      EXPECT_TRUE(eventually([&] { return *stage == 1; }));
      Machine machine;
      for (const Probe probe : kAll) machine.expectRuns(probe, "in another process");
      *stage = 2;
    });
    Machine machine;
    machine.park(Last::Fresh);
    machine.park(Last::D2H);
    *stage = 1;
    expectSuccess(other);
    machine.release();
  });
}

// FACTS 4: "H2D copies up to 24 KiB are inlined into the compute channel. From 32 KiB on they are
// not; D2H never is."
TEST(Emulator, Facts4CopiesFromTheHostUpTo24KiBAreInlined) {
  isolated(connections(1), [] {
    openDevice();
    const CUdeviceptr device = allocate(kMiB);
    auto* host = pinned(kMiB);
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    CUstream parked = makeStream();
    EXPECT_OK(CU(cuStreamWaitValue64)(parked, asDevice(flag), 1, CU_STREAM_WAIT_VALUE_GEQ));
    std::vector<CUstream> heldUp;
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{8} << 10, std::size_t{24} << 10}) {
      heldUp.push_back(makeStream());
      EXPECT_OK(CU(cuMemcpyHtoDAsync)(device, host, bytes, heldUp.back()));
    }
    CUstream free = makeStream();
    for (const std::size_t bytes : {std::size_t{32} << 10, kMiB}) {
      EXPECT_OK(CU(cuMemcpyHtoDAsync)(device, host, bytes, free));
      EXPECT_OK(CU(cuStreamSynchronize)(free));
    }
    EXPECT_OK(CU(cuMemcpyDtoHAsync)(host, device, 8, free));
    EXPECT_OK(CU(cuStreamSynchronize)(free));
    std::this_thread::sleep_for(kStuck);
    for (CUstream stream : heldUp) EXPECT_EQ(CU(cuStreamQuery)(stream), CUDA_ERROR_NOT_READY);
    store(flag, 1);
    EXPECT_OK(CU(cuCtxSynchronize)());
    HocclEmuCounters counters{};
    EXPECT_OK(CU(hocclEmuGetCounters)(0, &counters));
    EXPECT_EQ(counters.inlinedH2D, 3u);
    EXPECT_EQ(counters.h2dUnder32KiB, 3u);
    EXPECT_EQ(counters.copiesH2D, 5u);
  });
}

}  // namespace
}  // namespace hoccl::emu_test
