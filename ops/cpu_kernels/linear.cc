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
const Ahead kNothing(0, 0, 0);            // is fetched ahead

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
