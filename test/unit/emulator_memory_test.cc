// Kinds of memory in the emulated driver beside cuMemAlloc's: virtual memory management, pools,
// managed; what becomes of exported memory; refusals and exclusive-process mode.

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

constexpr std::size_t kPage = 2 * kMiB;

CUmemAllocationProp onDevice(int ordinal,
                             CUmemAllocationHandleType types = CU_MEM_HANDLE_TYPE_NONE) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = types;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = ordinal;
  return properties;
}

void setAccess(CUdeviceptr address, std::size_t bytes, int ordinal = 0) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = ordinal;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  EXPECT_OK(CU(cuMemSetAccess)(address, bytes, &access, 1));
}

template <typename T>
T attributeOf(CUpointer_attribute attribute, CUdeviceptr pointer) {
  T value{};
  EXPECT_OK(CU(cuPointerGetAttribute)(&value, attribute, pointer)) << "attribute " << attribute;
  return value;
}

std::size_t bytesFree() {
  std::size_t available = 0, total = 0;
  EXPECT_OK(CU(cuMemGetInfo)(&available, &total));
  return available;
}

std::uint64_t freedWhileMapped() {
  HocclEmuCounters counters{};
  EXPECT_OK(CU(hocclEmuGetCounters)(0, &counters));
  return counters.freedWhileMapped;
}

void expectBytesPass(CUdeviceptr memory, std::size_t bytes, unsigned seed) {
  std::vector<unsigned char> in(bytes), out(bytes);
  fillPattern(in.data(), bytes, seed);
  EXPECT_OK(CU(cuMemcpyHtoD)(memory, in.data(), bytes));
  EXPECT_OK(CU(cuMemcpyDtoH)(out.data(), memory, bytes));
  EXPECT_EQ(firstWrong(out.data(), bytes, seed), bytes);
}

