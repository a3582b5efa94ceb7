// y[m, n] = x[m, k] W[k, n] + bias[n], W in panels of kLanes columns (linear_formats.h).
//
// Bits: an element of y is the sum over blocks of k, in order, of one chain of fused multiply-adds
// over a block's k, in order; the blocks follow from k alone. So a row's result depends on nothing
// but that row and the weights: not on m, its neighbours, its tile or the number of threads.
//
// Work: rows of x are cut into tiles of at most kTileRows, transposed to [k, rows] once. An item is
// two panels times some tiles: a block of the panels (32 KiB of float32) stays in the first
// cache while every tile of the item passes over it, the sums of a tile in registers.

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "linear_formats.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace kvlab {
namespace {

namespace ffi = xla::ffi;

// Sums of a tile fill 24 of 32 registers, or 12 of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kItemPanels = 2;
constexpr int64_t kItemTiles = 10;
constexpr int64_t kBlock = 256;             // most k of one chain
constexpr int64_t kSerialPack = 1 << 15;    // fewer numbers are not worth waking threads

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// An array of float32 or bfloat16.
struct Numbers {
  void* data;
  bool is_bfloat16;

  float At(int64_t index) const {
    if (!is_bfloat16) return static_cast<const float*>(data)[index];
    return Bits<float>(static_cast<uint32_t>(HalfAt(index)) << 16);
  }
  uint16_t HalfAt(int64_t index) const { return static_cast<const uint16_t*>(data)[index]; }
};

struct Problem {
  int64_t m, k, n;
  Numbers x, bias, y;  // bias.data is null where there is none
  const void* panels;
  const void* scales;
  uint32_t* packed;  // x of each tile: [even k, rows] float32, or [even k / 2, rows] bfloat16 pairs

