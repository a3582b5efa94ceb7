// Where keys and values are stored, and how a row's blocks are read from there.
//
// Axes: B rows of the step, T queries, N query heads, K KV heads, G = N / K, H head size, n units
// (pages, or rows of a contiguous cache), p slots of a unit, U units of a row. Keys lie as
// [n, K, H, p], values as [n, K, p, H]; slot s of row b is at offset s % p of units[b, s / p].
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "attention_tile.h"
#include "storage.h"
#include "vectors.h"

namespace kvlab {

enum class Storage { kFloat32, kBFloat16, kFloat8E4M3, kInt8, kInt4 };

struct Problem {
  int64_t batch, queries, heads, kv_heads, groups, head_dim;  // B, T, N, K, G, H
  int64_t units, unit_size, row_units, slots;                 // n, p, U, slots of a row
  Storage storage;
  bool bfloat16_queries;
  const void* query;               // [B, T, N, H]
  const char* keys;                // [n, K, H or H / 2, p]
  const char* values;              // [n, K, p, H or H / 2]
  const float* key_scale;          // [n, K, 1, p], or null
  const float* value_scale;        // [n, K, p, 1], or null
  const int32_t* row_unit;         // [B, U]
  const int32_t* lengths;          // [B]
  const int32_t* key_positions;    // [B, slots], or null where a slot is a position
  const int32_t* query_positions;  // [B, T]
  const bool* query_valid;         // [B, T]
  float scale, soft_cap;           // no soft cap: 0
  int64_t window;                  // none: 0
  void* output;                    // [B, T, N, H]
  float* log_normaliser;           // [B, K, G, T]

  int64_t CodeBytes() const {
    return storage == Storage::kFloat32 ? 4 : storage == Storage::kBFloat16 ? 2 : 1;
  }
  int64_t CodesPerHead() const { return storage == Storage::kInt4 ? head_dim / 2 : head_dim; }
  int64_t Width() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
  bool DirectKeys() const { return storage == Storage::kFloat32 && unit_size % kLanes == 0; }
  bool DirectValues() const { return storage == Storage::kFloat32 && head_dim == Width(); }
};

// Memory of one thread, kept from item to item and from call to call.
class Scratch {
 public:
  // Room for `floats`, aligned to a vector; what was there before is gone.
  void Begin(int64_t floats) {
    if (static_cast<int64_t>(room_.size()) < floats + kLanes) room_.resize(floats + kLanes);
    const auto at = reinterpret_cast<uintptr_t>(room_.data());
    next_ = room_.data() + (kVectorBytes - at % kVectorBytes) % kVectorBytes / sizeof(float);
  }
  float* Take(int64_t floats) {
    float* taken = next_;
    next_ += (floats + kLanes - 1) / kLanes * kLanes;
    return taken;
  }

 private:
  std::vector<float> room_;
  float* next_ = nullptr;
};

// Codes as floats; those of the second half of int4 go to `high`.
inline void ConvertStored(Storage storage, const Codes& codes, float* high) {
  switch (storage) {
    case Storage::kFloat32: return Convert<Float32>(codes);
    case Storage::kBFloat16: return Convert<BFloat16>(codes);
    case Storage::kFloat8E4M3: return Convert<Float8E4M3>(codes);
    case Storage::kInt8: return Convert<Int8>(codes);
    case Storage::kInt4: return ConvertHalves(codes, high);
  }
}

// Blocks of one row and KV head, one at a time; converts what cannot be read where it lies.
class Reader {
 public:
  static int64_t Room(const Problem& problem) {
    return kBlock * problem.head_dim + (kBlock + 1) * problem.Width() + 2 * kBlock;
  }

  Reader(const Problem& problem, int64_t row, int64_t kv_head, Scratch& room)
      : problem_(problem), row_(row), kv_head_(kv_head) {
    keys_ = room.Take(kBlock * problem.head_dim);
    values_ = room.Take(kBlock * problem.Width());
    zeros_ = room.Take(problem.Width());
    key_scale_ = room.Take(kBlock);
    value_scale_ = room.Take(kBlock);
    std::fill_n(zeros_, problem.Width(), 0.0f);
    if (!problem.DirectValues()) std::fill_n(values_, kBlock * problem.Width(), 0.0f);
    const int64_t mapped = problem.units == 0 ? 0 : problem.row_units * problem.unit_size;
    end_ = std::clamp<int64_t>(problem.lengths[row], 0, std::min(mapped, problem.slots));
    block_.key_scale = problem.key_scale == nullptr ? nullptr : key_scale_;
    block_.value_scale = problem.value_scale == nullptr ? nullptr : value_scale_;
    block_.key_stride = problem.DirectKeys() ? problem.unit_size : kBlock;
    for (int j = 0; j < kBlockVectors; ++j) block_.keys[j] = keys_ + j * kLanes;
  }

  int64_t end() const { return end_; }  // slots from here on are empty

