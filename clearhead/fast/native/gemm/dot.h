// Dot products by the best x86 instructions of each level; a part of traits.h.
//
// A dot reads STEP numbers of a row of x and of w, and adds their products to a vector of sums. The sums of ROWS rows
// and of a few outputs are in registers together. From LEAST_PACKED rows on, weights are packed into panels (panel.h).
// Their words of 4 bytes have the next numbers of one output, and the sums of PANEL_ROWS rows are then in registers.
// Weights that must be widened are widened once for up to WIDENED_ROWS rows. `load_w16` rounds float16 weights.

#ifdef __AVX512BF16__
struct DotBFloat16 {
  static constexpr int64_t STEP = 2 * WIDTH;
  static constexpr int ROWS = 4;
  static __m512i load_x(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static __m512i load_w(const uint16_t* from) { return load_x(from); }
  static __m512i load_w16(const Float16* from) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + WIDTH), (__m512)load(from));
  }
  static void add(Vec<float>& sums, __m512i x, __m512i w) {
    sums = (Vec<float>)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)w);
  }
};
#elif defined(__AVX2__)
// Even and odd numbers of bfloat16 as float32.
struct DotBFloat16 {
  struct Halves {
    Vec<float> even, odd;
  };
  static constexpr int64_t STEP = 2 * WIDTH;
  static constexpr int ROWS = WIDTH == 8 ? 2 : 4;
  static Halves load_x(const uint16_t* from) {
    Vec<uint32_t> words;
    std::memcpy(&words, from, sizeof words);
    return {(Vec<float>)(words << 16), (Vec<float>)(words & 0xffff0000)};
  }
  static Halves load_w(const uint16_t* from) { return load_x(from); }
  static Halves load_w16(const Float16* from) {
    Vec<uint32_t> words;
    std::memcpy(&words, from, sizeof words);
    const auto round = [](Vec<uint32_t> halves) {
      return round_to_bfloat16(widen(__builtin_convertvector(halves, Vec<uint16_t>)));
    };
    return {round(words & 0xffff), round(words >> 16)};
  }
  static void add(Vec<float>& sums, const Halves& x, const Halves& w) {
    sums = multiply_add(x.odd, w.odd, multiply_add(x.even, w.even, sums));
  }
};
#else
struct DotBFloat16 : PlainDot<uint16_t, float> {
  static Vec<float> load_w16(const Float16* from) { return round_to_bfloat16(load(from)); }
};
#endif

#if defined(__AVX512VNNI__) || (defined(HAS_AVX2) && defined(__AVXVNNI__))
// The instruction needs one unsigned operand. So a zero point is added to the weights; the sums become too large by the
// zero point times the numbers of x, and are compensated.
struct DotInt8 {
  using Number = int8_t;
  static constexpr int32_t ZERO_POINT = 128;
  static constexpr int64_t STEP = 4 * WIDTH;
  static constexpr int ROWS = WIDTH == 8 ? 3 : 4, PACKED_WORDS = 1, PANEL_ROWS = WIDTH == 8 ? 6 : 8;
  static constexpr int64_t LEAST_PACKED = WIDTH == 8 ? 14 : 10;
  static constexpr int WIDENED_ROWS = 0;
  static Vec<int32_t> load_x(const int8_t* from) {
    Vec<int32_t> words;
    std::memcpy(&words, from, sizeof words);
    return words;
  }
  static Vec<int32_t> load_w(const int8_t* from) { return load_x(from) ^ int32_t(0x80808080); }
  static void add(Vec<int32_t>& sums, Vec<int32_t> x, Vec<int32_t> w) {
#ifdef __AVX512VNNI__
    sums = (Vec<int32_t>)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#else
    sums = (Vec<int32_t>)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#endif
  }
  static Vec<int32_t> ones() { return Vec<int32_t>{} + 0x01010101; }
  static void pack(Vec<int32_t> words, uint32_t* to, int64_t) {
    words ^= int32_t(0x80808080);
    std::memcpy(to, &words, sizeof words);
  }
};
#elif defined(__AVX2__)
// Rows of x are kept in 16 bits, and weights are widened to 16 bits: pairs of products always fit into 32 bits.
struct DotInt8 {
  using Number = int16_t;
  static constexpr int32_t ZERO_POINT = 0;
  static constexpr int64_t STEP = 2 * WIDTH;
  static constexpr int ROWS = WIDTH == 8 ? 2 : 4, PACKED_WORDS = 2, PANEL_ROWS = WIDTH == 8 ? 6 : 8;
  static constexpr int64_t LEAST_PACKED = 13;
  static constexpr int WIDENED_ROWS = 8;
  static Vec<int32_t> load_x(const int16_t* from) {
    Vec<int32_t> words;
    std::memcpy(&words, from, sizeof words);
    return words;
  }
#ifdef __AVX512F__
  static Vec<int32_t> load_w(const int8_t* from) {
    return (Vec<int32_t>)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void add(Vec<int32_t>& sums, Vec<int32_t> x, Vec<int32_t> w) {
    sums += (Vec<int32_t>)_mm512_madd_epi16((__m512i)x, (__m512i)w);
  }
  static Vec<int32_t> pair_of(Vec<int32_t> words, int32_t order) {
    const int32_t next = 0x04000400;
    const __m512i places = _mm512_set4_epi32(order + 3 * next, order + 2 * next, order + next, order);
    return (Vec<int32_t>)_mm512_srai_epi16(_mm512_shuffle_epi8((__m512i)words, places), 8);
  }
#else
  static Vec<int32_t> load_w(const int8_t* from) {
    return (Vec<int32_t>)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void add(Vec<int32_t>& sums, Vec<int32_t> x, Vec<int32_t> w) {
    sums += (Vec<int32_t>)_mm256_madd_epi16((__m256i)x, (__m256i)w);
  }
  static Vec<int32_t> pair_of(Vec<int32_t> words, int32_t order) {
    const int32_t next = 0x04000400;
    const __m128i places = _mm_setr_epi32(order, order + next, order + 2 * next, order + 3 * next);
    return (Vec<int32_t>)_mm256_srai_epi16(_mm256_shuffle_epi8((__m256i)words, _mm256_set_m128i(places, places)), 8);
  }
#endif
  // Bytes 0 and 1 of each word as two 16-bit numbers, and bytes 2 and 3 for the next words.
  static void pack(Vec<int32_t> words, uint32_t* to, int64_t next) {
    const Vec<int32_t> pairs[2] = {pair_of(words, 0x01800080), pair_of(words, 0x03800280)};
    std::memcpy(to, &pairs[0], sizeof words);
    std::memcpy(to + next, &pairs[1], sizeof words);
  }
};
#else
struct DotInt8 : PlainDot<int8_t, int32_t> {
  using Number = int8_t;
  static constexpr int WIDENED_ROWS = 0;
};
#endif
