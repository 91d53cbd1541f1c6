// The mover's mappings of spans, on a driver that keeps count: side by side, whole or not at all.

#include "common/runtime/span_mapper.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "common/runtime/span_slot.h"

namespace hoccl {
namespace {

constexpr std::uint64_t kPiece = 2 << 20;
constexpr CUdeviceptr kFirstAddress = 0x100000000;

/// What the driver has: reserved ranges, mappings, and handles that were not released.
struct Device {
  std::map<CUdeviceptr, std::size_t> reserved, mapped, accessible;
  int handles = 0;
  CUdeviceptr next = kFirstAddress;
  int failImportAt = -1, failMapAt = -1;  ///< the how manieth, from 0
  bool failReserve = false, failAccess = false;
  int imports = 0, maps = 0;
  std::vector<unsigned char> fabric;  ///< the first byte of each fabric handle imported
};
Device device;

const Driver* driver() {
  static const Driver table = [] {
    Driver d;
    d.cuGetErrorName = [](CUresult, const char** text) {
      *text = "CUDA_ERROR_FAKE";
      return CUDA_SUCCESS;
    };
    d.cuGetErrorString = [](CUresult, const char** text) {
      *text = "told to fail";
      return CUDA_SUCCESS;
    };
    d.cuCtxGetDevice = [](CUdevice* out) {
      *out = 3;
      return CUDA_SUCCESS;
    };
    d.cuMemAddressReserve = [](CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr,
                               unsigned long long) {
      if (device.failReserve) return CUDA_ERROR_OUT_OF_MEMORY;
      *out = device.next;
      device.reserved[*out] = bytes;
      device.next += 2 * bytes;
      return CUDA_SUCCESS;
    };
    d.cuMemAddressFree = [](CUdeviceptr address, size_t bytes) {
      const auto found = device.reserved.find(address);
      if (found == device.reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
      device.reserved.erase(found);
      return CUDA_SUCCESS;
    };
    d.cuMemImportFromShareableHandle = [](CUmemGenericAllocationHandle* out, void* from,
                                          CUmemAllocationHandleType type) {
      if (device.imports++ == device.failImportAt) return CUDA_ERROR_MAP_FAILED;
      if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        device.fabric.push_back(*static_cast<const unsigned char*>(from));
      }
      *out = 77;
      ++device.handles;
      return CUDA_SUCCESS;
    };
    d.cuMemRelease = [](CUmemGenericAllocationHandle) {
      --device.handles;
      return CUDA_SUCCESS;
    };
    d.cuMemMap = [](CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle,
                    unsigned long long) {
      if (device.maps++ == device.failMapAt || offset != 0) return CUDA_ERROR_INVALID_VALUE;
      device.mapped[address] = bytes;
      return CUDA_SUCCESS;
    };
    d.cuMemUnmap = [](CUdeviceptr address, size_t bytes) {
      const auto found = device.mapped.find(address);
      if (found == device.mapped.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
      device.mapped.erase(found);
      return CUDA_SUCCESS;
    };
    d.cuMemSetAccess = [](CUdeviceptr address, size_t bytes, const CUmemAccessDesc* access,
                          size_t count) {
      const bool wanted = count == 1 && access->location.id == 3 &&
                          access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      if (device.failAccess || !wanted) return CUDA_ERROR_INVALID_VALUE;
      device.accessible[address] = bytes;
      return CUDA_SUCCESS;
    };
    return d;
  }();
  return &table;
}

class SpanMapperTest : public ::testing::Test {
 protected:
  SpanMapperTest() { device = {}; }

  /// A message of `pieces` segments that grow by a piece each.
  static AddSpan message(std::uint64_t id, std::uint64_t bytes, std::uint64_t done,
                         std::uint64_t pieces) {
    AddSpan made{};
    made.magic = kMoverMagic;
    made.id = id;
    made.base = 0x7f0000000000;
    made.bytes = bytes;
    made.done = done;
    made.pieces = pieces;
    for (std::uint64_t i = 0; i < pieces && i < kSpanPieces; ++i) made.pieceBytes[i] = kPiece;
    return made;
  }
  Status add(const AddSpan& message, std::size_t descriptors) {
    std::vector<UniqueFd> fds;
    for (std::size_t i = 0; i < descriptors; ++i) {
      fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    }
    return add(&mapper_, message, std::move(fds));
  }
  Status add(SpanMapper* mapper, const AddSpan& message, std::vector<UniqueFd> fds) {
    return mapper->add(message, fds, &whole_, &address_, &refused_);
  }
  static void expectNothingLeft() {
    EXPECT_TRUE(device.reserved.empty());
    EXPECT_TRUE(device.mapped.empty());
    EXPECT_EQ(device.handles, 0);
  }

  SpanMapper mapper_{driver()};
  bool whole_ = false;
  CUdeviceptr address_ = 0;
  std::uint32_t refused_ = 0;
};

const std::uint64_t kSpan = spanId(1, 1), kOther = spanId(2, 1);

TEST_F(SpanMapperTest, SegmentsLieSideBySide) {
  ASSERT_TRUE(add(message(kSpan, 3 * kPiece, 0, 3), 3));
  EXPECT_TRUE(whole_);
  EXPECT_EQ(address_, kFirstAddress);
  EXPECT_EQ(device.mapped.size(), 3u);
  for (std::uint64_t i = 0; i < 3; ++i) EXPECT_EQ(device.mapped[address_ + i * kPiece], kPiece);
  EXPECT_EQ(device.accessible[address_], 3 * kPiece);
  EXPECT_EQ(device.handles, 0) << "the mappings keep the memory";
  ASSERT_TRUE(mapper_.unmap(kSpan));
  expectNothingLeft();
  EXPECT_TRUE(mapper_.unmap(kSpan)) << "nothing of it is there";
}

TEST_F(SpanMapperTest, ManySegmentsComeInSeveralMessages) {
  const std::uint64_t bytes = (kSpanPieces + 2) * kPiece;
  ASSERT_TRUE(add(message(kSpan, bytes, 0, kSpanPieces), kSpanPieces));
  EXPECT_FALSE(whole_);
  EXPECT_TRUE(device.accessible.empty());
  ASSERT_TRUE(add(message(kSpan, bytes, kSpanPieces * kPiece, 2), 2));
  EXPECT_TRUE(whole_);
  EXPECT_EQ(device.mapped.size(), kSpanPieces + 2);
  EXPECT_EQ(device.accessible[address_], bytes);
}

TEST_F(SpanMapperTest, WhatFailsLeavesNothingAndNamesTheSegment) {
  struct Case {
    const char* what;
    void (*set)();
    std::uint32_t refused;
  };
  for (const Case& c : {Case{"reserve", [] { device.failReserve = true; }, 3},
                        Case{"import", [] { device.failImportAt = 1; }, 1},
                        Case{"map", [] { device.failMapAt = 2; }, 2},
                        Case{"access", [] { device.failAccess = true; }, 3}}) {
    SCOPED_TRACE(c.what);
    device = {};
    c.set();
    const Status status = add(message(kSpan, 3 * kPiece, 0, 3), 3);
    EXPECT_FALSE(status);
    EXPECT_FALSE(whole_);
    EXPECT_EQ(refused_, c.refused);
    expectNothingLeft();
  }
  device = {};
  EXPECT_TRUE(add(message(kSpan, 3 * kPiece, 0, 3), 3)) << "the same again";
  EXPECT_TRUE(whole_);
}

TEST_F(SpanMapperTest, AFailureInALaterMessageTakesTheEarlierOnesBack) {
  const std::uint64_t bytes = (kSpanPieces + 2) * kPiece;
  device.failMapAt = static_cast<int>(kSpanPieces) + 1;
  ASSERT_TRUE(add(message(kSpan, bytes, 0, kSpanPieces), kSpanPieces));
  EXPECT_FALSE(add(message(kSpan, bytes, kSpanPieces * kPiece, 2), 2));
  EXPECT_EQ(refused_, 1u);
  expectNothingLeft();
}

TEST_F(SpanMapperTest, AHalfThatIsNotGoneOnWithIsTakenBack) {
  const std::uint64_t bytes = (kSpanPieces + 2) * kPiece;
  ASSERT_TRUE(add(message(kSpan, bytes, 0, kSpanPieces), kSpanPieces));
  ASSERT_TRUE(add(message(kSpan, bytes, kSpanPieces * kPiece, 0), 0));  // said so
  expectNothingLeft();
  ASSERT_TRUE(add(message(kSpan, bytes, 0, kSpanPieces), kSpanPieces));
  ASSERT_TRUE(add(message(kOther, kPiece, 0, 1), 1));  // or another one comes
  EXPECT_TRUE(whole_);
  EXPECT_EQ(device.mapped.size(), 1u);
  ASSERT_TRUE(mapper_.unmap(kOther));
  expectNothingLeft();
}

std::vector<UniqueFd> descriptors(std::size_t count) {
  std::vector<UniqueFd> fds;
  while (fds.size() < count) fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  return fds;
}

TEST_F(SpanMapperTest, WhatItKeepsCanBePassedOnInParts) {
  SpanMapper mapper(driver(), 100);
  const std::uint64_t bytes = (kSpanPieces + 2) * kPiece;
  std::vector<UniqueFd> first = descriptors(kSpanPieces), second = descriptors(2);
  std::vector<int> sent;
  for (const std::vector<UniqueFd>* each : {&first, &second}) {
    for (const UniqueFd& fd : *each) sent.push_back(fd.get());
  }
  AddSpan out = message(kSpan, bytes, 0, 0);
  std::vector<int> fds, passed;
  ASSERT_TRUE(add(&mapper, message(kSpan, bytes, 0, kSpanPieces), std::move(first)));
  EXPECT_FALSE(mapper.passOn(&out, &fds)) << "it is not whole";
  ASSERT_TRUE(add(&mapper, message(kSpan, bytes, kSpanPieces * kPiece, 2), std::move(second)));
  EXPECT_EQ(mapper.addressOf(kSpan), address_);
  for (std::uint64_t wanted : {std::uint64_t{kSpanPieces}, std::uint64_t{2}}) {
    ASSERT_TRUE(mapper.passOn(&out, &fds));
    EXPECT_EQ(out.pieces, wanted);
    EXPECT_EQ(fds.size(), wanted);
    for (std::uint64_t i = 0; i < out.pieces; ++i) out.done += out.pieceBytes[i];
    passed.insert(passed.end(), fds.begin(), fds.end());
  }
  EXPECT_EQ(out.done, bytes);
  EXPECT_EQ(passed, sent);
  ASSERT_TRUE(mapper.unmapAll());
  EXPECT_EQ(mapper.addressOf(kSpan), 0u);
  for (int fd : sent) EXPECT_EQ(::fcntl(fd, F_GETFD), -1) << "a descriptor keeps the memory";
  expectNothingLeft();
}

/// They take the place of descriptors, piece by piece, and no descriptor's when they are kept.
TEST_F(SpanMapperTest, FabricHandlesAreMappedAndPassedOnToo) {
  SpanMapper mapper(driver(), 1);
  AddSpan in = message(kSpan, 3 * kPiece, 0, 3);
  in.fabric = 0b101;
  in.fabricHandles[0][0] = 7;
  in.fabricHandles[2][0] = 9;
  EXPECT_EQ(add(&mapper, in, descriptors(3)).code(), Code::InvalidArgument);
  std::vector<UniqueFd> fds = descriptors(1);
  const int fd = fds[0].get();
  ASSERT_TRUE(add(&mapper, in, std::move(fds)));
  EXPECT_TRUE(whole_);
  EXPECT_EQ(device.fabric, (std::vector<unsigned char>{7, 9}));
  AddSpan out = message(kSpan, 3 * kPiece, 0, 0);
  std::vector<int> passed;
  ASSERT_TRUE(mapper.passOn(&out, &passed));
  EXPECT_EQ(passed, std::vector<int>{fd});
  EXPECT_EQ(out.pieces, 3u);
  EXPECT_EQ(out.fabric, 0b101u);
  EXPECT_EQ(out.fabricHandles[0][0], 7);
  EXPECT_EQ(out.fabricHandles[2][0], 9);
}

TEST_F(SpanMapperTest, SpansBeyondTheDescriptorsItKeepsAreMappedAndStay) {
  SpanMapper mapper(driver(), 3);
  AddSpan out = message(kSpan, 2 * kPiece, 0, 0), other = message(kOther, 2 * kPiece, 0, 0);
  std::vector<int> fds;
  ASSERT_TRUE(add(&mapper, message(kSpan, 2 * kPiece, 0, 2), descriptors(2)));
  ASSERT_TRUE(add(&mapper, message(kOther, 2 * kPiece, 0, 2), descriptors(2)));
  EXPECT_TRUE(mapper.passOn(&out, &fds));
  const Status status = mapper.passOn(&other, &fds);
  EXPECT_EQ(status.code(), Code::Unsupported);
  EXPECT_NE(status.message().find("ulimit -n"), std::string::npos) << status.message();
  EXPECT_NE(mapper.addressOf(kOther), 0u);
  // Once others have gone there is room again.
  ASSERT_TRUE(mapper.unmapAll());
  ASSERT_TRUE(add(&mapper, message(kOther, 2 * kPiece, 0, 2), descriptors(2)));
  EXPECT_TRUE(mapper.passOn(&other, &fds));
}

TEST_F(SpanMapperTest, MessagesThatMakeNoSenseChangeNothing) {
  ASSERT_TRUE(add(message(kOther, kPiece, 0, 1), 1));
  AddSpan tooMuch = message(kSpan, 3 * kPiece, 0, 3);
  tooMuch.pieceBytes[1] = ~0ull - kPiece;
  AddSpan empty = message(kSpan, 3 * kPiece, 0, 3);
  empty.pieceBytes[2] = 0;
  struct Case {
    const char* what;
    AddSpan message;
    std::size_t descriptors;
  };
  for (const Case& c : {Case{"fewer descriptors", message(kSpan, 3 * kPiece, 0, 3), 2},
                        Case{"more segments than bytes", message(kSpan, 2 * kPiece, 0, 3), 3},
                        Case{"begins in the middle", message(kSpan, 3 * kPiece, kPiece, 2), 2},
                        Case{"more segments than fit", message(kSpan, 99 * kPiece, 0, 33), 33},
                        Case{"a sum that wraps", tooMuch, 3}, Case{"an empty segment", empty, 3},
                        Case{"one that is there", message(kOther, kPiece, 0, 1), 1}}) {
    const Status status = add(c.message, c.descriptors);
    EXPECT_EQ(status.code(), Code::InvalidArgument) << c.what;
    EXPECT_NE(status.message().find("make no sense"), std::string::npos) << status.message();
    EXPECT_EQ(device.mapped.size(), 1u) << c.what;
    EXPECT_EQ(device.reserved.size(), 1u) << c.what;
  }
}

}  // namespace
}  // namespace hoccl
