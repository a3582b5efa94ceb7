// The arithmetic of attention on a tile: a few rows of queries against a block of 64 keys.
//
// A row is one query of one head. All that is computed of a row is independent of the other rows of
// its tile: a score is summed over h in order, in a lane of its own; the maximum moves once a
// block; the weighted sum adds keys in order. So a row has the same bits in every tile.
#pragma once

#include <cstdint>
#include <limits>

#include "exponential.h"
#include "vectors.h"

namespace kvlab {

constexpr int kBlock = 64;  // keys; READ_BLOCK of ops/attention.py
constexpr int kBlockVectors = kBlock / kLanes;
constexpr int kTileRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileVectors = 4;  // 6 x 4 sums, 4 operands and a broadcast fill 32 registers
#else
constexpr int kTileVectors = 2;
#endif

constexpr int kLineFloats = 16;  // of a cache line
constexpr int kLineVectors = kLineFloats / kLanes;

// Functions whose inner loop takes every register: inlined they would spill some.
#define KVLAB_APART __attribute__((noinline))

constexpr float kMasked = -1e30f;  // _MASKED and _LEAST of ops/attention.py
constexpr float kLeast = -1e25f;
constexpr int32_t kNowhere = std::numeric_limits<int32_t>::max();  // position of an absent key

// A block of keys and values as floats, wherever they lie.
struct Block {
  const float* keys[kBlockVectors];  // vector j of row h is at keys[j] + h * key_stride
  const float* next_keys[kBlockVectors];  // of the block after it, to be fetched early; or null
  int64_t key_stride;
  const float* values[kBlock];  // H floats, and zeros up to a whole vector
  const float* key_scale;       // [64], or null
  const float* value_scale;     // [64], or null
  int32_t positions[kBlock];    // kNowhere for an absent key
  int32_t oldest, newest;       // of the positions that are somewhere
  int32_t count;                // keys from here on are absent
  bool whole;                   // no key is absent
};

// The rows of one tile, and their running softmax.
struct Rows {
  const float* queries;  // [H, rows], scaled
  const int32_t* first;  // [rows], positions that a row sees; first > last for none
  const int32_t* last;   // [rows]
  float* maximum;        // [rows]
  float* normaliser;     // [rows]
  float* total;          // [rows, width]
};

struct Sizes {
  int64_t head_dim;
  int64_t width;  // head_dim in whole vectors
  float soft_cap;
};

// scores[row, 64] = queries . keys. With kFetch, the values come nearer meanwhile.
template <int R, bool kFetch>
KVLAB_APART void Scores(const Rows& rows, const Block& block, const Sizes& sizes, float* scores) {
  for (int column = 0; column < kBlockVectors; column += kTileVectors) {
    Floats sum[R][kTileVectors] = {};
    for (int64_t h = 0; h < sizes.head_dim; ++h) {
      Floats keys[kTileVectors];
      for (int j = 0; j < kTileVectors; ++j) {
        keys[j] = Load(block.keys[column + j] + h * block.key_stride);
      }
      for (int r = 0; r < R; ++r) {
        const Floats query = Broadcast(rows.queries[h * R + r]);
        for (int j = 0; j < kTileVectors; ++j) sum[r][j] = MultiplyAdd(query, keys[j], sum[r][j]);
      }
      if (kFetch && column == 0) {
        for (int64_t s = h; s < kBlock; s += sizes.head_dim) {
          for (int64_t i = 0; i < sizes.width; i += kLineFloats) {
            __builtin_prefetch(block.values[s] + i);
          }
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < kTileVectors; ++j) {
        Store(scores + r * kBlock + (column + j) * kLanes, sum[r][j]);
      }
    }
  }
}

// total[row, from vector `column`] = total * rescale + weights . values, over `count` keys. With
// kFetch, the keys of the next block come nearer meanwhile.
template <int R, int C, bool kFetch>
KVLAB_APART void WeightedSum(const Block& block, const float* weights, const float* rescale, int count,
                        const Sizes& sizes, int64_t column, float* total) {
  Floats sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) {
      sum[r][j] = Load(total + r * sizes.width + column + j * kLanes) * Broadcast(rescale[r]);
    }
  }
  for (int s = 0; s < count; ++s) {
    Floats values[C];
    for (int j = 0; j < C; ++j) values[j] = Load(block.values[s] + column + j * kLanes);
    for (int r = 0; r < R; ++r) {
      const Floats weight = Broadcast(weights[r * kBlock + s]);
      for (int j = 0; j < C; ++j) sum[r][j] = MultiplyAdd(weight, values[j], sum[r][j]);
    }
    if (kFetch) {
      for (int64_t h = s; h < sizes.head_dim; h += kBlock) {
        for (int j = 0; j < kBlockVectors; j += kLineVectors) {
          __builtin_prefetch(block.next_keys[j] + h * block.key_stride);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) Store(total + r * sizes.width + column + j * kLanes, sum[r][j]);
  }
}

// What a score becomes before the softmax: scaled by its key's scale, capped, masked.
inline Floats Adjusted(Floats score, const Block& block, int at, const Rows& rows, int row,
                       float soft_cap) {
  if (block.key_scale != nullptr) score *= Load(block.key_scale + at);
  if (soft_cap > 0) score = Broadcast(soft_cap) * Tanh(score / Broadcast(soft_cap));
  Ints positions;
  std::memcpy(&positions, block.positions + at, sizeof positions);
  const auto seen = (positions >= rows.first[row]) & (positions <= rows.last[row]);
  return seen ? score : Broadcast(kMasked);
}

// Scores of one row to weights; moves its maximum and normaliser. Gives the factor on its total.
// Unrolled, because scores and constants are to stay in registers.
template <bool kAdjust>
inline float Soften(const Rows& rows, int row, const Block& block, float soft_cap, float* scores) {
  Floats score[kBlockVectors];
  Floats highest = Broadcast(kMasked);
#pragma GCC unroll 16
  for (int j = 0; j < kBlockVectors; ++j) {
    score[j] = Load(scores + j * kLanes);
    if (kAdjust) score[j] = Adjusted(score[j], block, j * kLanes, rows, row, soft_cap);
    highest = Max(score[j], highest);
  }
  const float before = rows.maximum[row];
  const float here = MaxOf(highest);
  const float maximum = here > before ? here : before;
  const float rescale = here > before ? Exp(Broadcast(before - maximum))[0] : 1.0f;
  Floats sum = {};
#pragma GCC unroll 16
  for (int j = 0; j < kBlockVectors; ++j) {
    Floats weight = Exp(score[j] - Broadcast(maximum));
    sum += weight;
    if (kAdjust && block.value_scale != nullptr) weight *= Load(block.value_scale + j * kLanes);
    Store(scores + j * kLanes, weight);
  }
  rows.maximum[row] = maximum;
  rows.normaliser[row] = rows.normaliser[row] * rescale + SumOf(sum);
  return rescale;
}

inline void SoftenRows(const Rows& rows, int count, const Block& block, float soft_cap,
                       float* scores, float* rescale) {
  const bool plain = block.whole && block.key_scale == nullptr && soft_cap == 0;
  for (int row = 0; row < count; ++row) {
    const bool all = rows.first[row] <= block.oldest && block.newest <= rows.last[row];
    float* at = scores + row * kBlock;
    rescale[row] = plain && all ? Soften<false>(rows, row, block, soft_cap, at)
                                : Soften<true>(rows, row, block, soft_cap, at);
  }
}

// One block's share of a tile of R rows, of which none sees a key from `count` on.
template <int R, bool kFetch>
void AttendRows(const Rows& rows, const Block& block, int count, const Sizes& sizes) {
  alignas(kVectorBytes) float scores[R * kBlock];
  float rescale[R];
  Scores<R, kFetch>(rows, block, sizes, scores);
  SoftenRows(rows, R, block, sizes.soft_cap, scores, rescale);
  int64_t column = 0;
  constexpr int kWide = kTileVectors * kLanes;
  if (sizes.width >= kWide) {
    WeightedSum<R, kTileVectors, kFetch>(block, scores, rescale, count, sizes, 0, rows.total);
    column = kWide;
  }
  for (; column + kWide <= sizes.width; column += kWide) {
    WeightedSum<R, kTileVectors, false>(block, scores, rescale, count, sizes, column, rows.total);
  }
  for (; column < sizes.width; column += kLanes) {
    WeightedSum<R, 1, false>(block, scores, rescale, count, sizes, column, rows.total);
  }
}

template <bool kFetch>
inline void Attend(int num_rows, const Rows& rows, const Block& block, int count,
                   const Sizes& sizes) {
  static_assert(kTileRows == 6, "one case for each number of rows");
  switch (num_rows) {
    case 1: return AttendRows<1, kFetch>(rows, block, count, sizes);
    case 2: return AttendRows<2, kFetch>(rows, block, count, sizes);
    case 3: return AttendRows<3, kFetch>(rows, block, count, sizes);
    case 4: return AttendRows<4, kFetch>(rows, block, count, sizes);
    case 5: return AttendRows<5, kFetch>(rows, block, count, sizes);
    default: return AttendRows<6, kFetch>(rows, block, count, sizes);
  }
}

}  // namespace kvlab
