// The arithmetic of a linear layer on a tile: sums of a few rows of x with a few panels, in
// registers, over one block of k.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "linear_formats.h"
#include "linear_problem.h"
#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace kvlab::linear {

inline void AddTo(Floats* total, Floats sum, bool first) { *total = first ? sum : *total + sum; }

// Multiplies in float32.
template <class PanelType>
struct Fma {
  using Panel = PanelType;
  static constexpr bool kPairs = false;  // of bfloat16 in packed x
  static constexpr bool kUnpacks = !std::is_same_v<Panel, Float32Panel>;

  // totals[R, C] of x[k, R] and C panels, over k in [begin, end).
  template <int R, int C>
  static void Tile(const Panel* given, const uint32_t* packed, int64_t begin, int64_t end,
                   Floats* totals) {
    const float* x = reinterpret_cast<const float*>(packed) + begin * R;
    Panel panels[C];
    std::copy(given, given + C, panels);
    Floats sums[R][C] = {};
    for (int64_t group = begin; group < end; group += kGroup) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) panels[c].Begin(group);
      const int64_t stop = std::min(group + kGroup, end);
      for (int64_t k = group; k < stop; k += Panel::kStep, x += R * Panel::kStep) {
        Floats weights[C][Panel::kStep];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) panels[c].Read(k, weights[c]);
#pragma GCC unroll 2
        for (int step = 0; step < Panel::kStep; ++step) {
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            const Floats value = Broadcast(x[step * R + r]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
              sums[r][c] = MultiplyAdd(value, weights[c][step], sums[r][c]);
            }
          }
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) AddTo(&totals[r * C + c], sums[r][c], begin == 0);
    }
  }
};

#if defined(__AVX512BF16__)
// Multiplies pairs of bfloat16 by the processor's dot instruction, sums in float32.
struct Dot {
  using Panel = BFloat16Panel;
  static constexpr bool kPairs = true;
  static constexpr bool kUnpacks = false;

  template <int R, int C>
  static void Tile(const Panel* given, const uint32_t* packed, int64_t begin, int64_t end,
                   Floats* totals) {
    const uint32_t* x = packed + begin / 2 * R;
    Panel panels[C];
    std::copy(given, given + C, panels);
    Floats sums[R][C] = {};
    for (int64_t group = begin; group < end; group += kGroup) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) panels[c].Begin(group);
      const int64_t stop = std::min(group + kGroup, end);
      for (int64_t k = group; k < stop; k += 2, x += R) {
        UInts weights[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) weights[c] = panels[c].Pairs(k);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const auto pair = Bits<__m512bh>(UInts{} + x[r]);
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) {
            sums[r][c] = _mm512_dpbf16_ps(sums[r][c], pair, Bits<__m512bh>(weights[c]));
          }
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) AddTo(&totals[r * C + c], sums[r][c], begin == 0);
    }
  }
};
#else
using Dot = Fma<BFloat16Panel>;
#endif

template <class Kernel>
using TileFunction = void (*)(const typename Kernel::Panel*, const uint32_t*, int64_t, int64_t,
                              Floats*);

template <class Kernel, int C, size_t... R>
constexpr std::array<TileFunction<Kernel>, sizeof...(R)> TilesByRows(std::index_sequence<R...>) {
  return {&Kernel::template Tile<R + 1, C>...};
}

// The kernels of a tile, by its rows.
template <class Kernel, int C>
constexpr auto kTiles =
    TilesByRows<Kernel, C>(std::make_index_sequence<C == kFewRowsPanels ? kFewRows : kTileRows>());

}  // namespace kvlab::linear
