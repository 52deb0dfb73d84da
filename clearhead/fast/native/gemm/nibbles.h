// Products with 4-bit weights. A group of 32 weights of a row has 16 bytes: low nibbles are its first 16 weights, high
// nibbles its last 16, each with 8 added. The scales of the groups (fp16) are stored separately, [N, K / 32]. So
// vectors load whole lines of nibbles, and the scales of several groups at once. Rows of x are in 8 bits.
//
// y[m][n] = (sum over groups, in order, of float(integer sum) * scale) * row scale + bias. Few and many rows have the
// same additions, so the bits of a row do not depend on the other rows.
//
// Legend: M rows of x, N outputs, K inputs.

#pragma once

#include "../team.h"
#include "epilogue.h"
#include "following.h"

namespace {

constexpr int64_t GROUP = 32, GROUP_BYTES = GROUP / 2;
constexpr int32_t NIBBLE_ZERO = 8;  // the nibble of a weight of 0
constexpr int64_t LEAST_NIBBLE_PACKED = 5;  // with this many rows or more, packing weights into panels pays

}  // namespace

#ifdef HAS_NIBBLES

namespace {

#ifdef __AVX512F__
constexpr int64_t VECTOR_GROUPS = 4;
#define NIBBLE_OP(name) _mm512_##name
#define NIBBLE_SIZE(name) _mm512_##name##_si512
#else
constexpr int64_t VECTOR_GROUPS = 2;
#define NIBBLE_OP(name) _mm256_##name
#define NIBBLE_SIZE(name) _mm256_##name##_si256
#endif
constexpr int64_t VECTOR_BYTES = VECTOR_GROUPS * GROUP_BYTES, VECTOR_WEIGHTS = VECTOR_GROUPS * GROUP;
constexpr int NIBBLE_OUTPUTS = 4;  // outputs that are summed together
#if defined(__AVX512VNNI__) || (defined(HAS_AVX2) && defined(__AVXVNNI__))
constexpr bool HAS_DOT = true;  // an instruction for four products
#else
constexpr bool HAS_DOT = false;
#endif
constexpr int64_t NIBBLES_AHEAD = 1 << 13;  // prefetch distance, in bytes of weights
// Rows whose sums are in registers together.
constexpr int NIBBLE_ROWS = WIDTH == 8 ? 6 : 8;
static_assert(NIBBLE_OUTPUTS * VECTOR_GROUPS == WIDTH, "a vector has the sums of these outputs and groups");

// Copy a row to 8 bits unless it has them. For each group, write the initial value of its sums, which cancels the zero
// point of the weights: 32 bits, or 16 bits each for the even and the odd pairs of numbers.
template <typename Number>
void narrow_row(const Number* row, int64_t K, int8_t* narrow, int32_t* starts) {
  if constexpr (sizeof(Number) > 1)
    for (int64_t k = 0; k < K; ++k) narrow[k] = int8_t(row[k]);
  for (int64_t k = 0; k < K; k += GROUP) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(narrow + k));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(NIBBLE_ZERO), x);
    __m128i sums = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sums = _mm_add_epi16(sums, _mm_unpackhi_epi64(sums, sums));
    sums = _mm_sub_epi16(_mm_setzero_si128(), _mm_add_epi16(sums, _mm_srli_epi64(sums, 32)));
    starts[k / GROUP] = _mm_cvtsi128_si32(HAS_DOT ? _mm_madd_epi16(sums, _mm_set1_epi16(1)) : sums);
  }
}

// Unfinished sums of a group: 32 bits, or 16 bits without an instruction for four products. 8 steps of two products of
// a nibble and 8 bits fit into 16 bits.
inline Words add_nibbles(Words sums, Words nibbles, Words x) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sums, nibbles, x);
#elif defined(HAS_AVX2) && defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sums, nibbles, x);
#else
  return NIBBLE_OP(add_epi16)(sums, NIBBLE_OP(maddubs_epi16)(nibbles, x));
#endif
}

inline Words whole_sums(Words sums) {
  return HAS_DOT ? sums : NIBBLE_OP(madd_epi16)(sums, NIBBLE_OP(set1_epi16)(1));
}

inline Words low_nibbles(Words bytes) { return NIBBLE_SIZE(and)(bytes, NIBBLE_OP(set1_epi8)(15)); }
inline Words high_nibbles(Words bytes) { return low_nibbles(NIBBLE_OP(srli_epi16)(bytes, 4)); }

