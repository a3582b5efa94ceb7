// exp, tanh and reductions on vectors of floats.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace kvlab {

typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));

inline Floats Max(Floats a, Floats b) { return a > b ? a : b; }

// e to the x within 1.5 ulp; exactly 0 below -87, exactly 1 at 0, NaN at NaN. Above 88 it overflows
// into anything: what is asked here are differences from a maximum, and twice a small number.
inline Floats Exp(Floats x) {
  // Adding 1.5 * 2^23 leaves the nearest whole number in the low bits.
  const Floats magic = Broadcast(12582912.0f);
  const Floats shifted = x * Broadcast(1.44269504088896341f) + magic;
  const Floats whole = shifted - magic;
  // ln 2 in two parts, the first with so few bits that its product is exact.
  const Floats rest = (x - whole * Broadcast(0.693359375f)) - whole * Broadcast(-2.12194440e-4f);
  // Cephes, expf.
  Floats sum = Broadcast(1.9875691500e-4f);
  sum = sum * rest + Broadcast(1.3981999507e-3f);
  sum = sum * rest + Broadcast(8.3334519073e-3f);
  sum = sum * rest + Broadcast(4.1665795894e-2f);
  sum = sum * rest + Broadcast(1.6666665459e-1f);
  sum = sum * rest + Broadcast(5.0000001201e-1f);
  sum = sum * (rest * rest) + (rest + Broadcast(1.0f));
  Bits exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent + 127u) << 23;
  Floats power;
  std::memcpy(&power, &exponent, sizeof power);
  return x < Broadcast(-87.0f) ? Floats{} : sum * power;
}

// Within 2 ulp, NaN at NaN.
inline Floats Tanh(Floats x) {
  const Floats size = x < Floats{} ? -x : x;
  const Floats bounded = size > Broadcast(10.0f) ? Broadcast(10.0f) : size;  // tanh 10 is 1
  const Floats large =
      Broadcast(1.0f) - Broadcast(2.0f) / (Exp(bounded + bounded) + Broadcast(1.0f));
  // Cephes, tanhf: near 0 the quotient above would cancel.
  const Floats square = x * x;
  Floats sum = Broadcast(-5.70498872745e-3f);
  sum = sum * square + Broadcast(2.06390887954e-2f);
  sum = sum * square + Broadcast(-5.37397155531e-2f);
  sum = sum * square + Broadcast(1.33314422036e-1f);
  sum = sum * square + Broadcast(-3.33332819422e-1f);
  const Floats small = sum * square * x + x;
  return size < Broadcast(0.625f) ? small : (x < Floats{} ? -large : large);
}

// Lanes that lie kApart apart change places.
template <int kApart>
inline Floats Swapped(Floats vector) {
#if defined(__clang__)
  Floats swapped;
  for (int lane = 0; lane < kLanes; ++lane) swapped[lane] = vector[lane ^ kApart];
  return swapped;
#else
  Ints from;
  for (int lane = 0; lane < kLanes; ++lane) from[lane] = lane ^ kApart;
  return __builtin_shuffle(vector, from);
#endif
}

// Lanes joined half by half, in one order whatever the compiler makes of it.
template <int kApart = kLanes / 2, typename Join>
inline float Reduce(Floats vector, Join join) {
  vector = join(vector, Swapped<kApart>(vector));
  if constexpr (kApart > 1) return Reduce<kApart / 2>(vector, join);
  return vector[0];
}

inline float SumOf(Floats vector) {
  return Reduce(vector, [](Floats a, Floats b) { return a + b; });
}

inline float MaxOf(Floats vector) {
  return Reduce(vector, [](Floats a, Floats b) { return Max(a, b); });
}

}  // namespace kvlab
