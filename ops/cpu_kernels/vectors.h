// Vectors of the widest registers that the target has, through the compiler's vector types.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvlab {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kLanes = kVectorBytes / sizeof(float);

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));

inline Floats Load(const float* from) {
  Floats vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline void Store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof vector); }

inline Floats Broadcast(float value) { return value - Floats{}; }  // value + 0 would lose -0

}  // namespace kvlab