// The numbers of some groups of x in the order of the nibbles: a group has a quarter or half of a vector.
struct NibbleRow {
  Words first, last, start;  // initial values of the sums, which cancel the zero point of the weights

  NibbleRow() = default;
  explicit NibbleRow(const int8_t* x) {
    const auto* from = reinterpret_cast<const Words*>(x);
    const Words left = NIBBLE_SIZE(loadu)(from), right = NIBBLE_SIZE(loadu)(from + 1);
#ifdef __AVX512F__
    first = _mm512_shuffle_i64x2(left, right, 0x88), last = _mm512_shuffle_i64x2(left, right, 0xdd);
#else
    first = _mm256_permute2x128_si256(left, right, 0x20), last = _mm256_permute2x128_si256(left, right, 0x31);
#endif
    const Words zero = NIBBLE_SIZE(setzero)(), eights = NIBBLE_OP(set1_epi8)(NIBBLE_ZERO);
    const Words sums = add_nibbles(add_nibbles(zero, eights, first), eights, last);
    start = HAS_DOT ? NIBBLE_OP(sub_epi32)(zero, sums) : NIBBLE_OP(sub_epi16)(zero, sums);
  }
};

// The scales of some groups of four outputs, whose rows are `stride` scales apart; scales of one group are adjacent.
inline Vec<float> load_scales(const uint16_t* scales, int64_t stride) {
#ifdef __AVX512F__
  const auto row = [&](int i) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales + i * stride)); };
  const __m128i upper = _mm_unpacklo_epi16(row(0), row(1)), lower = _mm_unpacklo_epi16(row(2), row(3));
  const __m128i first = _mm_unpacklo_epi32(upper, lower), last = _mm_unpackhi_epi32(upper, lower);
  return (Vec<float>)_mm512_cvtph_ps(_mm256_set_m128i(last, first));
#else
  const auto row = [&](int i) {
    int32_t pair;
    std::memcpy(&pair, scales + i * stride, sizeof pair);
    return _mm_cvtsi32_si128(pair);
  };
  const __m128i upper = _mm_unpacklo_epi16(row(0), row(1)), lower = _mm_unpacklo_epi16(row(2), row(3));
  return (Vec<float>)_mm256_cvtph_ps(_mm_unpacklo_epi32(upper, lower));
#endif
}

// The first half of the additions that sum up each group, for two outputs.
inline Words join_pair(Words a, Words b) {
  return NIBBLE_OP(add_epi32)(NIBBLE_OP(unpacklo_epi32)(a, b), NIBBLE_OP(unpackhi_epi32)(a, b));
}

// The second half: the integer sums of some groups of four outputs; sums of one group are adjacent.
inline Vec<float> join_pairs(Words upper, Words lower) {
  const Words all =
      NIBBLE_OP(add_epi32)(NIBBLE_OP(unpacklo_epi64)(upper, lower), NIBBLE_OP(unpackhi_epi64)(upper, lower));
  return (Vec<float>)NIBBLE_OP(cvtepi32_ps)(all);
}

// Add the groups of a vector to the sums of four outputs, one after the other.
inline __m128 add_groups(__m128 sums, Vec<float> groups) {
#ifdef __AVX512F__
  const auto all = (__m512)groups;
  sums = _mm_add_ps(sums, _mm512_castps512_ps128(all));
  sums = _mm_add_ps(sums, _mm512_extractf32x4_ps(all, 1));
  sums = _mm_add_ps(sums, _mm512_extractf32x4_ps(all, 2));
  return _mm_add_ps(sums, _mm512_extractf32x4_ps(all, 3));
#else
  const auto all = (__m256)groups;
  return _mm_add_ps(_mm_add_ps(sums, _mm256_castps256_ps128(all)), _mm256_extractf128_ps(all, 1));
#endif
}