// FACTS 6: "one VMM handle, one BUFFER_ID and one address range per 20 MiB; export as a file
// descriptor works, as a fabric handle fails, cudaIpcGetMemHandle fails."
TEST(Emulator, Facts6ExpandableSegments) {
  isolated({{"EMUCUDA_DILATION", "1"}}, [] {
    openDevice();
    const CUmemAllocationProp properties = onDevice(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    std::size_t granularity = 0;
    EXPECT_OK(CU(cuMemGetAllocationGranularity)(&granularity, &properties,
                                                CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    EXPECT_EQ(granularity, kPage);
    constexpr std::size_t kSegment = 20 * kMiB;
    const std::size_t before = bytesFree();
    CUdeviceptr base = 0;
    REQUIRE_OK(CU(cuMemAddressReserve)(&base, 4 * kSegment, 0, 0, 0));
    CUmemGenericAllocationHandle handles[2];
    for (int i = 0; i < 2; ++i) {
      REQUIRE_OK(CU(cuMemCreate)(&handles[i], kSegment, &properties, 0));
      REQUIRE_OK(CU(cuMemMap)(base + i * kSegment, kSegment, 0, handles[i], 0));
    }
    EXPECT_EQ(before - bytesFree(), 2 * kSegment);
    EXPECT_EQ(CU(cuMemMap)(base + kSegment, kSegment, 0, handles[0], 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuMemcpyDtoD)(base, base + kSegment, 64), CUDA_ERROR_INVALID_VALUE);  // no access
    setAccess(base, 2 * kSegment);
    const CUdeviceptr inside[] = {base + 17, base + kSegment + 17};
    std::uint64_t ids[2];
    for (int i = 0; i < 2; ++i) {
      ids[i] = attributeOf<std::uint64_t>(CU_POINTER_ATTRIBUTE_BUFFER_ID, inside[i]);
      CUdeviceptr start = 0;
      std::size_t bytes = 0;
      EXPECT_OK(CU(cuMemGetAddressRange)(&start, &bytes, inside[i]));
      EXPECT_EQ(start, base + i * kSegment);
      EXPECT_EQ(bytes, kSegment);
      EXPECT_EQ(attributeOf<unsigned>(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside[i]),
                static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
      EXPECT_EQ(attributeOf<unsigned>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, inside[i]),
                0u);
      CUipcMemHandle ipc;
      EXPECT_EQ(CU(cuIpcGetMemHandle)(&ipc, inside[i]), CUDA_ERROR_INVALID_VALUE);
      expectBytesPass(inside[i], 70001, i);
    }
    EXPECT_NE(ids[0], ids[1]);

    CUmemGenericAllocationHandle retained = 0;
    EXPECT_OK(CU(cuMemRetainAllocationHandle)(&retained, reinterpret_cast<void*>(inside[1])));
    EXPECT_EQ(retained, handles[1]);
    CUmemAllocationProp read{};
    EXPECT_OK(CU(cuMemGetAllocationPropertiesFromHandle)(&read, retained));
    EXPECT_EQ(read.requestedHandleTypes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    EXPECT_EQ(read.location.id, 0);
    int fd = -1;
    EXPECT_OK(CU(cuMemExportToShareableHandle)(&fd, retained,
                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    EXPECT_GE(fd, 0);
    close(fd);
    EXPECT_EQ(CU(cuMemExportToShareableHandle)(&read, retained, CU_MEM_HANDLE_TYPE_FABRIC, 0),
              CUDA_ERROR_NOT_PERMITTED);
    const CUmemAllocationProp fabric = onDevice(0, CU_MEM_HANDLE_TYPE_FABRIC);
    CUmemGenericAllocationHandle refused = 0;
    EXPECT_EQ(CU(cuMemCreate)(&refused, kPage, &fabric, 0), CUDA_ERROR_NOT_PERMITTED);
    EXPECT_OK(CU(cuMemRelease)(retained));

    // Unmapped and released in either order, the memory goes with the last of both.
    EXPECT_OK(CU(cuMemRelease)(handles[0]));
    EXPECT_EQ(before - bytesFree(), 2 * kSegment);
    EXPECT_EQ(CU(cuMemAddressFree)(base, 4 * kSegment), CUDA_ERROR_INVALID_VALUE);
    EXPECT_OK(CU(cuMemUnmap)(base, 2 * kSegment));
    EXPECT_EQ(before - bytesFree(), kSegment);
    EXPECT_OK(CU(cuMemRelease)(handles[1]));
    EXPECT_EQ(before, bytesFree());
    EXPECT_EQ(CU(cuMemRelease)(handles[1]), CUDA_ERROR_INVALID_VALUE);
    // The addresses can be used again, with another identity.
    REQUIRE_OK(CU(cuMemCreate)(&handles[0], kSegment, &properties, 0));
    REQUIRE_OK(CU(cuMemMap)(base, kSegment, 0, handles[0], 0));
    setAccess(base, kSegment);
    EXPECT_GT(attributeOf<std::uint64_t>(CU_POINTER_ATTRIBUTE_BUFFER_ID, base), ids[1]);
    EXPECT_OK(CU(cuMemUnmap)(base, kSegment));
    EXPECT_OK(CU(cuMemRelease)(handles[0]));
    EXPECT_OK(CU(cuMemAddressFree)(base, 4 * kSegment));
    HocclEmuCounters counters{};
    EXPECT_OK(CU(hocclEmuGetCounters)(0, &counters));
    EXPECT_EQ(counters.freedWhileMapped, 0u);
  });
}

TEST(Emulator, AnExportedDescriptorKeepsTheMemory) {
  isolated({}, [] {
    openDevice();
    constexpr std::size_t kSegment = 20 * kMiB;
    const std::size_t before = bytesFree();
    const CUmemAllocationProp properties = onDevice(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CUmemGenericAllocationHandle handle = 0;
    REQUIRE_OK(CU(cuMemCreate)(&handle, kSegment, &properties, 0));
    int fd = -1;
    REQUIRE_OK(
        CU(cuMemExportToShareableHandle)(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    EXPECT_OK(CU(cuMemRelease)(handle));
    EXPECT_EQ(before - bytesFree(), kSegment);
    HocclEmuCounters counters{};
    EXPECT_OK(CU(hocclEmuGetCounters)(0, &counters));
    EXPECT_EQ(counters.freedWhileMapped, 1u);
    close(fd);
    EXPECT_EQ(before, bytesFree());
    // Without the type it cannot be exported at all.
    const CUmemAllocationProp plain = onDevice(0, CU_MEM_HANDLE_TYPE_NONE);
    REQUIRE_OK(CU(cuMemCreate)(&handle, kSegment, &plain, 0));
    EXPECT_EQ(
        CU(cuMemExportToShareableHandle)(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        CUDA_ERROR_INVALID_VALUE);
    EXPECT_OK(CU(cuMemRelease)(handle));
  });
}

void sendDescriptor(int socket, int fd) {
  char byte = 0, control[CMSG_SPACE(sizeof fd)] = {};
  iovec data{&byte, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  EXPECT_EQ(sendmsg(socket, &message, 0), 1);
}

int receiveDescriptor(int socket) {
  char byte = 0, control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{&byte, 1};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  EXPECT_EQ(recvmsg(socket, &message, 0), 1);
  int fd = -1;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message))
    std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return fd;
}

// Rule 8 of DESIGN.md: an import is dropped before its allocation goes. The emulator counts where
// that did not happen.
TEST(Emulator, AFreeWhileAnotherProcessHasTheMemoryMappedIsCounted) {
  for (const bool vmm : {false, true})
    for (const bool dropsInTime : {true, false})
      isolated({}, [&] {
        struct Mail {
          std::atomic<int> stage{0};
          CUipcMemHandle handle;
        };
        auto* mail = sharedMemory<Mail>();
        int sockets[2];
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets), 0);
        const auto reached = [&](int stage) {
          EXPECT_TRUE(eventually([&] { return mail->stage >= stage; })) << "stage " << stage;
        };
        const pid_t importer = start({{"EMUCUDA_DILATION", "1"}}, [&] {
          openDevice();
          reached(1);
          CUdeviceptr memory = 0;
          CUmemGenericAllocationHandle handle = 0;
          if (vmm) {
            const int fd = receiveDescriptor(sockets[1]);
            REQUIRE_OK(CU(cuMemImportFromShareableHandle)(
                &handle, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
            close(fd);
            REQUIRE_OK(CU(cuMemAddressReserve)(&memory, kPage, 0, 0, 0));
            REQUIRE_OK(CU(cuMemMap)(memory, kPage, 0, handle, 0));
            EXPECT_OK(CU(cuMemRelease)(handle));
            setAccess(memory, kPage);
            EXPECT_EQ(attributeOf<int>(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory), 0);
          } else {
            REQUIRE_OK(
                CU(cuIpcOpenMemHandle)(&memory, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
          }
          std::vector<unsigned char> bytes(kPage);
          EXPECT_OK(CU(cuMemcpyDtoH)(bytes.data(), memory, kPage));
          EXPECT_EQ(firstWrong(bytes.data(), kPage, 3), kPage);
          EXPECT_EQ(bytesFree(), std::size_t{139} << 30);  // it is the exporter's
          if (dropsInTime) {
            EXPECT_OK(vmm ? CU(cuMemUnmap)(memory, kPage) : CU(cuIpcCloseMemHandle)(memory));
          }
          mail->stage = 2;
          reached(3);
        });
        openDevice();
        CUdeviceptr memory = 0;
        CUmemGenericAllocationHandle handle = 0;
        if (vmm) {
          const CUmemAllocationProp properties =
              onDevice(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
          REQUIRE_OK(CU(cuMemCreate)(&handle, kPage, &properties, 0));
          REQUIRE_OK(CU(cuMemAddressReserve)(&memory, kPage, 0, 0, 0));
          REQUIRE_OK(CU(cuMemMap)(memory, kPage, 0, handle, 0));
          setAccess(memory, kPage);
        } else {
          memory = allocate(kPage);
        }
        std::vector<unsigned char> bytes(kPage);
        fillPattern(bytes.data(), kPage, 3);
        EXPECT_OK(CU(cuMemcpyHtoD)(memory, bytes.data(), kPage));
        if (vmm) {
          int fd = -1;
          REQUIRE_OK(CU(cuMemExportToShareableHandle)(&fd, handle,
                                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
          sendDescriptor(sockets[0], fd);
          close(fd);
        } else {
          EXPECT_OK(CU(cuIpcGetMemHandle)(&mail->handle, memory));
        }
        mail->stage = 1;
        reached(2);
        EXPECT_EQ(freedWhileMapped(), 0u);
        if (vmm) {
          EXPECT_OK(CU(cuMemUnmap)(memory, kPage));
          EXPECT_OK(CU(cuMemRelease)(handle));
        } else {
          EXPECT_OK(CU(cuMemFree)(memory));
        }
        EXPECT_EQ(freedWhileMapped(), dropsInTime ? 0u : 1u) << "VMM " << vmm;
        mail->stage = 3;
        expectSuccess(importer);
        close(sockets[0]);
        close(sockets[1]);
      });
}

TEST(Emulator, PoolMemory) {
  isolated({{"EMUCUDA_DILATION", "1"}}, [] {
    openDevice();
    CUstream stream = makeStream();
    CUmemoryPool pool = nullptr, own = nullptr;
    EXPECT_OK(CU(cuDeviceGetDefaultMemPool)(&pool, 0));
    const std::size_t before = bytesFree();
    CUdeviceptr memory = 0;
    REQUIRE_OK(CU(cuMemAllocAsync)(&memory, kMiB, stream));
    EXPECT_EQ(attributeOf<CUmemoryPool>(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, memory), pool);
    EXPECT_EQ(attributeOf<unsigned>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, memory), 0u);
    CUipcMemHandle ipc;
    EXPECT_EQ(CU(cuIpcGetMemHandle)(&ipc, memory), CUDA_ERROR_INVALID_VALUE);
    expectBytesPass(memory, kMiB, 1);
    // Freed in stream order: not before what is in front of it.
    auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
    EXPECT_OK(CU(cuStreamWaitValue64)(stream, asDevice(flag), 1, CU_STREAM_WAIT_VALUE_GEQ));
    EXPECT_OK(CU(cuMemFreeAsync)(memory, stream));
    std::this_thread::sleep_for(10ms);
    EXPECT_EQ(before - bytesFree(), kMiB);
    store(flag, 1);
    EXPECT_OK(CU(cuStreamSynchronize)(stream));
    EXPECT_TRUE(eventually([&] { return bytesFree() == before; }));
    EXPECT_EQ(CU(cuMemFreeAsync)(memory, stream), CUDA_ERROR_INVALID_VALUE);

    CUmemPoolProps properties{};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    REQUIRE_OK(CU(cuMemPoolCreate)(&own, &properties));
    REQUIRE_OK(CU(cuMemAllocFromPoolAsync)(&memory, 100, own, stream));
    EXPECT_EQ(attributeOf<CUmemoryPool>(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, memory), own);
    EXPECT_OK(CU(cuMemFree)(memory));
    EXPECT_OK(CU(cuMemPoolDestroy)(own));
    EXPECT_EQ(CU(cuMemAllocFromPoolAsync)(&memory, 100, own, stream), CUDA_ERROR_INVALID_VALUE);
  });
}

TEST(Emulator, ManagedMemory) {
  isolated({{"EMUCUDA_DILATION", "1"}}, [] {
    openDevice();
    const std::size_t before = bytesFree();
    CUdeviceptr memory = 0;
    REQUIRE_OK(CU(cuMemAllocManaged)(&memory, kMiB, CU_MEM_ATTACH_GLOBAL));
    EXPECT_EQ(attributeOf<unsigned>(CU_POINTER_ATTRIBUTE_IS_MANAGED, memory), 1u);
    EXPECT_EQ(attributeOf<unsigned>(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, memory), 0u);
    auto* bytes = reinterpret_cast<unsigned char*>(memory);
    fillPattern(bytes, kMiB, 9);  // by the CPU
    std::vector<unsigned char> out(kMiB);
    EXPECT_OK(CU(cuMemcpyDtoH)(out.data(), memory, kMiB));
    EXPECT_EQ(firstWrong(out.data(), kMiB, 9), kMiB);
    CUipcMemHandle ipc;
    EXPECT_EQ(CU(cuIpcGetMemHandle)(&ipc, memory), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuStreamWriteValue64)(makeStream(), memory, 1, 0), CUDA_ERROR_INVALID_VALUE);
    EXPECT_OK(CU(cuMemFree)(memory));
    EXPECT_EQ(bytesFree(), before);
    EXPECT_EQ(attributeOf<unsigned>(CU_POINTER_ATTRIBUTE_IS_MANAGED, allocate(64)), 0u);
  });
}

TEST(Emulator, RefusesImportsWhenToldTo) {
  struct Mail {
    CUipcMemHandle handle[3];
    std::atomic<int> stage{0};
  };
  auto* mail = sharedMemory<Mail>();
  const pid_t exporter = start({}, [&] {
    openDevice();
    for (auto& handle : mail->handle) EXPECT_OK(CU(cuIpcGetMemHandle)(&handle, allocate(4096)));
    mail->stage = 1;
    EXPECT_TRUE(eventually([&] { return mail->stage == 2; }));
  });
  EXPECT_TRUE(eventually([&] { return mail->stage == 1; }));
  const auto opens = [&](std::vector<CUresult> expected) {
    return [mail, expected] {
      openDevice();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        CUdeviceptr memory = 0;
        EXPECT_EQ(
            CU(cuIpcOpenMemHandle)(&memory, mail->handle[i], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
            expected[i])
            << "import " << i;
      }
    };
  };
  constexpr CUresult kRefused = CUDA_ERROR_MAP_FAILED;
  isolated({}, opens({CUDA_SUCCESS, CUDA_SUCCESS, CUDA_SUCCESS}));
  isolated({{"EMUCUDA_REFUSE_IPC_OPEN", "0"}}, opens({kRefused, kRefused}));
  isolated({{"EMUCUDA_REFUSE_IPC_OPEN", "2"}}, opens({CUDA_SUCCESS, CUDA_SUCCESS, kRefused}));
  isolated({{"EMUCUDA_REFUSE_IPC_OPEN", "0"}, {"EMUCUDA_REFUSE_IPC_IN", "another"}},
           opens({CUDA_SUCCESS}));
  isolated({{"EMUCUDA_REFUSE_IPC_OPEN", "0"}, {"EMUCUDA_REFUSE_IPC_IN", "emulator_memory_test"}},
           opens({kRefused}));
  isolated({{"EMUCUDA_REFUSE_IPC_OPEN", "-2"}},
           [] { EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_INVALID_VALUE); });
  mail->stage = 2;
  expectSuccess(exporter);
}

TEST(Emulator, ExclusiveProcessMode) {
  const Folder folder;
  const Environment environment{{"EMUCUDA_COMPUTE_MODE", "3"},
                                {"EMUCUDA_DEVICES", "2"},
                                {"EMUCUDA_SESSION", "exclusive"},
                                {"TMPDIR", folder.path()}};
  auto* stage = sharedMemory<std::atomic<int>>();
  const pid_t owner = start(environment, [&] {
    openDevice(0);
    int mode = -1;
    EXPECT_OK(CU(cuDeviceGetAttribute)(&mode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, 0));
    EXPECT_EQ(mode, static_cast<int>(CU_COMPUTEMODE_EXCLUSIVE_PROCESS));
    CUcontext again = nullptr;
    EXPECT_OK(CU(cuDevicePrimaryCtxRetain)(&again, 0));
    EXPECT_OK(CU(cuDevicePrimaryCtxRelease)(0));
    *stage = 1;
    EXPECT_TRUE(eventually([&] { return *stage == 2; }));
    EXPECT_OK(CU(cuDevicePrimaryCtxRelease)(0));
    *stage = 3;
    EXPECT_TRUE(eventually([&] { return *stage == 4; }));
  });
  expectSuccess(start(environment, [&] {
    EXPECT_TRUE(eventually([&] { return *stage == 1; }));
    REQUIRE_OK(CU(cuInit)(0));
    CUcontext context = nullptr;
    EXPECT_EQ(CU(cuDevicePrimaryCtxRetain)(&context, 0), CUDA_ERROR_DEVICE_UNAVAILABLE);
    EXPECT_OK(CU(cuDevicePrimaryCtxRetain)(&context, 1));
    *stage = 2;
    EXPECT_TRUE(eventually([&] { return *stage == 3; }));
    EXPECT_OK(CU(cuDevicePrimaryCtxRetain)(&context, 0));  // released by the owner
    *stage = 4;
  }));
  expectSuccess(owner);
  // An owner that died holds nothing.
  isolated(environment, [] { openDevice(0); });
  isolated({{"EMUCUDA_COMPUTE_MODE", "2"}}, [] {
    REQUIRE_OK(CU(cuInit)(0));
    CUcontext context = nullptr;
    EXPECT_EQ(CU(cuDevicePrimaryCtxRetain)(&context, 0), CUDA_ERROR_DEVICE_UNAVAILABLE);
  });
}

// Random delays at every point: the same bytes, the same order.
TEST(Emulator, DelaysChangeNoResult) {
  for (const char* seed : {"1", "2", "3"})
    isolated({{"EMUCUDA_DILATION", "1"}, {"EMUCUDA_DELAY_US", "300"}, {"EMUCUDA_SEED", seed}}, [] {
      openDevice();
      auto* flag = reinterpret_cast<std::uint64_t*>(pinned(4096));
      CUstream in = makeStream(), out = makeStream();
      auto* host = pinned(2 * kPage);
      for (unsigned round = 1; round <= 10; ++round) {
        const CUdeviceptr device = allocate(100'003);
        fillPattern(host, 100'003, round);
        EXPECT_OK(CU(cuMemcpyHtoDAsync)(device, host, 100'003, in));
        EXPECT_OK(CU(cuStreamWriteValue64)(in, asDevice(flag), round, 0));
        EXPECT_OK(CU(cuStreamWaitValue64)(out, asDevice(flag), round, CU_STREAM_WAIT_VALUE_GEQ));
        EXPECT_OK(CU(cuMemcpyDtoHAsync)(host + kPage, device, 100'003, out));
        EXPECT_OK(CU(cuMemFree)(device));  // waits for the copies
        EXPECT_EQ(firstWrong(host + kPage, 100'003, round), 100'003u);
      }
    });
}

TEST(Emulator, ProcAddressesByVersion) {
  isolated({}, [] {
    openDevice();
    const auto find = [](const char* name, int version) {
      void* function = nullptr;
      const CUresult result = CU(cuGetProcAddress)(name, &function, version, 0, nullptr);
      EXPECT_EQ(result == CUDA_SUCCESS, function != nullptr) << name;
      return function;
    };
    // What PyTorch and the run time get the driver through, and what frees are interposed at.
    for (const char* name :
         {"cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemRelease", "cuMemAddressReserve",
          "cuMemAddressFree", "cuMemSetAccess", "cuMemExportToShareableHandle",
          "cuMemImportFromShareableHandle", "cuMemAllocAsync", "cuMemFreeAsync",
          "cuMemAllocManaged", "cuModuleLoadData", "cuLaunchKernel", "cuLaunchKernelEx"})
      EXPECT_EQ(find(name, 12000), driverSymbol(name)) << name;
    EXPECT_EQ(find("cuMemFree", 12000), driverSymbol("cuMemFree_v2"));
    EXPECT_EQ(find("cuStreamGetCaptureInfo", 12000), driverSymbol("cuStreamGetCaptureInfo_v2"));
    EXPECT_EQ(find("cuStreamGetCaptureInfo", 13000), driverSymbol("cuStreamGetCaptureInfo_v3"));
    EXPECT_EQ(find("cuGetProcAddress", 11030), driverSymbol("cuGetProcAddress"));
    EXPECT_EQ(find("cuGetProcAddress", 12000), driverSymbol("cuGetProcAddress_v2"));
    EXPECT_EQ(find("cuMemFree", 99000), nullptr);
    EXPECT_EQ(find("hocclEmuNow", 13000), nullptr);
  });
}

}  // namespace
}  // namespace hoccl::emu_test
