// Vectors of the widest registers that the target has, through the compiler's vector types.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

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

// Less 0, which changes no number and costs nothing; plus 0 would turn -0 into 0, and cost an add.
inline Floats Broadcast(float value) { return value - Floats{}; }

// a * b + sum, rounded once where the processor can. Left to the compiler, a sum's bits would depend
// on what is around it: for some AMD processors g++ splits it where one chain of sums is alone.
inline Floats MultiplyAdd(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__AVX__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, sum);
#elif defined(__aarch64__)
  return vfmaq_f32(sum, a, b);
#else
  return a * b + sum;
#endif
}

}  // namespace kvlab