// Add some groups to the sums of ROWS rows of x with four outputs, two outputs at a time: more sums would not fit into
// registers.
template <int ROWS>
inline __attribute__((always_inline)) void add_step(
    const uint8_t* w, int64_t w_stride, const uint16_t* scales, int64_t scale_stride, const int8_t* x, int64_t x_stride,
    __m128 sums[ROWS]) {
  Words pairs[ROWS][2];
  NibbleRow rows[ROWS];
  for (int j = 0; j < ROWS; ++j) rows[j] = NibbleRow(x + j * x_stride);
  for (int pair = 0; pair < 2; ++pair) {
    Words all[ROWS][2];
    for (int i = 0; i < 2; ++i) {
      const Words bytes = NIBBLE_SIZE(loadu)(reinterpret_cast<const Words*>(w + (2 * pair + i) * w_stride));
      const Words first = low_nibbles(bytes), last = high_nibbles(bytes);
      for (int j = 0; j < ROWS; ++j)
        all[j][i] = whole_sums(add_nibbles(add_nibbles(rows[j].start, first, rows[j].first), last, rows[j].last));
    }
    for (int j = 0; j < ROWS; ++j) pairs[j][pair] = join_pair(all[j][0], all[j][1]);
  }
  const Vec<float> wide = load_scales(scales, scale_stride);
  for (int j = 0; j < ROWS; ++j) sums[j] = add_groups(sums[j], join_pairs(pairs[j][0], pairs[j][1]) * wide);
}

// Multiply ROWS rows from m on with the four outputs from n on; or with output n alone, treated as all four.
template <int ROWS>
void multiply_nibbles(const GemmArgs<Int4>& args, int64_t n, int64_t m, bool is_alone) {
  const int64_t K = args.K, groups = K / GROUP, whole = groups / VECTOR_GROUPS * VECTOR_GROUPS;
  const int64_t w_stride = is_alone ? 0 : K / 2, scale_stride = is_alone ? 0 : groups;
  const uint8_t* w = args.w + n * K / 2;
  const uint16_t* scales = args.group_scales + n * groups;
  const int8_t* x = args.x + m * K;
  // Rows of weights are contiguous, so prefetches go line by line.
  const auto* ahead = reinterpret_cast<const char*>(w) + std::max<int64_t>(NIBBLES_AHEAD, 2 * K);
  const auto* scales_ahead = reinterpret_cast<const char*>(scales) + std::max<int64_t>(NIBBLES_AHEAD / 8, K / 4);
  __m128 sums[ROWS];
  for (int j = 0; j < ROWS; ++j) sums[j] = _mm_setzero_ps();
  for (int64_t group = 0; group < whole; group += VECTOR_GROUPS) {
    for (int i = 0; i < int(NIBBLE_OUTPUTS * VECTOR_BYTES / LINE); ++i, ahead += LINE) __builtin_prefetch(ahead);
    __builtin_prefetch(scales_ahead), scales_ahead += NIBBLE_OUTPUTS * VECTOR_GROUPS * sizeof(uint16_t);
    add_step<ROWS>(w, w_stride, scales, scale_stride, x, K, sums);
    w += VECTOR_BYTES, scales += VECTOR_GROUPS, x += VECTOR_WEIGHTS;
  }
  if (whole < groups) {  // groups that fill no vector are padded with groups of zeros
    const int64_t rest = groups - whole;
    uint8_t some_w[NIBBLE_OUTPUTS][VECTOR_BYTES] = {};
    uint16_t some_scales[NIBBLE_OUTPUTS][VECTOR_GROUPS] = {};
    int8_t some_x[ROWS][VECTOR_WEIGHTS] = {};
    for (int i = 0; i < NIBBLE_OUTPUTS; ++i) {
      std::memcpy(some_w[i], w + i * w_stride, rest * GROUP_BYTES);
      std::memcpy(some_scales[i], scales + i * scale_stride, rest * sizeof(uint16_t));
    }
    for (int j = 0; j < ROWS; ++j) std::memcpy(some_x[j], x + j * K, rest * GROUP);
    add_step<ROWS>(some_w[0], VECTOR_BYTES, some_scales[0], VECTOR_GROUPS, some_x[0], VECTOR_WEIGHTS, sums);
  }
  for (int j = 0; j < ROWS; ++j) {
    alignas(16) float all[NIBBLE_OUTPUTS];
    _mm_store_ps(all, sums[j]);
    if (is_alone) args.write(m + j, n, all[0]);
    else args.write_four(m + j, n, all);
  }
}

// Multiply few rows with four outputs, or with one.
inline void multiply_nibble_outputs(const GemmArgs<Int4>& args, int64_t n, bool is_alone) {
  int64_t m = 0;
  if constexpr (WIDTH > 8)
    for (; m + 4 <= args.M; m += 4) multiply_nibbles<4>(args, n, m, is_alone);
  for (; m + 2 <= args.M; m += 2) multiply_nibbles<2>(args, n, m, is_alone);
  if (m < args.M) multiply_nibbles<1>(args, n, m, is_alone);
}

