// Some queries of one row and KV head: the unit of work of attention. Axes as in attention_pool.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "attention_pool.h"
#include "attention_tile.h"
#include "storage.h"
#include "vectors.h"

namespace kvlab {

inline float ToFloat(uint16_t bfloat16) { return As<float>(static_cast<uint32_t>(bfloat16) << 16); }

inline uint16_t ToBFloat16(float value) {
  const auto bits = As<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Some queries of one row, for the heads of one KV head: their rows are (query, head of the group).
class Item {
 public:
  static int64_t Room(const Problem& problem, int64_t num_queries) {
    const int64_t rows = num_queries * problem.groups;
    return Reader::Room(problem) + rows * (problem.head_dim + problem.Width() + 6) + 16 * kLanes;
  }

  Item(const Problem& problem, int64_t row, int64_t kv_head, int64_t first_query,
       int64_t num_queries, Scratch& room)
      : problem_(problem), row_(row), kv_head_(kv_head), first_query_(first_query),
        num_rows_(num_queries * problem.groups),
        num_tiles_((num_rows_ + kTileRows - 1) / kTileRows),
        sizes_{problem.head_dim, problem.Width(), problem.soft_cap},
        reader_(problem, row, kv_head, room) {
    queries_ = room.Take(num_rows_ * problem.head_dim);
    total_ = room.Take(num_rows_ * problem.Width());
    maximum_ = room.Take(num_rows_);
    normaliser_ = room.Take(num_rows_);
    first_ = reinterpret_cast<int32_t*>(room.Take(num_rows_));
    last_ = reinterpret_cast<int32_t*>(room.Take(num_rows_));
    std::fill_n(total_, num_rows_ * problem.Width(), 0.0f);
    std::fill_n(maximum_, num_rows_, kLeast);
    std::fill_n(normaliser_, num_rows_, 0.0f);
    for (int64_t r = 0; r < num_rows_; ++r) Look(r);
    for (int64_t tile = 0; tile < num_tiles_; ++tile) Pack(tile);
  }

  void Run() {
    const int32_t oldest = *std::min_element(first_, first_ + num_rows_);
    const int32_t newest = *std::max_element(last_, last_ + num_rows_);
    int64_t start = 0, end = reader_.end();
    if (problem_.key_positions == nullptr) {
      start = std::max<int64_t>(oldest, 0) / kBlock * kBlock;
      end = std::min<int64_t>(end, static_cast<int64_t>(newest) + 1);
    }
    for (; start < end; start += kBlock) {
      const Block& block = reader_.Read(start, end);
      if (block.newest < oldest || block.oldest > newest) continue;
      bool first = problem_.DirectKeys() && problem_.DirectValues();
      for (int64_t tile = 0; tile < num_tiles_; ++tile) first &= !AttendTile(tile, block, first);
    }
    for (int64_t r = 0; r < num_rows_; ++r) Finish(r);
  }

 private:
  int64_t TileBegin(int64_t tile) const { return num_rows_ * tile / num_tiles_; }

  // What a row may see: positions from `first` to `last`, none where first > last.
  void Look(int64_t r) {
    const int64_t at = row_ * problem_.queries + first_query_ + r / problem_.groups;
    const int64_t position = problem_.query_positions[at];
    const int64_t least = std::numeric_limits<int32_t>::min();
    const bool blind = !problem_.query_valid[at] || position == kNowhere;
    const int64_t oldest =
        problem_.window == 0 ? least : std::max(least, position - problem_.window + 1);
    first_[r] = blind ? kNowhere : static_cast<int32_t>(oldest);
    last_[r] = static_cast<int32_t>(blind ? least : position);
  }

  // Puts a tile's queries side by side, [H, rows].
  void Pack(int64_t tile) {
    const int64_t begin = TileBegin(tile), rows = TileBegin(tile + 1) - begin;
    float* to = queries_ + begin * problem_.head_dim;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = Place(begin + r);
      for (int64_t h = 0; h < problem_.head_dim; ++h) {
        const float value = problem_.bfloat16_queries
                                ? ToFloat(static_cast<const uint16_t*>(problem_.query)[from + h])
                                : static_cast<const float*>(problem_.query)[from + h];
        to[h * rows + r] = value * problem_.scale;
      }
    }
  }

  // Where a row's query, and its output, begins.
  int64_t Place(int64_t r) const {
    const int64_t query = first_query_ + r / problem_.groups;
    const int64_t head = kv_head_ * problem_.groups + r % problem_.groups;
    return ((row_ * problem_.queries + query) * problem_.heads + head) * problem_.head_dim;
  }

  // Whether the block has a key for the tile; if so, takes it in.
  bool AttendTile(int64_t tile, const Block& block, bool fetch) {
    const int64_t begin = TileBegin(tile), end = TileBegin(tile + 1);
    const int32_t oldest = *std::min_element(first_ + begin, first_ + end);
    const int32_t newest = *std::max_element(last_ + begin, last_ + end);
    if (block.newest < oldest || block.oldest > newest) return false;
    const Rows rows = {queries_ + begin * problem_.head_dim, first_ + begin, last_ + begin,
                       maximum_ + begin, normaliser_ + begin, total_ + begin * sizes_.width};
    int count = block.count;
    if (problem_.key_positions == nullptr) {
      count = static_cast<int>(std::min<int64_t>(count, int64_t{newest} - block.oldest + 1));
    }
    const int size = static_cast<int>(end - begin);
    if (fetch) {
      Attend<true>(size, rows, block, count, sizes_);
    } else {
      Attend<false>(size, rows, block, count, sizes_);
    }
    return true;
  }

  void Finish(int64_t r) {
    const int64_t to = Place(r);
    const float normaliser = normaliser_[r] == 0.0f ? 1.0f : normaliser_[r];
    const float* total = total_ + r * problem_.Width();
    for (int64_t h = 0; h < problem_.head_dim; ++h) {
      const float value = total[h] / normaliser;
      if (problem_.bfloat16_queries) {
        static_cast<uint16_t*>(problem_.output)[to + h] = ToBFloat16(value);
      } else {
        static_cast<float*>(problem_.output)[to + h] = value;
      }
    }
    const int64_t query = first_query_ + r / problem_.groups;
    const int64_t group = kv_head_ * problem_.groups + r % problem_.groups;
    problem_.log_normaliser[(row_ * problem_.heads + group) * problem_.queries + query] =
        maximum_[r] + std::log(normaliser);
  }

  const Problem& problem_;
  const int64_t row_, kv_head_, first_query_, num_rows_, num_tiles_;
  const Sizes sizes_;
  Reader reader_;
  float *queries_, *total_, *maximum_, *normaliser_;
  int32_t *first_, *last_;
};

}  // namespace kvlab