  int64_t tiles() const { return CeilDiv(m, kTileRows); }
  int64_t num_panels() const { return CeilDiv(n, kLanes); }
  int64_t even_k() const { return k + k % 2; }
  int64_t FirstRow(int64_t tile) const { return tile * m / tiles(); }
  int64_t Rows(int64_t tile) const { return FirstRow(tile + 1) - FirstRow(tile); }
  // Of k: blocks alike, in whole groups.
  int64_t BlockSize() const {
    return CeilDiv(CeilDiv(k, CeilDiv(k, kBlock)), kGroup) * kGroup;
  }
};

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
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) panels[c].Begin(group);
      const int64_t stop = std::min(group + kGroup, end);
      for (int64_t k = group; k < stop; k += Panel::kStep, x += R * Panel::kStep) {
        Floats weights[C][Panel::kStep];
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) panels[c].Read(k, weights[c]);
#pragma GCC unroll 2
        for (int step = 0; step < Panel::kStep; ++step) {
#pragma GCC unroll 12
          for (int r = 0; r < R; ++r) {
            const Floats value = Broadcast(x[step * R + r]);
#pragma GCC unroll 2
            for (int c = 0; c < C; ++c) sums[r][c] += value * weights[c][step];
          }
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
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
  static void Tile(const Panel* panels, const uint32_t* packed, int64_t begin, int64_t end,
                   Floats* totals) {
    const uint32_t* x = packed + begin / 2 * R;
    Floats sums[R][C] = {};
    for (int64_t k = begin; k < end; k += 2, x += R) {
      UInts weights[C];
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) weights[c] = panels[c].Pairs(k);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const auto pair = Bits<__m512bh>(UInts{} + x[r]);
#pragma GCC unroll 2
        for (int c = 0; c < C; ++c) {
          sums[r][c] = _mm512_dpbf16_ps(sums[r][c], pair, Bits<__m512bh>(weights[c]));
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
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
constexpr auto kTiles = TilesByRows<Kernel, C>(std::make_index_sequence<kTileRows>());

// Rounded to nearest even, NaN kept, in the low halves.
inline UInts ToBFloat16(Floats values) {
  const UInts bits = Bits<UInts>(values);
  const UInts rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return values == values ? rounded : (bits >> 16) | 0x40u;
}

// Stores one row of one panel, whose last columns may not exist.
void StoreRow(const Problem& p, int64_t row, int64_t panel, Floats total) {
  const int64_t column = panel * kLanes;
  const int64_t columns = std::min<int64_t>(kLanes, p.n - column);
  if (p.bias.data != nullptr) {
    float bias[kLanes] = {};
    for (int64_t i = 0; i < columns; ++i) bias[i] = p.bias.At(column + i);
    total += Load(bias);
  }
  const int64_t place = row * p.n + column;
  if (p.y.is_bfloat16) {
    const Halves halves = __builtin_convertvector(ToBFloat16(total), Halves);
    std::memcpy(static_cast<uint16_t*>(p.y.data) + place, &halves, columns * sizeof(uint16_t));
  } else {
    std::memcpy(static_cast<float*>(p.y.data) + place, &total, columns * sizeof(float));
  }
}

template <class Panel>
void Unpack(Panel panel, int64_t begin, int64_t end, Floats* values) {
  for (int64_t group = begin; group < end; group += kGroup) {
    panel.Begin(group);
    const int64_t stop = std::min(group + kGroup, end);
    for (int64_t k = group; k < stop; k += Panel::kStep) {
      Floats read[Panel::kStep];
      panel.Read(k, read);
      for (Floats one : read) *values++ = one;
    }
  }
}

// C panels from `panel` on, times tiles [first, last).
template <class Kernel, int C>
void RunItem(const Problem& p, int64_t panel, int64_t first, int64_t last) {
  using Panel = typename Kernel::Panel;
  Floats totals[kItemTiles * kTileRows * C];
  Panel panels[C];
  for (int c = 0; c < C; ++c) panels[c] = Panel(p.panels, p.scales, p.k, panel + c);
  const int64_t end_k = Panel::kStep == 2 ? p.even_k() : p.k;
  const int64_t block = p.BlockSize();
  const int64_t first_row = p.FirstRow(first);
  for (int64_t begin = 0; begin < end_k; begin += block) {
    const int64_t end = std::min(begin + block, end_k);
    const auto run = [&](const auto& tiles, auto* weights) {
      for (int64_t tile = first; tile < last; ++tile) {
        if constexpr (!Kernel::kUnpacks) {
          // Later tiles find the block in the cache, and fetch the next one meanwhile.
          const int64_t ahead = tile == first ? kPrefetchBytes : block * Panel::kBytes;
          for (int c = 0; c < C; ++c) weights[c].FetchAhead(ahead);
        }
        const int64_t row = p.FirstRow(tile);
        const uint32_t* x = p.packed + row * (Kernel::kPairs ? p.even_k() / 2 : p.even_k());
        tiles[p.Rows(tile) - 1](weights, x, begin, end, totals + (row - first_row) * C);
      }
    };
    if constexpr (Kernel::kUnpacks) {
      if (last - first > 1) {  // unpacked once for all tiles
        Floats values[C][kBlock];
        Float32Panel unpacked[C];
        for (int c = 0; c < C; ++c) {
          Unpack(panels[c], begin, end, values[c]);
          unpacked[c] = Float32Panel(values[c], begin);
        }
        run(kTiles<Fma<Float32Panel>, C>, unpacked);
        continue;
      }
    }
    run(kTiles<Kernel, C>, panels);
  }
  for (int64_t row = first_row; row < p.FirstRow(last); ++row) {
    for (int c = 0; c < C; ++c) StoreRow(p, row, panel + c, totals[(row - first_row) * C + c]);
  }
}

// Transposes x of a tile.
template <class Kernel>
void PackTile(const Problem& p, int64_t tile) {
  const int64_t first = p.FirstRow(tile), rows = p.Rows(tile);
  if constexpr (Kernel::kPairs) {
    uint32_t* to = p.packed + first * (p.even_k() / 2);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = (first + r) * p.k;
      for (int64_t k = 0; k < p.k; k += 2) {
        const uint32_t next = k + 1 < p.k ? p.x.HalfAt(from + k + 1) : 0;
        to[k / 2 * rows + r] = p.x.HalfAt(from + k) | next << 16;
      }
    }
  } else {
    float* to = reinterpret_cast<float*>(p.packed) + first * p.even_k();
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = (first + r) * p.k;
      if (p.x.is_bfloat16) {
        for (int64_t k = 0; k < p.k; ++k) to[k * rows + r] = p.x.At(from + k);
      } else {
        const float* x = static_cast<const float*>(p.x.data) + from;
        for (int64_t k = 0; k < p.k; ++k) to[k * rows + r] = x[k];
      }
      if (p.k % 2) to[p.k * rows + r] = 0;
    }
  }
}

template <class Kernel>
void Run(ffi::ThreadPool& pool, const Problem& p) {
  const int64_t tiles = p.tiles();
  if (p.m * p.k < kSerialPack) {
    for (int64_t tile = 0; tile < tiles; ++tile) PackTile<Kernel>(p, tile);
  } else {
    ParallelFor(pool, tiles, [&p](int64_t tile) { PackTile<Kernel>(p, tile); });
  }
  const int64_t row_blocks = CeilDiv(tiles, kItemTiles);
  const int64_t pairs = CeilDiv(p.num_panels(), kItemPanels);
  ParallelFor(pool, pairs * row_blocks, [&p, row_blocks, tiles](int64_t item) {
    const int64_t panel = item / row_blocks * kItemPanels;
    const int64_t row_block = item % row_blocks;
    const int64_t first = row_block * tiles / row_blocks;
    const int64_t last = (row_block + 1) * tiles / row_blocks;
    if (panel + 1 < p.num_panels()) {
      RunItem<Kernel, 2>(p, panel, first, last);
    } else {
      RunItem<Kernel, 1>(p, panel, first, last);
    }
  });
}

// Memory for packed x, kept by the calling thread: fresh pages would cost more than the copy.
uint32_t* PackedMemory(int64_t words) {
  thread_local std::unique_ptr<uint32_t[]> memory;
  thread_local int64_t held = 0;
  if (words > held) {
    memory.reset();
    memory.reset(new uint32_t[words]);
    held = words;
  }
  return memory.get();
}

bool IsNumbers(const ffi::AnyBuffer& buffer) {
  return buffer.element_type() == ffi::F32 || buffer.element_type() == ffi::BF16;
}

Numbers NumbersOf(const ffi::AnyBuffer& buffer) {
  return {buffer.untyped_data(), buffer.element_type() == ffi::BF16};
}

// Sizes of panels and scales [panels, along k, kLanes, ...] that k and n ask for.
bool Fits(const ffi::AnyBuffer& buffer, int64_t n, int64_t along_k) {
  const auto sizes = buffer.dimensions();
  return sizes.size() >= 3 && sizes[0] == CeilDiv(n, kLanes) && sizes[1] == along_k &&
         sizes[2] == kLanes;
}

ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer panels,
                  ffi::AnyBuffer scales, ffi::AnyBuffer bias, ffi::Result<ffi::AnyBuffer> y) {
  if (!IsNumbers(x) || !IsNumbers(bias) || !IsNumbers(*y) || x.dimensions().size() == 0 ||
      y->dimensions().size() == 0) {
    return ffi::Error::InvalidArgument("x, bias and y must be float32 or bfloat16");
  }
  const int64_t k = x.dimensions().back(), n = y->dimensions().back();
  if (k == 0 || n == 0 || x.element_count() == 0) {
    return ffi::Error::InvalidArgument("x and y must not be empty");
  }
  const int64_t m = x.element_count() / k;
  const bool biased = bias.element_count() > 0;
  Problem p{m, k, n, NumbersOf(x), NumbersOf(bias), NumbersOf(*y), panels.untyped_data(),
            scales.untyped_data(), nullptr};
  if (!biased) p.bias.data = nullptr;
  const int64_t groups = CeilDiv(k, kGroup);
  if (static_cast<int64_t>(y->element_count()) != m * n ||
      (biased && static_cast<int64_t>(bias.element_count()) != n)) {
    return ffi::Error::InvalidArgument("sizes of x, bias and y do not go together");
  }
  const auto run = [&](auto kernel, int64_t along_k, bool scaled) {
    if (!Fits(panels, n, along_k) || (scaled && !Fits(scales, n, groups))) {
      return ffi::Error::InvalidArgument("panels are not those of these sizes on this processor");
    }
    p.packed = PackedMemory(m * p.even_k());
    Run<decltype(kernel)>(pool, p);
    return ffi::Error::Success();
  };
  switch (panels.element_type()) {
    case ffi::F32:
      return run(Fma<Float32Panel>(), k, false);
    case ffi::BF16:
      if (p.x.is_bfloat16) return run(Dot(), CeilDiv(k, 2), false);
      return run(Fma<BFloat16Panel>(), CeilDiv(k, 2), false);
    case ffi::S8:
      return run(Fma<Int8Panel>(), groups * kGroup, true);
    case ffi::U8:
      return run(Fma<Int4Panel>(), groups * kGroup / 2, true);
    default:
      return ffi::Error::InvalidArgument("panels must be float32, bfloat16, int8 or uint8");
  }
}

}  // namespace
}  // namespace kvlab

extern "C" __attribute__((visibility("default"))) int KvlabLanes() { return kvlab::kLanes; }

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* KvlabLinear(
    XLA_FFI_CallFrame* call_frame);

XLA_FFI_DEFINE_HANDLER_SYMBOL(KvlabLinear, kvlab::Linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>());