// Multiply few rows with the outputs from `begin` on; weights are read once while they are in the cache. No barrier.
inline void multiply_nibbles_by_team(const GemmArgs<Int4>& args, int64_t begin) {
  const int64_t steps = (args.N - begin + NIBBLE_OUTPUTS - 1) / NIBBLE_OUTPUTS;
#pragma omp for schedule(static) nowait
  for (int64_t step = 0; step < steps; ++step) {
    int64_t n = begin + step * NIBBLE_OUTPUTS;
    if (n + NIBBLE_OUTPUTS <= args.N) multiply_nibble_outputs(args, n, false);
    else
      for (; n < args.N; ++n) multiply_nibble_outputs(args, n, true);
  }
}

// --- several rows: the weights of a panel of outputs are widened to 8 bits once for all rows, a chunk at a time ---

constexpr int64_t CHUNK = WIDTH * GROUP;  // inputs whose widened weights and scales stay in the first cache

// Call `use(first, stride)` with WIDTH rows of COUNT numbers; only `count` of a row exist, the others are zeros.
template <int64_t COUNT, typename Number, typename Use>
inline __attribute__((always_inline)) void with_whole_rows(
    const Number* from, int64_t stride, int64_t count, const Use& use) {
  if (count >= COUNT) return use(from, stride);
  Number some[WIDTH][COUNT] = {};
  for (int64_t i = 0; i < WIDTH; ++i) std::memcpy(some[i], from + i * stride, count * sizeof(Number));
  use(&some[0][0], COUNT);
}

// Widen some groups of WIDTH outputs to words of four weights: word r of a group is at packed[group][r].
inline void pack_groups_of_outputs(const uint8_t* w, int64_t stride, uint32_t* packed) {
  constexpr int64_t WORDS = GROUP / 4;
  Words rows[WIDTH];
  for (int64_t i = 0; i < WIDTH; ++i) rows[i] = NIBBLE_SIZE(loadu)(reinterpret_cast<const Words*>(w + i * stride));
  transpose(rows);
  for (int64_t i = 0; i < WIDTH; ++i) {
    uint32_t* to = packed + (i / 4 * WORDS + i % 4) * PANEL;
    NIBBLE_SIZE(storeu)(reinterpret_cast<Words*>(to), low_nibbles(rows[i]));
    NIBBLE_SIZE(storeu)(reinterpret_cast<Words*>(to + WORDS / 2 * PANEL), high_nibbles(rows[i]));
  }
}

// Widen the scales of WIDTH groups of WIDTH outputs: scales of one group are adjacent.
inline void pack_scales(const uint16_t* from, int64_t stride, float* scales) {
  Words rows[WIDTH];
  for (int64_t i = 0; i < WIDTH; ++i) {
#ifdef __AVX512F__
    const auto halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * stride));
#else
    const auto halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride));
#endif
    rows[i] = (Words)NIBBLE_OP(cvtph_ps)(halves);
  }
  transpose(rows);
  for (int64_t i = 0; i < WIDTH; ++i) store(scales + i * PANEL, (Vec<float>)rows[i]);
}

// Pack the weights of a panel for `count` groups, at most WIDTH, and their scales. The scales of the next panel are
// prefetched.
inline void pack_nibbles(
    const uint8_t* w, const uint16_t* group_scales, int64_t K, int64_t count, uint32_t* packed, float* scales) {
  for (int64_t i = 0; i < PANEL; ++i) __builtin_prefetch(group_scales + (PANEL + i) * (K / GROUP));
  for (int64_t side = 0; side < PANEL; side += WIDTH) {
    for (int64_t group = 0; group < count; group += VECTOR_GROUPS)
      with_whole_rows<VECTOR_BYTES>(
          w + side * K / 2 + group * GROUP_BYTES, K / 2, (count - group) * GROUP_BYTES,
          [&](const uint8_t* from, int64_t stride) {
            pack_groups_of_outputs(from, stride, packed + group * GROUP / 4 * PANEL + side);
          });
    with_whole_rows<WIDTH>(
        group_scales + side * (K / GROUP), K / GROUP, count,
        [&](const uint16_t* from, int64_t stride) { pack_scales(from, stride, scales + side); });
  }
}

