// A product y = x W + bias (linear.cc): its arrays, how it is cut, and where its rows are stored.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

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
inline void StoreRow(const Problem& p, int64_t row, int64_t panel, Floats total) {
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

}  // namespace kvlab::linear
