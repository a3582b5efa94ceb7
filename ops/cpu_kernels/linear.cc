// y[m, n] = x[m, k] W[k, n] + bias[n] for one x and any number of W, which lie in panels of kLanes
// columns (linear_formats.h).
//
// Bits: an element of y is the sum over blocks of k, in order, of one chain of fused multiply-adds
// over a block's k, in order; the blocks follow from k alone. So a row's result depends on nothing
// but that row and the weights: not on m, its neighbours, its tile or the number of threads.
//
// Work: rows of x are cut into tiles of at most kTileRows, transposed to [k, rows] once. An item is
// two panels times some tiles: a block of the panels (32 KiB of float32) stays in the first
// cache while every tile of the item passes over it, the sums of a tile in registers. Few rows
// take four panels, and an item fetches what the next one begins with. Items run through the panels
// of all weights, so threads meet once a call, whatever the number of weights.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "linear_formats.h"
#include "linear_problem.h"
#include "linear_tile.h"
#include "parallel.h"
#include "transpose.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace kvlab {
namespace {

namespace ffi = xla::ffi;
using namespace linear;

constexpr int64_t kItemTiles = 10;
constexpr int64_t kSerialPack = 1 << 15;  // fewer numbers are not worth waking threads
const Ahead kNothing(0, INT64_MAX);       // is fetched ahead

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

template <class Panel>
Panel PanelAt(const Problem& p, Place place) {
  return Panel(place.weight->panels, place.weight->scales, p.k, place.panel);
}

// C panels from `panel` on, times tiles [first, last).
template <class Kernel, int C>
void RunItem(const Problem& p, int64_t panel, int64_t first, int64_t last) {
  using Panel = typename Kernel::Panel;
  Floats totals[kItemTiles * kTileRows * C];
  const int64_t end_k = Panel::kStep == 2 ? p.even_k() : p.k;
  const int64_t num_panels = p.num_panels();
  Place places[C];
  Panel panels[C];
  for (int c = 0; c < C; ++c) {
    places[c] = p.PlaceOf(panel + c);
    panels[c] = PanelAt<Panel>(p, places[c]);
    const int64_t next = panel + c + C;  // in the next item, of this weight or another
    if (next < num_panels) panels[c].Precede(PanelAt<Panel>(p, p.PlaceOf(next)), end_k);
  }
  const int64_t block = p.BlockSize();
  const int64_t first_row = p.FirstRow(first);
  // Later tiles find the block in the cache; the second of all fetches the next one.
  const Ahead alone(kPrefetchBytes, end_k - kPrefetchBytes / Panel::kBytes);
  const Ahead later(block * Panel::kBytes, end_k - block);
  for (int64_t begin = 0; begin < end_k; begin += block) {
    const int64_t end = std::min(begin + block, end_k);
    const auto run = [&](const auto& tiles, auto* weights, Ahead first_ahead, Ahead second_ahead) {
      for (int64_t tile = first; tile < last; ++tile) {
        const Ahead ahead =
            tile == first ? first_ahead : tile == first + 1 ? second_ahead : kNothing;
        for (int c = 0; c < C; ++c) weights[c].FetchAhead(ahead);
        const int64_t row = p.FirstRow(tile);
        const uint32_t* x = p.packed + row * (Kernel::kPairs ? p.even_k() / 2 : p.even_k());
        for (int c = 0; end == end_k && c < C; ++c) FetchToWrite(places[c], row, p.Rows(tile));
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
    for (int c = 0; c < C; ++c) StoreRow(places[c], row, totals[(row - first_row) * C + c]);
  }
}

// All panels times all rows, C panels and one of `row_blocks` an item.
template <class Kernel, int C>
void RunItems(ffi::ThreadPool& pool, const Problem& p, int64_t row_blocks) {
  const int64_t num_panels = p.num_panels();
  const int64_t wide = CeilDiv(num_panels, C);
  ParallelFor(pool, wide * row_blocks, [&p, num_panels, wide, row_blocks](int64_t item) {
    const int64_t row_block = item / wide;  // neighbours in the same rows
    const int64_t first = row_block * p.tiles() / row_blocks;
    const int64_t last = (row_block + 1) * p.tiles() / row_blocks;
    int64_t panel = item % wide * C;
    if (panel + C <= num_panels) {
      RunItem<Kernel, C>(p, panel, first, last);
    } else {
      for (; panel < num_panels; ++panel) RunItem<Kernel, 1>(p, panel, first, last);
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

// Of panels; -1 where they are none.
int64_t AlongK(ffi::DataType format, int64_t k) {
  const int64_t groups = CeilDiv(k, kGroup);
  if (format == ffi::F32) return k;
  if (format == ffi::BF16) return CeilDiv(k, 2);
  if (format == ffi::S8) return groups * kGroup;
  return format == ffi::U8 ? groups * kGroup / 2 : -1;
}

// Adds the product of p.x and a weight.
ffi::Error Add(Problem& p, const ffi::AnyBuffer& panels, const ffi::AnyBuffer& scales,
               const ffi::AnyBuffer& bias, const ffi::AnyBuffer& y) {
  if (!IsNumbers(bias) || !IsNumbers(y) || y.dimensions().size() == 0) {
    return ffi::Error::InvalidArgument("bias and y must be float32 or bfloat16");
  }
  const int64_t n = y.dimensions().back();
  const bool biased = bias.element_count() > 0;
  if (n == 0 || static_cast<int64_t>(y.element_count()) != p.m * n ||
      (biased && static_cast<int64_t>(bias.element_count()) != n)) {
    return ffi::Error::InvalidArgument("sizes of x, bias and y do not go together");
  }
  const auto format = panels.element_type();
  const bool scaled = format == ffi::S8 || format == ffi::U8;
  if (!Fits(panels, n, AlongK(format, p.k)) ||
      (scaled && !Fits(scales, n, CeilDiv(p.k, kGroup)))) {
    return ffi::Error::InvalidArgument("panels are not those of these sizes on this processor");
  }
  p.weights.push_back(
      {n, panels.untyped_data(), scales.untyped_data(), NumbersOf(bias), NumbersOf(y)});
  if (!biased) p.weights.back().bias.data = nullptr;
  return ffi::Error::Success();
}

// `weights` are panels, scales and bias of each weight; all panels have one type.
ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs weights,
                  ffi::RemainingRets results) {
  if (!IsNumbers(x) || x.dimensions().size() == 0 || x.element_count() == 0) {
    return ffi::Error::InvalidArgument("x must be float32 or bfloat16, and not empty");
  }
  if (results.empty() || weights.size() != 3 * results.size()) {
    return ffi::Error::InvalidArgument("each result wants panels, scales and a bias");
  }
  const int64_t k = x.dimensions().back();
  Problem p{static_cast<int64_t>(x.element_count()) / k, k, NumbersOf(x), {}, nullptr};
  p.weights.reserve(results.size());
  const auto format = weights.get<ffi::AnyBuffer>(0)->element_type();
  for (size_t i = 0; i < results.size(); ++i) {
    const auto panels = *weights.get<ffi::AnyBuffer>(3 * i);
    if (panels.element_type() != format) {
      return ffi::Error::InvalidArgument("panels of one call must have one type");
    }
    const ffi::Error error = Add(p, panels, *weights.get<ffi::AnyBuffer>(3 * i + 1),
                                 *weights.get<ffi::AnyBuffer>(3 * i + 2),
                                 **results.get<ffi::AnyBuffer>(i));
    if (error.failure()) return error;
  }
  p.packed = PackedMemory(p.m * p.even_k());
  if (format == ffi::F32) {
    Run<Fma<Float32Panel>>(pool, p);
  } else if (format == ffi::S8) {
    Run<Fma<Int8Panel>>(pool, p);
  } else if (format == ffi::U8) {
    Run<Fma<Int4Panel>>(pool, p);
  } else if (p.x.is_bfloat16) {
    Run<Dot>(pool, p);
  } else {
    Run<Fma<BFloat16Panel>>(pool, p);
  }
  return ffi::Error::Success();
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
                                  .RemainingArgs()
                                  .RemainingRets());
