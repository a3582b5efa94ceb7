// The storage forms of a cache, and their conversion to float: see ops/storage.py.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace kvlab {

// Vectors of N lanes, so that short rows convert through narrower ones.
template <int N>
struct Wide {
  typedef float F __attribute__((vector_size(N * 4)));
  typedef uint32_t U __attribute__((vector_size(N * 4)));
  typedef int8_t S8 __attribute__((vector_size(N)));
  typedef uint8_t U8 __attribute__((vector_size(N)));
  typedef uint16_t U16 __attribute__((vector_size(N * 2)));
};

template <typename To, typename From>
inline To As(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// Each form has the type of a code, and N codes as floats; scales are applied elsewhere.
struct Float32 {
  using Code = float;
  template <int N>
  static typename Wide<N>::F Decode(const Code* codes) {
    typename Wide<N>::F values;
    std::memcpy(&values, codes, sizeof values);
    return values;
  }
};

struct BFloat16 {
  using Code = uint16_t;
  template <int N>
  static typename Wide<N>::F Decode(const Code* codes) {
    typename Wide<N>::U16 raw;
    std::memcpy(&raw, codes, sizeof raw);
    return As<typename Wide<N>::F>(__builtin_convertvector(raw, typename Wide<N>::U) << 16);
  }
};

struct Float8E4M3 {
  using Code = uint8_t;
  template <int N>
  static typename Wide<N>::F Decode(const Code* codes) {
    using F = typename Wide<N>::F;
    using U = typename Wide<N>::U;
    typename Wide<N>::U8 raw;
    std::memcpy(&raw, codes, sizeof raw);
    const U code = __builtin_convertvector(raw, U);
    const U size = code & 0x7fu;
    const U normal = (size << 20) + (120u << 23);
    // Exponent 0: m eighths of 2^-6, as a difference, which needs no subnormal float.
    const F least = F{} + 0x1p-6f;
    const U tiny = As<U>(As<F>((size << 20) | (121u << 23)) - least);
    U bits = size < 8u ? tiny : normal;
    bits = size == 0x7fu ? U{} + 0x7fc00000u : bits;
    return As<F>(bits | ((code & 0x80u) << 24));
  }
};

struct Int8 {
  using Code = int8_t;
  template <int N>
  static typename Wide<N>::F Decode(const Code* codes) {
    typename Wide<N>::S8 raw;
    std::memcpy(&raw, codes, sizeof raw);
    return __builtin_convertvector(raw, typename Wide<N>::F);
  }
};

// One half of the bytes of int4, whose codes are kept 8 too high.
template <int kShift>
struct Int4 {
  using Code = uint8_t;
  template <int N>
  static typename Wide<N>::F Decode(const Code* codes) {
    typename Wide<N>::U8 raw;
    std::memcpy(&raw, codes, sizeof raw);
    raw = (raw >> kShift) & 15;
    return __builtin_convertvector(raw, typename Wide<N>::F) - 8.0f;
  }
};

template <typename Form, int N>
inline void ConvertRow(const typename Form::Code* codes, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + N <= count; i += N) {
    const auto values = Form::template Decode<N>(codes + i);
    std::memcpy(to + i, &values, sizeof values);
  }
  if constexpr (N > 1) {
    if (i < count) ConvertRow<Form, N / 2>(codes + i, count - i, to + i);
  }
}

// Codes [rows, columns] as floats; strides in elements.
template <typename Form>
void Convert(const void* codes, int64_t rows, int64_t columns, int64_t stride, float* to,
             int64_t to_stride) {
  const auto* from = static_cast<const typename Form::Code*>(codes);
  for (int64_t row = 0; row < rows; ++row) {
    ConvertRow<Form, kLanes>(from + row * stride, columns, to + row * to_stride);
  }
}

}  // namespace kvlab
