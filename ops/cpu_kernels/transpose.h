// Rows of 32-bit words to columns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear_formats.h"

namespace kvlab {

typedef uint32_t Words __attribute__((vector_size(16)));

template <int... kPlaces>
inline Words Shuffled(Words a, Words b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, kPlaces...);
#else
  return __builtin_shuffle(a, b, Words{kPlaces...});
#endif
}

// Four rows, `stride` words apart, to four columns of an array [.., width].
inline void TransposeFour(const uint32_t* from, int64_t stride, int64_t width, uint32_t* to) {
  Words rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = LoadAs<Words>(from + i * stride);
  const Words low[2] = {Shuffled<0, 4, 1, 5>(rows[0], rows[1]),
                        Shuffled<0, 4, 1, 5>(rows[2], rows[3])};
  const Words high[2] = {Shuffled<2, 6, 3, 7>(rows[0], rows[1]),
                         Shuffled<2, 6, 3, 7>(rows[2], rows[3])};
  const Words columns[4] = {
      Shuffled<0, 1, 4, 5>(low[0], low[1]), Shuffled<2, 3, 6, 7>(low[0], low[1]),
      Shuffled<0, 1, 4, 5>(high[0], high[1]), Shuffled<2, 3, 6, 7>(high[0], high[1])};
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * width, &columns[i], sizeof(Words));
}

// [rows, words], rows `stride` words apart, to [words, rows].
inline void Transpose(const uint32_t* from, int64_t stride, int64_t rows, int64_t words, uint32_t* to) {
  const int64_t whole = rows < 4 ? 0 : words / 4 * 4;
  for (int64_t word = 0; word < whole; word += 4) {
    for (int64_t row = 0; row < rows; row += 4) {
      const int64_t top = std::min(row, rows - 4);  // some of the last four may be written twice
      TransposeFour(from + top * stride + word, stride, rows, to + word * rows + top);
    }
  }
  for (int64_t word = whole; word < words; ++word) {
    for (int64_t row = 0; row < rows; ++row) to[word * rows + row] = from[row * stride + word];
  }
}

}  // namespace kvlab
