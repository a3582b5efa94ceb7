// Attention straight from stored keys and values, by an online softmax over blocks of 64 keys.
//
// Axes: B rows of the step, T queries, N query heads, K KV heads, G = N / K, H head size, n units
// (pages, or rows of a contiguous cache), p slots of a unit, U units of a row. Keys lie as
// [n, K, H, p], values as [n, K, p, H]; slot s of row b is at offset s % p of units[b, s / p].
//
// The work is cut into items (row, KV head, some queries). What is computed for one query of one
// head depends on that query and the keys it sees: blocks begin at multiples of 64 slots, whatever
// the pages, and a block that it does not see changes nothing. So how items are cut, and which
// thread takes which, is free.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention_tile.h"
#include "exponential.h"
#include "parallel.h"
#include "storage.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace kvlab {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kItemRows = 96;  // query rows of an item, which share each conversion of a block

enum class Storage { kFloat32, kBFloat16, kFloat8E4M3, kInt8, kInt4 };

struct Problem {
  int64_t batch, queries, heads, kv_heads, groups, head_dim;  // B, T, N, K, G, H
  int64_t units, unit_size, row_units, slots;                 // n, p, U, slots of a row
  Storage storage;
  bool bfloat16_queries;
  const void* query;             // [B, T, N, H]
  const char* keys;              // [n, K, H or H / 2, p]
  const char* values;            // [n, K, p, H or H / 2]
  const float* key_scale;        // [n, K, 1, p], or null
  const float* value_scale;      // [n, K, p, 1], or null
  const int32_t* row_unit;       // [B, U]
  const int32_t* lengths;        // [B]
  const int32_t* key_positions;  // [B, slots], or null where a slot is a position
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

thread_local Scratch scratch;

float ToFloat(uint16_t bfloat16) { return As<float>(static_cast<uint32_t>(bfloat16) << 16); }

uint16_t ToBFloat16(float value) {
  const auto bits = As<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void ConvertStored(const Problem& problem, const char* codes, int64_t rows, int64_t columns,
                   int64_t stride, float* to, int64_t to_stride, int64_t to_high) {
  switch (problem.storage) {
    case Storage::kFloat32: return Convert<Float32>(codes, rows, columns, stride, to, to_stride);
    case Storage::kBFloat16: return Convert<BFloat16>(codes, rows, columns, stride, to, to_stride);
    case Storage::kFloat8E4M3:
      return Convert<Float8E4M3>(codes, rows, columns, stride, to, to_stride);
    case Storage::kInt8: return Convert<Int8>(codes, rows, columns, stride, to, to_stride);
    case Storage::kInt4:
      Convert<Int4<0>>(codes, rows, columns, stride, to, to_stride);
      Convert<Int4<4>>(codes, rows, columns, stride, to + to_high, to_stride);
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
    if (!problem.DirectKeys()) {
      const char* keys = problem.keys + (head * codes * size + in_unit) * bytes;
      ConvertStored(problem, keys, codes, run, size, keys_ + at, kBlock, codes * kBlock);
    }
    const char* values = problem.values + (head * size + in_unit) * codes * bytes;
    const float* row = reinterpret_cast<const float*>(values);
    if (!problem.DirectValues()) {
      row = values_ + at * width;
      ConvertStored(problem, values, run, codes, codes, values_ + at * width, width, codes);
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

void Run(const Problem& problem, ffi::ThreadPool& pool) {
  const int64_t most = std::max<int64_t>(1, kItemRows / problem.groups);
  const int64_t pieces = (problem.queries + most - 1) / most;
  const int64_t items = problem.batch * problem.kv_heads * pieces;
  ParallelFor(pool, items, [&problem, most, pieces](int64_t item) {
    // Later queries see more keys: the long items first.
    const int64_t piece = pieces - 1 - item / (problem.batch * problem.kv_heads);
    const int64_t head = item % (problem.batch * problem.kv_heads);
    const int64_t first = piece * most, count = std::min(most, problem.queries - first);
    scratch.Begin(Item::Room(problem, count));
    Item(problem, head / problem.kv_heads, head % problem.kv_heads, first, count, scratch).Run();
  });
}

bool HasShape(const ffi::AnyBuffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dimensions = buffer.dimensions();
  return std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end());
}

ffi::Error Wrong(const char* what) { return ffi::Error::InvalidArgument(what); }

ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer keys,
                     ffi::AnyBuffer key_scale, ffi::AnyBuffer values, ffi::AnyBuffer value_scale,
                     ffi::Buffer<ffi::S32> row_units, ffi::Buffer<ffi::S32> lengths,
                     ffi::Buffer<ffi::S32> key_positions, ffi::Buffer<ffi::S32> query_positions,
                     ffi::Buffer<ffi::PRED> query_valid, ffi::Result<ffi::AnyBuffer> output,
                     ffi::Result<ffi::Buffer<ffi::F32>> log_normaliser, float scale,
                     int64_t window, float soft_cap) {
  if (query.dimensions().size() != 4 || keys.dimensions().size() != 4 ||
      row_units.dimensions().size() != 2 || key_positions.dimensions().size() != 2) {
    return Wrong("attention: an argument has not the axes it should");
  }
  Problem problem = {};
  problem.batch = query.dimensions()[0];
  problem.queries = query.dimensions()[1];
  problem.heads = query.dimensions()[2];
  problem.head_dim = query.dimensions()[3];
  problem.units = keys.dimensions()[0];
  problem.kv_heads = keys.dimensions()[1];
  problem.unit_size = keys.dimensions()[3];
  problem.row_units = row_units.dimensions()[1];
  if (problem.kv_heads == 0 || problem.heads % problem.kv_heads != 0) {
    return Wrong("attention: the KV heads do not divide the query heads");
  }
  problem.groups = problem.heads / problem.kv_heads;
  switch (keys.element_type()) {
    case ffi::F32: problem.storage = Storage::kFloat32; break;
    case ffi::BF16: problem.storage = Storage::kBFloat16; break;
    case ffi::F8E4M3FN: problem.storage = Storage::kFloat8E4M3; break;
    case ffi::S8: problem.storage = Storage::kInt8; break;
    case ffi::U8: problem.storage = Storage::kInt4; break;
    default: return Wrong("attention: the keys are of a type that no storage has");
  }
  const bool scaled = problem.CodeBytes() == 1;
  const int64_t units = problem.units, heads = problem.kv_heads, size = problem.unit_size;
  const int64_t codes = problem.CodesPerHead(), explicit_slots = key_positions.dimensions()[1];
  if (values.element_type() != keys.element_type() ||
      !HasShape(keys, {units, heads, codes, size}) ||
      !HasShape(values, {units, heads, size, codes}) ||
      (scaled && (!HasShape(key_scale, {units, heads, 1, size}) ||
                  !HasShape(value_scale, {units, heads, size, 1}) ||
                  key_scale.element_type() != ffi::F32 ||
                  value_scale.element_type() != ffi::F32))) {
    return Wrong("attention: keys, values and scales do not belong together");
  }
  if ((query.element_type() != ffi::F32 && query.element_type() != ffi::BF16) ||
      output->element_type() != query.element_type() ||
      row_units.dimensions()[0] != problem.batch ||
      lengths.element_count() != static_cast<size_t>(problem.batch) ||
      query_positions.element_count() != static_cast<size_t>(problem.batch * problem.queries) ||
      query_valid.element_count() != query_positions.element_count() ||
      (explicit_slots > 0 && key_positions.dimensions()[0] != problem.batch) ||
      output->element_count() != query.element_count() ||
      log_normaliser->element_count() !=
          static_cast<size_t>(problem.batch * problem.heads * problem.queries)) {
    return Wrong("attention: queries and what is told of them do not belong together");
  }
  problem.slots = explicit_slots > 0 ? explicit_slots : problem.row_units * problem.unit_size;
  problem.bfloat16_queries = query.element_type() == ffi::BF16;
  problem.query = query.untyped_data();
  problem.keys = static_cast<const char*>(keys.untyped_data());
  problem.values = static_cast<const char*>(values.untyped_data());
  problem.key_scale = scaled ? static_cast<const float*>(key_scale.untyped_data()) : nullptr;
  problem.value_scale = scaled ? static_cast<const float*>(value_scale.untyped_data()) : nullptr;
  problem.row_unit = row_units.typed_data();
  problem.lengths = lengths.typed_data();
  problem.key_positions = explicit_slots > 0 ? key_positions.typed_data() : nullptr;
  problem.query_positions = query_positions.typed_data();
  problem.query_valid = query_valid.typed_data();
  problem.scale = scale;
  problem.soft_cap = soft_cap;
  problem.window = window;
  problem.output = output->untyped_data();
  problem.log_normaliser = log_normaliser->typed_data();
  Run(problem, pool);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace kvlab

#pragma GCC visibility push(default)

// Called by XLA.
XLA_FFI_DEFINE_HANDLER_SYMBOL(KvlabAttention, kvlab::Attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap"));

// For tests: exp, or tanh, of `count` floats.
extern "C" void KvlabElementwise(int tanh, const float* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kvlab::kLanes) {
    float part[kvlab::kLanes] = {};
    const int64_t size = std::min<int64_t>(kvlab::kLanes, count - i);
    std::memcpy(part, from + i, size * sizeof(float));
    const kvlab::Floats x = kvlab::Load(part);
    kvlab::Store(part, tanh ? kvlab::Tanh(x) : kvlab::Exp(x));
    std::memcpy(to + i, part, size * sizeof(float));
  }
}

#pragma GCC visibility pop
