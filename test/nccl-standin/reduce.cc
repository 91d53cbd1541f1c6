#include "reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace standin {
namespace {

__extension__ typedef _Float16 Half;

/// bfloat16: the upper half of a float, rounded to nearest even when stored.
struct Bfloat16 {
  std::uint16_t bits;

  Bfloat16() = default;
  explicit Bfloat16(float value) {
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    bits = static_cast<std::uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
  }
  operator float() const {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

/// Calls `f` with a value of the element's type; false for types that are not reduced here.
template <typename F>
bool withType(ncclDataType_t type, F f) {
  switch (type) {
    case ncclInt8:
      f(std::int8_t{});
      return true;
    case ncclUint8:
      f(std::uint8_t{});
      return true;
    case ncclInt32:
      f(std::int32_t{});
      return true;
    case ncclUint32:
      f(std::uint32_t{});
      return true;
    case ncclInt64:
      f(std::int64_t{});
      return true;
    case ncclUint64:
      f(std::uint64_t{});
      return true;
    case ncclFloat16:
      f(Half{});
      return true;
    case ncclFloat32:
      f(float{});
      return true;
    case ncclFloat64:
      f(double{});
      return true;
    case ncclBfloat16:
      f(Bfloat16{});
      return true;
    default:
      return false;
  }
}

template <typename T>
T apply(T a, T b, ncclRedOp_t op) {
  switch (op) {
    case ncclProd:
      return T(a * b);
    case ncclMax:
      return std::max(a, b);
    case ncclMin:
      return std::min(a, b);
    default:
      return T(a + b);
  }
}

template <typename T>
T load(const void* data, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(void* data, std::size_t i, T value) {
  std::memcpy(static_cast<char*>(data) + i * sizeof(T), &value, sizeof(T));
}

}  // namespace

std::size_t typeSize(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

bool canReduce(ncclDataType_t type, ncclRedOp_t op) {
  return op >= ncclSum && op < ncclNumOps && withType(type, [](auto) {});
}

void combine(void* into, const void* from, std::size_t count, ncclDataType_t type, ncclRedOp_t op) {
  withType(type, [&]<typename T>(T) {
    for (std::size_t i = 0; i < count; ++i) {
      store(into, i, apply(load<T>(into, i), load<T>(from, i), op));
    }
  });
}

void multiply(void* data, const void* scalar, std::size_t count, ncclDataType_t type) {
  withType(type, [&]<typename T>(T) {
    const T by = load<T>(scalar, 0);
    for (std::size_t i = 0; i < count; ++i) store(data, i, T(load<T>(data, i) * by));
  });
}

void finish(void* data, std::size_t count, ncclDataType_t type, ncclRedOp_t op, int nranks) {
  if (op != ncclAvg) return;
  withType(type, [&]<typename T>(T) {
    for (std::size_t i = 0; i < count; ++i) store(data, i, T(load<T>(data, i) / T(float(nranks))));
  });
}

}  // namespace standin
