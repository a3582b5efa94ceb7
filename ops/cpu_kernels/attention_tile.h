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

constexpr float kMasked = -1e30f;  // _MASKED and _LEAST of ops/attention.py
constexpr float kLeast = -1e25f;
constexpr int32_t kNowhere = std::numeric_limits<int32_t>::max();  // position of an absent key

// A block of keys and values as floats, wherever they lie.
struct Block {
  const float* keys[kBlockVectors];  // vector j of row h is at keys[j] + h * key_stride
  int64_t key_stride;
  const float* values[kBlock];     // H floats, and zeros up to a whole vector
  const float* key_scale;          // [64], or null
  const float* value_scale;        // [64], or null
  int32_t positions[kBlock];       // kNowhere for an absent key
  int32_t oldest, newest;          // of the positions that are somewhere
  int32_t count;                   // keys from here on are absent
  bool whole;                      // no key is absent
};

// The rows of one tile, and their running softmax.
struct Rows {
  const float* queries;              // [H, rows], scaled
  int32_t first[kTileRows];          // positions that a row sees, first > last for none
  int32_t last[kTileRows];
  float* maximum;                    // [rows]
  float* normaliser;                 // [rows]
  float* total;                      // [rows, width]
};

// scores[row, 64] = queries . keys
template <int R>
inline void Scores(const Rows& rows, const Block& block, int64_t head_dim, float* scores) {
  for (int column = 0; column < kBlockVectors; column += kTileVectors) {
    Floats sum[R][kTileVectors] = {};
    for (int64_t h = 0; h < head_dim; ++h) {
      Floats keys[kTileVectors];
      for (int j = 0; j < kTileVectors; ++j) {
        keys[j] = Load(block.keys[column + j] + h * block.key_stride);
      }
      for (int r = 0; r < R; ++r) {
        const Floats query = Broadcast(rows.queries[h * R + r]);
        for (int j = 0; j < kTileVectors; ++j) sum[r][j] += query * keys[j];
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < kTileVectors; ++j) {
        Store(scores + r * kBlock + (column + j) * kLanes, sum[r][j]);
      }
    }
  }
}

// total[row, from vector `column`] = total * rescale + weights . values
template <int R, int C>
inline void WeightedSum(const Block& block, const float* weights, const float* rescale, int count,
                        int64_t column, int64_t width, float* total) {
  Floats sum[R][C];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) {
      sum[r][j] = Load(total + r * width + column + j * kLanes) * Broadcast(rescale[r]);
    }
  }
  for (int s = 0; s < count; ++s) {
    Floats values[C];
    for (int j = 0; j < C; ++j) values[j] = Load(block.values[s] + column + j * kLanes);
    for (int r = 0; r < R; ++r) {
      const Floats weight = Broadcast(weights[r * kBlock + s]);
      for (int j = 0; j < C; ++j) sum[r][j] += weight * values[j];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) Store(total + r * width + column + j * kLanes, sum[r][j]);
  }
}

inline Floats Masked(Floats scores, const int32_t* positions, int32_t first, int32_t last) {
  Ints at;
  std::memcpy(&at, positions, sizeof at);
  return ((at >= first) & (at <= last)) ? scores : Broadcast(kMasked);
}

// Scores of one row to weights; moves its maximum and normaliser. Gives the factor on its total.
inline float Soften(const Rows& rows, int row, const Block& block, float soft_cap, float* scores) {
  const int32_t first = rows.first[row], last = rows.last[row];
  const bool all = block.whole && first <= block.oldest && block.newest <= last;
  Floats score[kBlockVectors];
  Floats highest = Broadcast(kMasked);
  for (int j = 0; j < kBlockVectors; ++j) {
    score[j] = Load(scores + j * kLanes);
    if (block.key_scale != nullptr) score[j] *= Load(block.key_scale + j * kLanes);
    if (soft_cap > 0) score[j] = Broadcast(soft_cap) * Tanh(score[j] / Broadcast(soft_cap));
    if (!all) score[j] = Masked(score[j], block.positions + j * kLanes, first, last);
    highest = Max(score[j], highest);
  }
  const float before = rows.maximum[row];
  const float maximum = MaxOf(highest) > before ? MaxOf(highest) : before;
  const float rescale = maximum == before ? 1.0f : Exp(Broadcast(before - maximum))[0];
  Floats sum = {};
  for (int j = 0; j < kBlockVectors; ++j) {
    Floats weight = Exp(score[j] - Broadcast(maximum));
    sum += weight;
    if (block.value_scale != nullptr) weight *= Load(block.value_scale + j * kLanes);
    Store(scores + j * kLanes, weight);
  }
  rows.maximum[row] = maximum;
  rows.normaliser[row] = rows.normaliser[row] * rescale + SumOf(sum);
  return rescale;
}

// One block's share of a tile of R rows.
template <int R>
void AttendRows(const Rows& rows, const Block& block, int64_t head_dim, int64_t width,
                float soft_cap) {
  alignas(kVectorBytes) float scores[R * kBlock];
  float rescale[R];
  Scores<R>(rows, block, head_dim, scores);
  for (int r = 0; r < R; ++r) {
    rescale[r] = Soften(rows, r, block, soft_cap, scores + r * kBlock);
  }
  int64_t column = 0;
  for (; column + kTileVectors * kLanes <= width; column += kTileVectors * kLanes) {
    WeightedSum<R, kTileVectors>(block, scores, rescale, block.count, column, width, rows.total);
  }
  for (; column < width; column += kLanes) {
    WeightedSum<R, 1>(block, scores, rescale, block.count, column, width, rows.total);
  }
}

inline void Attend(int num_rows, const Rows& rows, const Block& block, int64_t head_dim,
                   int64_t width, float soft_cap) {
  static_assert(kTileRows == 6, "one case for each number of rows");
  switch (num_rows) {
    case 1: return AttendRows<1>(rows, block, head_dim, width, soft_cap);
    case 2: return AttendRows<2>(rows, block, head_dim, width, soft_cap);
    case 3: return AttendRows<3>(rows, block, head_dim, width, soft_cap);
    case 4: return AttendRows<4>(rows, block, head_dim, width, soft_cap);
    case 5: return AttendRows<5>(rows, block, head_dim, width, soft_cap);
    default: return AttendRows<6>(rows, block, head_dim, width, soft_cap);
  }
}

}  // namespace kvlab
