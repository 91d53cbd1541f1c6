// What the emulated driver says of its devices, environment and contexts.

#include <cstring>
#include <utility>

#include "test/unit/emulator_harness.h"

namespace hoccl::emu_test {
namespace {

TEST(Emulator, DescribesItsDevices) {
  isolated({{"EMUCUDA_DEVICES", "3"}}, [] {
    int count = 0;
    EXPECT_EQ(CU(cuDeviceGetCount)(&count), CUDA_ERROR_NOT_INITIALIZED);
    REQUIRE_OK(CU(cuInit)(0));
    EXPECT_OK(CU(cuDeviceGetCount)(&count));
    EXPECT_EQ(count, 3);
    char name[64];
    EXPECT_OK(CU(cuDeviceGetName)(name, sizeof name, 1));
    EXPECT_STREQ(name, "HOCCL emulated GPU");
    const std::pair<CUdevice_attribute, int> expected[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, 0},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 0},
    };
    for (const auto& [attribute, value] : expected) {
      int read = -1;
      EXPECT_OK(CU(cuDeviceGetAttribute)(&read, attribute, 0));
      EXPECT_EQ(read, value) << "attribute " << attribute;
    }
    CUuuid uuids[3];
    for (int i = 0; i < 3; ++i) EXPECT_OK(CU(cuDeviceGetUuid)(&uuids[i], i));
    EXPECT_NE(std::memcmp(&uuids[0], &uuids[1], sizeof(CUuuid)), 0);
    int access[2] = {-1, -1};
    EXPECT_OK(CU(cuDeviceCanAccessPeer)(&access[0], 0, 1));
    EXPECT_OK(CU(cuDeviceCanAccessPeer)(&access[1], 0, 0));
    EXPECT_EQ(access[0], 1);
    EXPECT_EQ(access[1], 0);
    CUdevice unknown = 0;
    EXPECT_EQ(CU(cuDeviceGet)(&unknown, 3), CUDA_ERROR_INVALID_DEVICE);
    void* function = nullptr;
    EXPECT_OK(CU(cuGetProcAddress)("cuMemAlloc", &function, 13000, 0, nullptr));
    EXPECT_EQ(function, driverSymbol("cuMemAlloc_v2"));
    EXPECT_EQ(CU(cuGetProcAddress)("cuNoSuchCall", &function, 13000, 0, nullptr),
              CUDA_ERROR_NOT_FOUND);
  });
}

TEST(Emulator, VisibleDevicesByNumberAndUuid) {
  const auto body = [] {
    int count = 0;
    char bus[32];
    REQUIRE_OK(CU(cuInit)(0));
    EXPECT_OK(CU(cuDeviceGetCount)(&count));
    EXPECT_EQ(count, 2);
    EXPECT_OK(CU(cuDeviceGetPCIBusId)(bus, sizeof bus, 0));
    EXPECT_STREQ(bus, "0000:13:00.0");
  };
  isolated({{"EMUCUDA_DEVICES", "4"}, {"CUDA_VISIBLE_DEVICES", "3,1"}}, body);
  isolated({{"EMUCUDA_DEVICES", "4"},
            {"CUDA_VISIBLE_DEVICES", "GPU-484f4343-4c45-4d55-8000-475055000003,0"}},
           body);
}

TEST(Emulator, RefusesABadEnvironment) {
  for (const char* variable : {"EMUCUDA_DEVICES", "EMUCUDA_DILATION", "EMUCUDA_DELAY_US"})
    isolated({{variable, "-1"}}, [] { EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_INVALID_VALUE); });
  isolated({{"EMUCUDA_DEVICES", "0"}}, [] { EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_NO_DEVICE); });
}

TEST(Emulator, AForkedChildIsNotInitialised) {
  isolated({}, [] {
    openDevice();
    const pid_t child = start({}, [] {
      CUdeviceptr pointer = 0;
      EXPECT_EQ(CU(cuMemAlloc)(&pointer, 4096), CUDA_ERROR_NOT_INITIALIZED);
      EXPECT_EQ(CU(cuInit)(0), CUDA_ERROR_NOT_INITIALIZED);
    });
    expectSuccess(child);
  });
}

TEST(Emulator, ContextsStack) {
  isolated({{"EMUCUDA_DEVICES", "2"}}, [] {
    CUdeviceptr pointer = 0;
    REQUIRE_OK(CU(cuInit)(0));
    EXPECT_EQ(CU(cuMemAlloc)(&pointer, 64), CUDA_ERROR_INVALID_CONTEXT);
    CUcontext contexts[2], current = nullptr;
    for (int i = 0; i < 2; ++i) REQUIRE_OK(CU(cuDevicePrimaryCtxRetain)(&contexts[i], i));
    EXPECT_OK(CU(cuCtxPushCurrent)(contexts[0]));
    EXPECT_OK(CU(cuCtxPushCurrent)(contexts[1]));
    CUdevice device = -1;
    EXPECT_OK(CU(cuCtxGetDevice)(&device));
    EXPECT_EQ(device, 1);
    EXPECT_OK(CU(cuCtxPopCurrent)(&current));
    EXPECT_EQ(current, contexts[1]);
    EXPECT_OK(CU(cuCtxGetCurrent)(&current));
    EXPECT_EQ(current, contexts[0]);
    EXPECT_OK(CU(cuCtxEnablePeerAccess)(contexts[1], 0));
    EXPECT_EQ(CU(cuCtxEnablePeerAccess)(contexts[1], 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    EXPECT_OK(CU(cuDevicePrimaryCtxRelease)(0));
    EXPECT_EQ(CU(cuMemAlloc)(&pointer, 64), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    unsigned flags = 0;
    int active = -1;
    EXPECT_OK(CU(cuDevicePrimaryCtxGetState)(0, &flags, &active));
    EXPECT_EQ(active, 0);
  });
}

}  // namespace
}  // namespace hoccl::emu_test
