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
  typedef int32_t S __attribute__((vector_size(N * 4)));
};

template <typename To, typename From>
inline To As(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// N codes as 32-bit numbers. A loop, because compilers make better of it than of a conversion of
// vectors whose sizes differ.
template <int N, typename Code>
inline typename Wide<N>::S Widen(const Code* codes) {
  int32_t wide[N];
  for (int i = 0; i < N; ++i) wide[i] = codes[i];
  return As<typename Wide<N>::S>(wide);
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
    return As<typename Wide<N>::F>(As<typename Wide<N>::U>(Widen<N>(codes)) << 16);
  }
};

struct Float8E4M3 {
  using Code = uint8_t;
  template <int N>
  static typename Wide<N>::F Decode(const Code* codes) {
    using F = typename Wide<N>::F;
    using U = typename Wide<N>::U;
    const U code = As<U>(Widen<N>(codes));
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
    return __builtin_convertvector(Widen<N>(codes), typename Wide<N>::F);
  }
};

// One half of the bytes of int4, whose codes are kept 8 too high.
template <int kShift>
struct Int4 {
  using Code = uint8_t;
  template <int N>
  static typename Wide<N>::F Decode(const Code* codes) {
    const auto code = ((Widen<N>(codes) >> kShift) & 15) - 8;
    return __builtin_convertvector(code, typename Wide<N>::F);
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

// Codes [rows, columns] that lie `stride` apart, and where floats are to go.
struct Codes {
  const char* from;
  const char* next;  // such codes, asked for after these; or null
  int64_t rows, columns, stride;
  float* to;
  int64_t to_stride;
};

// Codes as floats; with kFetch, the next ones come nearer meanwhile.
template <typename Form, bool kFetch>
void Convert(const Codes& codes, float* to) {
  constexpr int64_t size = sizeof(typename Form::Code), line = 64;
  const auto* from = reinterpret_cast<const typename Form::Code*>(codes.from);
  for (int64_t row = 0; row < codes.rows; ++row) {
    ConvertRow<Form, kLanes>(from + row * codes.stride, codes.columns, to + row * codes.to_stride);
    for (int64_t i = 0; kFetch && i < codes.columns * size; i += line) {
      __builtin_prefetch(codes.next + row * codes.stride * size + i);
    }
  }
}

template <typename Form>
void Convert(const Codes& codes) {
  if (codes.next != nullptr) return Convert<Form, true>(codes, codes.to);
  return Convert<Form, false>(codes, codes.to);
}

// Both halves of int4: the second goes to `high`.
inline void ConvertHalves(const Codes& codes, float* high) {
  Convert<Int4<0>>(codes);
  Convert<Int4<4>, false>(codes, high);
}

}  // namespace kvlab