// Compute the sums of some groups of a row of x for each I, and add them to `sums` group by group. The weights of the
// next panel are prefetched meanwhile.
template <int... I>
__attribute__((noinline)) void multiply_nibble_rows(
    std::integer_sequence<int, I...>, const int8_t* x, int64_t K, const int32_t* starts, int64_t groups,
    const uint32_t* packed, const float* scales, Following following, Vec<float> (*sums)[2]) {
  const int8_t* rows[] = {(x + I * K)...};
  Vec<float> total[sizeof...(I)][2] = {{sums[I][0], sums[I][1]}...};
  for (int64_t group = 0; group < groups; ++group, scales += PANEL) {
    Words all[sizeof...(I)][2];
    ((all[I][0] = all[I][1] = NIBBLE_OP(set1_epi32)(starts[I * (K / GROUP) + group])), ...);
#pragma GCC unroll 1
    for (int64_t k = 0; k < GROUP; k += 4, packed += PANEL) {
      (keep(rows[I]), ...);
      following.fetch(), following.advance();
      Words left, right;
      std::memcpy(&left, packed, sizeof left);
      std::memcpy(&right, packed + WIDTH, sizeof right);
      const auto add = [&](const int8_t* from, Words(&row)[2]) {
        int32_t word;
        std::memcpy(&word, from + k, sizeof word);
        const Words words = NIBBLE_OP(set1_epi32)(word);
        row[0] = add_nibbles(row[0], left, words);
        row[1] = add_nibbles(row[1], right, words);
        asm("" : "+v"(row[0]), "+v"(row[1]));  // otherwise the sums of several steps are trees, which fill registers
      };
      (add(rows[I], all[I]), ...);
    }
    const Vec<float> both[] = {load(scales), load(scales + WIDTH)};
    const auto finish = [&](int i) {
      for (int side = 0; side < 2; ++side)
        total[i][side] += (Vec<float>)NIBBLE_OP(cvtepi32_ps)(whole_sums(all[i][side])) * both[side];
    };
    (finish(I), ...);
    ((rows[I] += GROUP), ...);
  }
  ((sums[I][0] = total[I][0], sums[I][1] = total[I][1]), ...);
}

// Compute the sums for `count` rows, at most MOST.
template <int MOST, typename... Rest>
void multiply_some_nibble_rows(int64_t count, Rest... rest) {
  if constexpr (MOST > 1)
    if (count < MOST) return multiply_some_nibble_rows<MOST - 1>(count, rest...);
  multiply_nibble_rows(std::make_integer_sequence<int, MOST>{}, rest...);
}

// Multiply all outputs that fill panels; return their number. No barrier.
inline int64_t multiply_nibble_panels_by_team(const GemmArgs<Int4>& args, Arena& arena) {
  const Arena::Frame frame(arena);
  const int64_t K = args.K, groups = K / GROUP, passes = (args.M + NIBBLE_ROWS - 1) / NIBBLE_ROWS;
  auto* packed = arena.take<uint32_t>(PANEL * CHUNK / 4);
  auto* scales = arena.take<float>(PANEL * WIDTH);
  auto* sums = reinterpret_cast<Vec<float>(*)[2]>(arena.take<float>(args.M * PANEL));
#pragma omp for schedule(static) nowait
  for (int64_t panel = 0; panel < args.N / PANEL; ++panel) {
    const int64_t n = panel * PANEL;
    Following following(args.w + (n + PANEL) * K / 2, PANEL * K / 2, K / 4 * passes);
    std::fill_n(&sums[0][0], 2 * args.M, Vec<float>{});
    for (int64_t group = 0; group < groups; group += WIDTH) {
      const int64_t some = std::min(WIDTH, groups - group);
      const uint8_t* w = args.w + n * K / 2 + group * GROUP_BYTES;
      pack_nibbles(w, args.group_scales + n * groups + group, K, some, packed, scales);
      for (int64_t m = 0; m < args.M; m += NIBBLE_ROWS, following.place += following.stride * some * (GROUP / 4))
        multiply_some_nibble_rows<NIBBLE_ROWS>(
            std::min<int64_t>(NIBBLE_ROWS, args.M - m), args.x + m * K + group * GROUP, K,
            args.compensation + m * groups + group, some, packed, scales, following, sums + m);
    }
    const Epilogue<Int4> left(args, n), right(args, n + WIDTH);
    for (int64_t m = 0; m < args.M; ++m) left.write(sums[m][0], m);
    for (int64_t m = 0; m < args.M; ++m) right.write(sums[m][1], m);
  }
  return args.N / PANEL * PANEL;
}

#undef NIBBLE_OP
#undef NIBBLE_SIZE

}  // namespace

#endif
