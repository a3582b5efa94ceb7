// y[m, n] = x[m, k] W[k, n] + bias[n], W in panels of kLanes columns (linear_formats.h).
//
// Bits: an element of y is the sum over blocks of k, in order, of one chain of fused multiply-adds
// over a block's k, in order; the blocks follow from k alone. So a row's result depends on nothing
// but that row and the weights: not on m, its neighbours, its tile or the number of threads.
//
// Work: rows of x are cut into tiles of at most kTileRows, transposed to [k, rows] once. An item is
// two panels times some tiles: a block of the panels (32 KiB of float32) stays in the first
// cache while every tile of the item passes over it, the sums of a tile in registers. Few rows
// take four panels, and an item fetches what the next one begins with.

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
constexpr int kFewRows = 3;   // are a tile with more panels, or sums would wait for one another
constexpr int kFewRowsPanels = 4;
static_assert(kFewRowsPanels != kItemPanels);
constexpr int64_t kItemTiles = 10;
constexpr int64_t kBlock = 256;             // most k of one chain
constexpr int64_t kSerialPack = 1 << 15;    // fewer numbers are not worth waking threads

const Ahead kNothing(0, 0, 0);              // is fetched ahead

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
            for (int c = 0; c < C; ++c) sums[r][c] += value * weights[c][step];
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

// Rounded to nearest even, NaN kept, in the low halves.
inline UInts ToBFloat16(Floats values) {
  const UInts bits = Bits<UInts>(values);
  const UInts rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return values == values ? rounded : (bits >> 16) | 0x40u;
}

template <typename Number, typename Vector>
void StoreFirst(Number* to, Vector vector, int64_t count) {
  if (count == kLanes) {
    std::memcpy(to, &vector, sizeof vector);
  } else {
    std::memcpy(to, &vector, count * sizeof(Number));
  }
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
    StoreFirst(static_cast<uint16_t*>(p.y.data) + place, halves, columns);
  } else {
    StoreFirst(static_cast<float*>(p.y.data) + place, total, columns);
  }
}

// Fetches where rows of C panels will be stored.
template <int C>
void FetchToWrite(const Problem& p, int64_t row, int64_t rows, int64_t panel) {
  const int64_t bytes = p.y.is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
  char* y = static_cast<char*>(p.y.data) + (row * p.n + panel * kLanes) * bytes;
  for (; rows > 0; --rows, y += p.n * bytes) {
    for (int64_t i = 0; i < C * kLanes * bytes; i += 64) __builtin_prefetch(y + i, 1);
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
  // Past the end of a panel lies one of this item's; beyond those, the next item's. Later tiles
  // find the block in the cache; the second of all fetches the next one.
  const int64_t skip = (C - 1) * end_k * Panel::kBytes;
  const Ahead alone(kPrefetchBytes, end_k - kPrefetchBytes / Panel::kBytes, skip);
  const Ahead later(block * Panel::kBytes, end_k - block, skip);
  for (int64_t begin = 0; begin < end_k; begin += block) {
    const int64_t end = std::min(begin + block, end_k);
    const auto run = [&](const auto& tiles, auto* weights, Ahead first_ahead, Ahead second_ahead) {
      for (int64_t tile = first; tile < last; ++tile) {
        const Ahead ahead =
            tile == first ? first_ahead : tile == first + 1 ? second_ahead : kNothing;
        for (int c = 0; c < C; ++c) weights[c].FetchAhead(ahead);
        const int64_t row = p.FirstRow(tile);
        const uint32_t* x = p.packed + row * (Kernel::kPairs ? p.even_k() / 2 : p.even_k());
        if (end == end_k) FetchToWrite<C>(p, row, p.Rows(tile), panel);
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
        run(kTiles<Fma<Float32Panel>, C>, unpacked, kNothing, kNothing);
        continue;
      }
    }
    run(kTiles<Kernel, C>, panels, alone, later);
  }
  for (int64_t row = first_row; row < p.FirstRow(last); ++row) {
    for (int c = 0; c < C; ++c) StoreRow(p, row, panel + c, totals[(row - first_row) * C + c]);
  }
}

typedef uint32_t Words __attribute__((vector_size(16)));

template <int... kPlaces>
inline Words Shuffled(Words a, Words b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kPlaces...);
#else
  return __builtin_shuffle(a, b, Words{kPlaces...});
#endif
}

