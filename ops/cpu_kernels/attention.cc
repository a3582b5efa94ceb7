// Attention straight from stored keys and values, by an online softmax over blocks of 64 keys.
//
// The work is cut into items (row, KV head, some queries). What is computed for one query of one
// head depends on that query and the keys it sees: blocks begin at multiples of 64 slots, whatever
// the pages, and a block that it does not see changes nothing. So how items are cut, and which
// thread takes which, is free. Axes as in attention_pool.h.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "attention_item.h"
#include "attention_pool.h"
#include "exponential.h"
#include "parallel.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace kvlab {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t kItemRows = 96;  // query rows of an item, which share each conversion of a block

thread_local Scratch scratch;

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

template <typename Buffer>
bool HasShape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dimensions = buffer.dimensions();
  return std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end());
}

ffi::Error Wrong(const char* what) { return ffi::Error::InvalidArgument(what); }

// The form of a pool by the type of its codes; false where no storage has it.
bool StorageOf(ffi::DataType type, Storage* storage) {
  switch (type) {
    case ffi::F32: *storage = Storage::kFloat32; return true;
    case ffi::BF16: *storage = Storage::kBFloat16; return true;
    case ffi::F8E4M3FN: *storage = Storage::kFloat8E4M3; return true;
    case ffi::S8: *storage = Storage::kInt8; return true;
    case ffi::U8: *storage = Storage::kInt4; return true;
    default: return false;
  }
}

// Takes in the pool: `problem` has the heads already.
ffi::Error TakePool(const ffi::AnyBuffer& keys, const ffi::AnyBuffer& key_scale,
                    const ffi::AnyBuffer& values, const ffi::AnyBuffer& value_scale,
                    Problem* problem) {
  if (keys.dimensions().size() != 4) return Wrong("attention: keys have not the axes they should");
  problem->units = keys.dimensions()[0];
  problem->kv_heads = keys.dimensions()[1];
  problem->unit_size = keys.dimensions()[3];
  if (problem->kv_heads == 0 || problem->heads % problem->kv_heads != 0) {
    return Wrong("attention: the KV heads do not divide the query heads");
  }
  problem->groups = problem->heads / problem->kv_heads;
  if (!StorageOf(keys.element_type(), &problem->storage)) {
    return Wrong("attention: the keys are of a type that no storage has");
  }
  const int64_t units = problem->units, heads = problem->kv_heads, size = problem->unit_size;
  const int64_t codes = problem->CodesPerHead();
  const bool halves = problem->storage == Storage::kInt4 && problem->head_dim % 2 != 0;
  if (halves || values.element_type() != keys.element_type() ||
      !HasShape(keys, {units, heads, codes, size}) ||
      !HasShape(values, {units, heads, size, codes})) {
    return Wrong("attention: keys and values do not belong together");
  }
  problem->keys = static_cast<const char*>(keys.untyped_data());
  problem->values = static_cast<const char*>(values.untyped_data());
  if (problem->CodeBytes() > 1) return ffi::Error::Success();
  if (!HasShape(key_scale, {units, heads, 1, size}) ||
      !HasShape(value_scale, {units, heads, size, 1}) || key_scale.element_type() != ffi::F32 ||
      value_scale.element_type() != ffi::F32) {
    return Wrong("attention: scales do not belong to the keys and values");
  }
  problem->key_scale = static_cast<const float*>(key_scale.untyped_data());
  problem->value_scale = static_cast<const float*>(value_scale.untyped_data());
  return ffi::Error::Success();
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer keys,
                     ffi::AnyBuffer key_scale, ffi::AnyBuffer values, ffi::AnyBuffer value_scale,
                     ffi::BufferR2<ffi::S32> row_units, ffi::BufferR1<ffi::S32> lengths,
                     ffi::BufferR2<ffi::S32> key_positions,
                     ffi::BufferR2<ffi::S32> query_positions,
                     ffi::BufferR2<ffi::PRED> query_valid, ffi::Result<ffi::AnyBuffer> output,
                     ffi::Result<ffi::BufferR4<ffi::F32>> log_normaliser, float scale,
                     int64_t window, float soft_cap) {
  Problem problem = {};
  if (query.dimensions().size() != 4) return Wrong("attention: the query has not 4 axes");
  problem.batch = query.dimensions()[0];
  problem.queries = query.dimensions()[1];
  problem.heads = query.dimensions()[2];
  problem.head_dim = query.dimensions()[3];
  ffi::Error error = TakePool(keys, key_scale, values, value_scale, &problem);
  if (error.failure()) return error;
  const int64_t batch = problem.batch, queries = problem.queries;
  const int64_t told_slots = key_positions.dimensions()[1];
  problem.row_units = row_units.dimensions()[1];
  if ((query.element_type() != ffi::F32 && query.element_type() != ffi::BF16) ||
      output->element_type() != query.element_type() ||
      !HasShape(*output, {batch, queries, problem.heads, problem.head_dim}) ||
      !HasShape(*log_normaliser, {batch, problem.kv_heads, problem.groups, queries}) ||
      !HasShape(row_units, {batch, problem.row_units}) || !HasShape(lengths, {batch}) ||
      !HasShape(query_positions, {batch, queries}) || !HasShape(query_valid, {batch, queries}) ||
      (told_slots > 0 && !HasShape(key_positions, {batch, told_slots}))) {
    return Wrong("attention: queries and what is told of them do not belong together");
  }
  problem.slots = told_slots > 0 ? told_slots : problem.row_units * problem.unit_size;
  problem.bfloat16_queries = query.element_type() == ffi::BF16;
  problem.query = query.untyped_data();
  problem.row_unit = row_units.typed_data();
  problem.lengths = lengths.typed_data();
  problem.key_positions = told_slots > 0 ? key_positions.typed_data() : nullptr;
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
                                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                                  .Arg<xla::ffi::BufferR2<xla::ffi::PRED>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::BufferR4<xla::ffi::F32>>()
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