  // The block of slots from `start`, of which those from `end` on are left out.
  const Block& Read(int64_t start, int64_t end) {
    end = std::min(end, end_);
    block_.count = static_cast<int32_t>(std::min<int64_t>(end - start, kBlock));
    block_.whole = block_.count == kBlock;
    Place(start);
    for (int at = 0; at < block_.count;) at += ReadRun(start, at);
    if (!block_.whole) HideAbsent();
    if (problem_.DirectKeys()) {
      PlaceKeys(start, block_.count, block_.keys);
      const int64_t next = std::clamp<int64_t>(end - start - kBlock, 0, kBlock);
      PlaceKeys(start + kBlock, next, block_.next_keys);
    }
    return block_;
  }

 private:
  // Positions of the block's slots, and the range that they span.
  void Place(int64_t start) {
    const int32_t from = static_cast<int32_t>(start);
    if (problem_.key_positions == nullptr) {
      for (int s = 0; s < kBlock; ++s) block_.positions[s] = from + s;
      block_.oldest = from;
      block_.newest = from + block_.count - 1;
    } else {
      const int32_t* at = problem_.key_positions + row_ * problem_.slots + start;
      std::copy_n(at, block_.count, block_.positions);
      block_.oldest = kNowhere;
      block_.newest = std::numeric_limits<int32_t>::min();
      for (int s = 0; s < block_.count; ++s) {
        if (at[s] == kNowhere) {
          block_.whole = false;
          continue;
        }
        block_.oldest = std::min(block_.oldest, at[s]);
        block_.newest = std::max(block_.newest, at[s]);
      }
    }
    std::fill(block_.positions + block_.count, block_.positions + kBlock, kNowhere);
  }

  // The KV head's place among those of all units, at a slot; -1 where no unit is mapped.
  int64_t Head(int64_t slot) const {
    const int64_t place = row_ * problem_.row_units + slot / problem_.unit_size;
    const int64_t unit = problem_.row_unit[place];
    return 0 <= unit && unit < problem_.units ? unit * problem_.kv_heads + kv_head_ : -1;
  }

  // Reads the slots of a block from `at` that lie side by side in a unit, and tells how many.
  int ReadRun(int64_t start, int at) {
    const Problem& problem = problem_;
    const int64_t in_unit = (start + at) % problem.unit_size;
    const int64_t left = problem.unit_size - in_unit;
    const int run = static_cast<int>(std::min<int64_t>(block_.count - at, left));
    const int64_t head = Head(start + at);
    if (head < 0) {
      std::fill_n(block_.positions + at, run, kNowhere);
      block_.whole = false;
      return run;
    }
    const int64_t codes = problem.CodesPerHead(), size = problem.unit_size;
    const int64_t width = problem.Width(), bytes = problem.CodeBytes();
    // The same slots of the next block, to be fetched early.
    const int64_t next_slot = start + at + kBlock, next_in_unit = next_slot % size;
    const int64_t mapped = next_slot < end_ ? Head(next_slot) : -1;
    const bool fetch = mapped >= 0;
    const int64_t next_head = fetch ? mapped : head;
    if (!problem.DirectKeys()) {
      const char* from = problem.keys + (head * codes * size + in_unit) * bytes;
      const char* next = problem.keys + (next_head * codes * size + next_in_unit) * bytes;
      float* to = keys_ + at;
      const Codes stored = {from, fetch ? next : nullptr, codes, run, size, to, kBlock};
      ConvertStored(problem.storage, stored, to + codes * kBlock);
    }
    const char* from = problem.values + (head * size + in_unit) * codes * bytes;
    const float* row = reinterpret_cast<const float*>(from);
    if (!problem.DirectValues()) {
      const char* next = problem.values + (next_head * size + next_in_unit) * codes * bytes;
      float* to = values_ + at * width;
      const Codes stored = {from, fetch ? next : nullptr, run, codes, codes, to, width};
      ConvertStored(problem.storage, stored, to + codes);
      row = to;
    }
    for (int s = 0; s < run; ++s) block_.values[at + s] = row + s * width;
    if (problem.key_scale != nullptr) {
      std::copy_n(problem.key_scale + head * size + in_unit, run, key_scale_ + at);
      std::copy_n(problem.value_scale + head * size + in_unit, run, value_scale_ + at);
    }
    return run;
  }

  // A slot that nobody may see can hold anything, NaN included: 0 x NaN must not reach a sum.
  void HideAbsent() {
    for (int s = 0; s < kBlock; ++s) {
      if (block_.positions[s] != kNowhere) continue;
      block_.values[s] = zeros_;
      key_scale_[s] = value_scale_[s] = 0.0f;
    }
  }

  // Where the vectors of keys of `count` slots from `start` lie. A whole vector lies in a unit, its
  // slots past `count` included. Those are masked, and so are whole vectors of them, and of units
  // that are not mapped: they may be read anywhere.
  void PlaceKeys(int64_t start, int64_t count, const float** keys) const {
    const auto* pool = reinterpret_cast<const float*>(problem_.keys);
    for (int j = 0; j < kBlockVectors; ++j) {
      keys[j] = pool;
      if (j * kLanes >= count) continue;
      const int64_t slot = start + j * kLanes, head = Head(slot);
      if (head < 0) continue;
      keys[j] += head * problem_.head_dim * problem_.unit_size + slot % problem_.unit_size;
    }
  }

  const Problem& problem_;
  const int64_t row_, kv_head_;
  float *keys_, *values_, *zeros_, *key_scale_, *value_scale_;
  int64_t end_;
  Block block_ = {};
};

}  // namespace kvlab
