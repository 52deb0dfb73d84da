// Products of bfloat16 and of 8 bits by the instructions of AVX-512 for them; a part of traits.h.

#ifdef __AVX512BF16__
struct DotBFloat16 {
  static constexpr int32_t ZERO_POINT = 0;
  static constexpr int64_t STEP = 2 * WIDTH;
  static __m512i load_x(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static __m512i load_w(const uint16_t* from) { return load_x(from); }
  static void add(Vec<float>& sums, __m512i x, __m512i w) {
    sums = (Vec<float>)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)w);
  }
};
#endif

#ifdef __AVX512VNNI__
// The instruction wants one side without a sign: weights are made larger by a zero point, and sums by as much times the
// numbers of x, which is compensated for.
struct DotInt8 {
  static constexpr int32_t ZERO_POINT = 128;
  static constexpr int64_t STEP = 4 * WIDTH;
  static __m512i load_x(const int8_t* from) { return _mm512_loadu_si512(from); }
  static __m512i load_w(const int8_t* from) { return _mm512_xor_si512(load_x(from), _mm512_set1_epi8(-128)); }
  static void add(Vec<int32_t>& sums, __m512i x, __m512i w) {
    sums = (Vec<int32_t>)_mm512_dpbusd_epi32((__m512i)sums, w, x);
  }
  static __m512i ones() { return _mm512_set1_epi8(1); }
};
#endif