// Four rows, `stride` words apart, to four columns of an array [.., width].
inline void TransposeFour(const uint32_t* from, int64_t stride, int64_t width, uint32_t* to) {
  Words rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = LoadAs<Words>(from + i * stride);
  const Words low[2] = {Shuffled<0, 4, 1, 5>(rows[0], rows[1]),
                        Shuffled<0, 4, 1, 5>(rows[2], rows[3])};
  const Words high[2] = {Shuffled<2, 6, 3, 7>(rows[0], rows[1]),
                         Shuffled<2, 6, 3, 7>(rows[2], rows[3])};
  const Words columns[4] = {
      Shuffled<0, 1, 4, 5>(low[0], low[1]), Shuffled<2, 3, 6, 7>(low[0], low[1]),
      Shuffled<0, 1, 4, 5>(high[0], high[1]), Shuffled<2, 3, 6, 7>(high[0], high[1])};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * width, &columns[i], sizeof(Words));
}

// [rows, words], rows `stride` words apart, to [words, rows].
void Transpose(const uint32_t* from, int64_t stride, int64_t rows, int64_t words, uint32_t* to) {
  const int64_t whole = rows < 4 ? 0 : words / 4 * 4;
  for (int64_t word = 0; word < whole; word += 4) {
    for (int64_t row = 0; row < rows; row += 4) {
      const int64_t top = std::min(row, rows - 4);  // some of the last four may be written twice
      TransposeFour(from + top * stride + word, stride, rows, to + word * rows + top);
    }
  }
  for (int64_t word = whole; word < words; ++word) {
    for (int64_t row = 0; row < rows; ++row) to[word * rows + row] = from[row * stride + word];
  }
}

// All panels times all rows, C panels and one of `row_blocks` an item.
template <class Kernel, int C>
void RunItems(ffi::ThreadPool& pool, const Problem& p, int64_t row_blocks) {
  const int64_t wide = CeilDiv(p.num_panels(), C);
  ParallelFor(pool, wide * row_blocks, [&p, wide, row_blocks](int64_t item) {
    const int64_t row_block = item / wide;  // neighbours in the same rows
    const int64_t first = row_block * p.tiles() / row_blocks;
    const int64_t last = (row_block + 1) * p.tiles() / row_blocks;
    int64_t panel = item % wide * C;
    if (panel + C <= p.num_panels()) {
      RunItem<Kernel, C>(p, panel, first, last);
    } else {
      for (; panel < p.num_panels(); ++panel) RunItem<Kernel, 1>(p, panel, first, last);
    }
  });
}

// Transposes x of a tile.
template <class Kernel>
void PackTile(const Problem& p, int64_t tile) {
  const int64_t first = p.FirstRow(tile), rows = p.Rows(tile);
  const int64_t words = Kernel::kPairs ? p.even_k() / 2 : p.even_k();
  uint32_t* to = p.packed + first * words;
  if (Kernel::kPairs ? p.k % 2 == 0 : !p.x.is_bfloat16) {
    const int64_t stride = Kernel::kPairs ? words : p.k;
    const auto* from = static_cast<const uint32_t*>(p.x.data) + first * stride;
    Transpose(from, stride, rows, stride, to);
    if (stride < words) std::fill_n(to + stride * rows, rows, 0);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = (first + r) * p.k;
    for (int64_t word = 0; word < words; ++word) {
      const auto half = [&](int64_t k) -> uint32_t { return k < p.k ? p.x.HalfAt(from + k) : 0; };
      to[word * rows + r] = Kernel::kPairs ? half(2 * word) | half(2 * word + 1) << 16
                                           : half(word) << 16;
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
  if (p.m <= kFewRows) {
    RunItems<Kernel, kFewRowsPanels>(pool, p, 1);
  } else {
    RunItems<Kernel, kItemPanels>(pool, p, CeilDiv(tiles, kItemTiles));
  }
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
