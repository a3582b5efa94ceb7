// Products y = x W + bias of one x (linear.cc): their arrays, how they are cut, and where rows are
// stored.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "linear_formats.h"
#include "vectors.h"

namespace kvlab::linear {

// Sums of a tile fill 24 of 32 registers, or 12 of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 6;
#endif
constexpr int kItemPanels = 2;
constexpr int kFewRows = 3;  // are a tile with more panels, or sums would wait for one another
constexpr int kFewRowsPanels = 4;
static_assert(kFewRowsPanels != kItemPanels);
constexpr int64_t kBlock = 256;  // most k of one chain

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

// A weight [k, n], and what it gives.
struct Weight {
  int64_t n;
  const void* panels;
  const void* scales;
  Numbers bias, y;  // bias.data is null where there is none

  int64_t num_panels() const { return CeilDiv(n, kLanes); }
};

// A panel of one of the weights.
struct Place {
  const Weight* weight;
  int64_t panel;
};

struct Problem {
  int64_t m, k;
  Numbers x;
  std::vector<Weight> weights;
  uint32_t* packed;  // x of each tile: [even k, rows] float32, or [even k / 2, rows] bfloat16 pairs

  // Panels are counted through all weights.
  int64_t num_panels() const {
    int64_t count = 0;
    for (const Weight& weight : weights) count += weight.num_panels();
    return count;
  }
  Place PlaceOf(int64_t panel) const {
    const Weight* weight = weights.data();
    for (; panel >= weight->num_panels(); ++weight) panel -= weight->num_panels();
    return {weight, panel};
  }
  int64_t tiles() const { return CeilDiv(m, kTileRows); }
  int64_t even_k() const { return k + k % 2; }
  int64_t FirstRow(int64_t tile) const { return tile * m / tiles(); }
  int64_t Rows(int64_t tile) const { return FirstRow(tile + 1) - FirstRow(tile); }
  // Of k: blocks alike, in whole groups.
  int64_t BlockSize() const {
    return CeilDiv(CeilDiv(k, CeilDiv(k, kBlock)), kGroup) * kGroup;
  }
};

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
inline void StoreRow(Place place, int64_t row, Floats total) {
  const Weight& w = *place.weight;
  const int64_t column = place.panel * kLanes;
  const int64_t columns = std::min<int64_t>(kLanes, w.n - column);
  if (w.bias.data != nullptr) {
    float bias[kLanes] = {};
    for (int64_t i = 0; i < columns; ++i) bias[i] = w.bias.At(column + i);
    total += Load(bias);
  }
  const int64_t first = row * w.n + column;
  if (w.y.is_bfloat16) {
    const Halves halves = __builtin_convertvector(ToBFloat16(total), Halves);
    StoreFirst(static_cast<uint16_t*>(w.y.data) + first, halves, columns);
  } else {
    StoreFirst(static_cast<float*>(w.y.data) + first, total, columns);
  }
}

// Fetches where rows of a panel will be stored.
inline void FetchToWrite(Place place, int64_t row, int64_t rows) {
  const Weight& w = *place.weight;
  const int64_t bytes = w.y.is_bfloat16 ? sizeof(uint16_t) : sizeof(float);
  const char* y = static_cast<char*>(w.y.data) + (row * w.n + place.panel * kLanes) * bytes;
  for (; rows > 0; --rows, y += w.n * bytes) __builtin_prefetch(y, 1);
}

}  // namespace kvlab::linear
