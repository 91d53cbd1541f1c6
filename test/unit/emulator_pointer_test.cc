// Pointer attributes and handles that cross processes in the emulated driver.

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

TEST(Emulator, HandlesCrossProcesses) {
  struct Mail {
    std::atomic<int> stage{0};
    CUipcMemHandle handle;
    CUdeviceptr address;
  };
  auto* mail = sharedMemory<Mail>();
  constexpr std::size_t kBytes = 3 * kMiB + 5;
  const auto reached = [&](int stage) {
    const bool came = eventually([&] { return mail->stage >= stage; });
    EXPECT_TRUE(came) << "stage " << stage;
    if (!came) _exit(1);
  };
  const Environment environment{{"EMUCUDA_DEVICES", "2"}, {"EMUCUDA_DILATION", "1"}};
  const pid_t exporter = start(environment, [&] {
    openDevice(0);
    const CUdeviceptr memory = allocate(kBytes);
    std::vector<unsigned char> bytes(kBytes);
    fillPattern(bytes.data(), kBytes, 1);
    EXPECT_OK(CU(cuMemcpyHtoD)(memory, bytes.data(), kBytes));
    EXPECT_OK(CU(cuIpcGetMemHandle)(&mail->handle, memory + 4096));
    CUdeviceptr own = 0;
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&own, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
              CUDA_ERROR_INVALID_CONTEXT);
    mail->stage = 1;
    reached(2);  // the importer wrote
    EXPECT_OK(CU(cuMemcpyDtoH)(bytes.data(), memory, kBytes));
    EXPECT_EQ(firstWrong(bytes.data(), kBytes, 2), kBytes);
    EXPECT_OK(CU(cuMemFree)(memory));
    const CUdeviceptr next = allocate(kBytes);  // gets the same descriptor number
    EXPECT_OK(CU(cuMemsetD8)(next, 0, kBytes));
    mail->stage = 3;
    reached(4);
  });
  const pid_t importer = start(environment, [&] {
    openDevice(1);
    reached(1);
    CUdeviceptr memory = 0, again = 0;
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, mail->handle, 0), CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    REQUIRE_OK(CU(cuIpcOpenMemHandle)(&memory, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    EXPECT_OK(CU(cuIpcOpenMemHandle)(&again, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
    EXPECT_EQ(again, memory);
    EXPECT_OK(CU(cuIpcCloseMemHandle)(again));
    int ordinal = -1, capable = -1;
    EXPECT_OK(CU(cuPointerGetAttribute)(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory));
    EXPECT_EQ(ordinal, 0);
    EXPECT_OK(CU(cuPointerGetAttribute)(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                                        memory));
    EXPECT_EQ(capable, 0);
    std::vector<unsigned char> bytes(kBytes);
    EXPECT_OK(CU(cuMemcpyDtoH)(bytes.data(), memory, kBytes));
    EXPECT_EQ(firstWrong(bytes.data(), kBytes, 1), kBytes);
    fillPattern(bytes.data(), kBytes, 2);
    EXPECT_OK(CU(cuMemcpyHtoD)(memory, bytes.data(), kBytes));
    mail->stage = 2;
    reached(3);  // freed by the exporter: this mapping stays, the handle is dead
    std::memset(bytes.data(), 0, kBytes);
    EXPECT_OK(CU(cuMemcpyDtoH)(bytes.data(), memory, kBytes));
    EXPECT_EQ(firstWrong(bytes.data(), kBytes, 2), kBytes);
    EXPECT_OK(CU(cuIpcCloseMemHandle)(memory));
    EXPECT_EQ(CU(cuIpcCloseMemHandle)(memory), CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
              CUDA_ERROR_INVALID_HANDLE);
    mail->stage = 4;
  });
  expectSuccess(exporter);
  expectSuccess(importer);
  // Both are gone: the handle leads nowhere.
  isolated(environment, [&] {
    openDevice(1);
    CUdeviceptr memory = 0;
    EXPECT_EQ(CU(cuIpcOpenMemHandle)(&memory, mail->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
              CUDA_ERROR_MAP_FAILED);
  });
}

TEST(Emulator, DescribesPointers) {
  isolated({}, [] {
    openDevice();
    constexpr std::size_t kBytes = 10000;
    const CUdeviceptr device = allocate(kBytes);
    std::uint64_t id = 0, nextId = 0;
    EXPECT_OK(CU(cuPointerGetAttribute)(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, device + 17));
    EXPECT_OK(CU(cuMemFree)(device));
    const CUdeviceptr second = allocate(kBytes);
    EXPECT_OK(CU(cuPointerGetAttribute)(&nextId, CU_POINTER_ATTRIBUTE_BUFFER_ID, second));
    EXPECT_GT(nextId, id);

    unsigned type = 99, managed = 99, capable = 99;
    CUdeviceptr base = 0;
    std::size_t size = 0;
    void* pool = &base;
    CUpointer_attribute which[] = {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,      CU_POINTER_ATTRIBUTE_IS_MANAGED,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,   CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
    void* out[] = {&type, &managed, &base, &size, &pool, &capable};
    EXPECT_OK(CU(cuPointerGetAttributes)(6, which, out, second + kBytes - 1));
    EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_DEVICE));
    EXPECT_EQ(managed, 0u);
    EXPECT_EQ(base, second);
    EXPECT_EQ(size, kBytes);
    EXPECT_EQ(pool, nullptr);
    EXPECT_EQ(capable, 1u);

    std::vector<unsigned char> plain(kBytes);
    EXPECT_EQ(
        CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, asDevice(plain.data())),
        CUDA_ERROR_INVALID_VALUE);
    EXPECT_OK(CU(cuPointerGetAttributes)(6, which, out, asDevice(plain.data())));
    EXPECT_EQ(type, 0u);
    EXPECT_EQ(size, 0u);

    EXPECT_OK(CU(cuMemHostRegister)(plain.data(), kBytes, 0));
    EXPECT_EQ(CU(cuMemHostRegister)(plain.data() + 5000, 10, 0),
              CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    EXPECT_OK(CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                        asDevice(plain.data() + 1)));
    EXPECT_EQ(type, static_cast<unsigned>(CU_MEMORYTYPE_HOST));
    CUdeviceptr mapped = 0;
    EXPECT_OK(CU(cuMemHostGetDevicePointer)(&mapped, plain.data() + 8, 0));
    EXPECT_EQ(mapped, asDevice(plain.data() + 8));
    EXPECT_OK(CU(cuMemHostUnregister)(plain.data()));
    EXPECT_EQ(CU(cuMemHostUnregister)(plain.data()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    // Nothing is mapped at the first page.
    EXPECT_EQ(CU(cuMemHostRegister)(reinterpret_cast<void*>(4096), 4096, 0),
              CUDA_ERROR_INVALID_VALUE);
    EXPECT_EQ(CU(cuMemGetAddressRange)(&base, &size, 4096), CUDA_ERROR_NOT_FOUND);
  });
}

}  // namespace
}  // namespace hoccl::emu_test
