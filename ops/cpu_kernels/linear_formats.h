// How weights lie in panels, and how a panel is read: one vector of kLanes columns for each k.
//
// All formats mean float32 numbers: reading gives round(value * scale), the same wherever it is
// done, so a product over quantised weights has the bits of one over the numbers they stand for.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "vectors.h"

namespace kvlab {

constexpr int64_t kGroup = 32;            // values along k that share a scale
constexpr int64_t kPrefetchBytes = 2048;  // how far ahead of its reads a panel is fetched

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint32_t UInts __attribute__((vector_size(kVectorBytes)));

template <typename Vector>
inline Vector LoadAs(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// How far ahead of its reads a panel is fetched, in bytes.
class Ahead {
 public:
  Ahead() = default;
  Ahead(int64_t distance, int64_t skip_from) : distance_(distance), skip_from_(skip_from) {}

  // Reads at k follow; from skip_from on the fetch skips what lies between two panels.
  void Begin(int64_t k, int64_t skip) { now_ = distance_ + (k >= skip_from_ ? skip : 0); }

  template <int64_t kBytes>
  void Fetch(const void* from) const {
    const char* ahead = static_cast<const char*>(from) + now_;
#pragma GCC unroll 8
    for (int64_t i = 0; i < kBytes; i += 64) __builtin_prefetch(ahead + i);
  }

 private:
  int64_t distance_ = kPrefetchBytes;
  int64_t skip_from_ = 0;
  int64_t now_ = kPrefetchBytes;
};

// From one address to another, which need not be in the same array.
inline int64_t BytesTo(const void* from, const void* to) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
}

template <typename To, typename From>
inline To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// kLanes integers as 32 bits; g++ 12 takes __builtin_convertvector of bytes apart, so not by that.
#if defined(__AVX512F__)
inline Ints Widen(const int8_t* from) {
  return Bits<Ints>(_mm512_cvtepi8_epi32(LoadAs<__m128i>(from)));
}
inline Ints Widen(const uint8_t* from) {
  return Bits<Ints>(_mm512_cvtepu8_epi32(LoadAs<__m128i>(from)));
}
#elif defined(__AVX2__)
inline Ints Widen(const int8_t* from) {
  return Bits<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Ints Widen(const uint8_t* from) {
  return Bits<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
#else
template <typename Integer>
inline Ints Widen(const Integer* from) {
  Ints wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = from[i];
  return wide;
}
#endif

inline Floats FromFloat16(const uint16_t* from) {
#if defined(__AVX512F__)
  return Bits<Floats>(_mm512_cvtph_ps(LoadAs<__m256i>(from)));
#elif defined(__AVX__) && defined(__F16C__)
  return Bits<Floats>(_mm256_cvtph_ps(LoadAs<__m128i>(from)));
#else
  Floats wide;
  for (int i = 0; i < kLanes; ++i) {
    // By its bits: not every compiler has a type for it, and XLA's threads take subnormals for 0.
    const uint32_t sign = (from[i] & 0x8000u) << 16, size = from[i] & 0x7fffu;
    const float small = static_cast<float>(size) * 0x1p-24f;
    const uint32_t bits = size < 0x400u ? Bits<uint32_t>(small) : (size << 13) + (112u << 23);
    wide[i] = Bits<float>(bits | sign);
  }
  return wide;
#endif
}

// [k, kLanes] float32.
struct Float32Panel {
  static constexpr int64_t kStep = 1;  // values along k that one Read gives
  static constexpr int64_t kBytes = kVectorBytes;  // of each k

  Float32Panel() = default;
  Float32Panel(const void* panels, const void*, int64_t k, int64_t panel)
      : values_(static_cast<const float*>(panels) + panel * k * kLanes) {}
  // A part of a panel, from k = origin on.
  Float32Panel(const Floats* values, int64_t origin)
      : values_(reinterpret_cast<const float*>(values)), origin_(origin) {}

  // Past this panel's reads, which end at k, those of another are fetched.
  void Precede(const Float32Panel& next, int64_t k) {
    skip_ = BytesTo(values_ + k * kLanes, next.values_);
  }
  void FetchAhead(Ahead ahead) { ahead_ = ahead; }
  void Begin(int64_t k) { ahead_.Begin(k, skip_); }
  void Read(int64_t k, Floats (&out)[kStep]) const {
    const float* from = values_ + (k - origin_) * kLanes;
    ahead_.Fetch<kVectorBytes>(from);
    out[0] = Load(from);
  }

 private:
  const float* values_ = nullptr;
  int64_t origin_ = 0;
  int64_t skip_ = 0;
  Ahead ahead_;
};

// [ceil(k / 2), kLanes, 2] bfloat16: two values along k lie side by side, as dot instructions
// want them; the first is the low half of a 32-bit word.
struct BFloat16Panel {
  static constexpr int64_t kStep = 2;
  static constexpr int64_t kBytes = kVectorBytes / 2;

  BFloat16Panel() = default;
  BFloat16Panel(const void* panels, const void*, int64_t k, int64_t panel)
      : values_(static_cast<const uint32_t*>(panels) + panel * ((k + 1) / 2) * kLanes) {}

  void Precede(const BFloat16Panel& next, int64_t k) {
    skip_ = BytesTo(values_ + k / 2 * kLanes, next.values_);
  }
  void FetchAhead(Ahead ahead) { ahead_ = ahead; }
  void Begin(int64_t k) { ahead_.Begin(k, skip_); }
  UInts Pairs(int64_t k) const {
    const uint32_t* from = values_ + k / 2 * kLanes;
    ahead_.Fetch<kVectorBytes>(from);
    return LoadAs<UInts>(from);
  }
  void Read(int64_t k, Floats (&out)[kStep]) const {
    const UInts pairs = Pairs(k);
    out[0] = Bits<Floats>(pairs << 16);
    out[1] = Bits<Floats>(pairs & 0xffff0000u);
  }

 private:
  const uint32_t* values_ = nullptr;
  int64_t skip_ = 0;
  Ahead ahead_;
};

// Scales [ceil(k / kGroup), kLanes] float16 of a quantised panel.
class Scales {
 public:
  Scales() = default;
  Scales(const void* scales, int64_t k, int64_t panel)
      : scales_(static_cast<const uint16_t*>(scales) +
                panel * ((k + kGroup - 1) / kGroup) * kLanes) {}
  void Precede(const Scales& next) { ahead_ = BytesTo(scales_, next.scales_); }
  // Fetches those of the panel that this one precedes.
  Floats At(int64_t k) const {
    const uint16_t* from = scales_ + k / kGroup * kLanes;
    __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead_);
    return FromFloat16(from);
  }

 private:
  int64_t ahead_ = 0;  // bytes
  const uint16_t* scales_ = nullptr;
};

// [ceil(k / kGroup) * kGroup, kLanes] int8.
struct Int8Panel {
  static constexpr int64_t kStep = 1;
  static constexpr int64_t kBytes = kLanes;

  Int8Panel() = default;
  Int8Panel(const void* panels, const void* scales, int64_t k, int64_t panel)
      : scales_(scales, k, panel),
        values_(static_cast<const int8_t*>(panels) +
                panel * ((k + kGroup - 1) / kGroup * kGroup) * kLanes) {}

  void Precede(const Int8Panel& next, int64_t k) {
    scales_.Precede(next.scales_);
    skip_ = BytesTo(values_ + k * kLanes, next.values_);
  }
  void FetchAhead(Ahead ahead) { ahead_ = ahead; }
  void Begin(int64_t k) {
    scale_ = scales_.At(k);
    ahead_.Begin(k, skip_);
    ahead_.Fetch<kGroup * kLanes>(values_ + k * kLanes);
  }
  void Read(int64_t k, Floats (&out)[kStep]) const {
    const int8_t* from = values_ + k * kLanes;
    out[0] = __builtin_convertvector(Widen(from), Floats) * scale_;
  }

 private:
  Scales scales_;
  const int8_t* values_ = nullptr;
  Floats scale_{};
  int64_t skip_ = 0;
  Ahead ahead_;
};

// [ceil(k / kGroup) * kGroup / 2, kLanes] uint8, two values along k in each, the first in the low
// half; 8 stands for 0.
struct Int4Panel {
  static constexpr int64_t kStep = 2;
  static constexpr int64_t kBytes = kLanes / 2;

  Int4Panel() = default;
  Int4Panel(const void* panels, const void* scales, int64_t k, int64_t panel)
      : scales_(scales, k, panel),
        values_(static_cast<const uint8_t*>(panels) +
                panel * ((k + kGroup - 1) / kGroup * (kGroup / 2)) * kLanes) {}

  void Precede(const Int4Panel& next, int64_t k) {
    scales_.Precede(next.scales_);
    skip_ = BytesTo(values_ + k / 2 * kLanes, next.values_);
  }
  void FetchAhead(Ahead ahead) { ahead_ = ahead; }
  void Begin(int64_t k) {
    scale_ = scales_.At(k);
    ahead_.Begin(k, skip_);
    ahead_.Fetch<kGroup / 2 * kLanes>(values_ + k / 2 * kLanes);
  }
  void Read(int64_t k, Floats (&out)[kStep]) const {
    const uint8_t* from = values_ + k / 2 * kLanes;
    const Ints both = Widen(from);
    out[0] = __builtin_convertvector((both & 15) - 8, Floats) * scale_;
    out[1] = __builtin_convertvector((both >> 4) - 8, Floats) * scale_;
  }

 private:
  Scales scales_;
  const uint8_t* values_ = nullptr;
  Floats scale_{};
  int64_t skip_ = 0;
  Ahead ahead_;
};

}  // namespace kvlab
