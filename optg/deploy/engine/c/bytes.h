/* Vectors of SPAN bytes, and what the int8 operations do with them. Every instruction set gives the same results.

   `interleave` and `pack` work within pieces of 16 bytes, as the instructions of x86 do: interleaving four rows gives four
   vectors of 4-byte groups, and packing four vectors of sums puts their results back in the order of the rows. */

#ifndef BYTES_H
#define BYTES_H

#if LANES == 16 && defined(__AVX512BW__)
#define SPAN 64
#elif LANES == 8 && defined(__AVX2__)
#define SPAN 32
#else
#define SPAN 16
#endif
#if LANES == 4 && defined(__aarch64__)
#define NEON
#include <arm_neon.h>
#endif

/* What is subtracted from bytes before they are multiplied. The start value of the sums makes up for it (convolution.py). */
#if defined(NEON) && !defined(__ARM_FEATURE_MATMUL_INT8)
#define SHIFT 128 /* only signed bytes can be multiplied by signed bytes */
#else
#define SHIFT 0
#endif

enum { PREFETCHED = 6 << 10 }; /* bytes of weights that are on their way from memory: the first tile of a layer reads them */

typedef uint8_t octets __attribute__((vector_size(SPAN), may_alias));
typedef uint8_t loose_octets __attribute__((vector_size(SPAN), aligned(1), may_alias)); /* at any address */
typedef uint16_t words __attribute__((vector_size(SPAN), may_alias));
typedef int16_t shorts __attribute__((vector_size(SPAN), may_alias));
typedef int32_t sums __attribute__((vector_size(SPAN), may_alias));
typedef float reals __attribute__((vector_size(SPAN), may_alias));

typedef struct { /* 4 vectors: those of 4 interleaved rows, or the sums that belong to one vector of bytes */
  octets part[4];
} quad;

typedef struct { /* 4 weights, repeated */
#if defined(__AVX512VNNI__) && SPAN == 64 || defined(__AVXVNNI__) && SPAN == 32 || defined(NEON)
  sums all;
#else
  shorts even, odd;
#endif
} weights;

INLINE octets load_octets(const void *p) { /* gcc would fold a plain load into each instruction that uses it */
#if SPAN == 64 && !defined(__SANITIZE_ADDRESS__) /* sanitizers check only plain loads */
  octets x;
  __asm__("vmovdqu64 %1, %0" : "=v"(x) : "m"(*(const loose_octets *)p));
  return x;
#elif SPAN == 32 && !defined(__SANITIZE_ADDRESS__)
  octets x;
  __asm__("vmovdqu %1, %0" : "=x"(x) : "m"(*(const loose_octets *)p));
  return x;
#else
  return *(const loose_octets *)p;
#endif
}
INLINE void store_octets(void *p, octets x) { *(loose_octets *)p = x; }
INLINE octets repeat_octet(uint8_t x) { return (octets){0} + x; }
INLINE sums repeat_sum(int32_t x) { return (sums){0} + x; }
INLINE reals repeat_real(float x) { return (reals){0} + x; }
INLINE octets select_octets(octets where, octets yes, octets no) { return (yes & where) | (no & ~where); }
INLINE reals to_reals(sums x) { return __builtin_convertvector(x, reals); }

/* ---- x86 */

#if SPAN == 64
INLINE octets low_8(octets a, octets b) { return (octets)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
INLINE octets high_8(octets a, octets b) { return (octets)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
INLINE octets low_16(octets a, octets b) { return (octets)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b); }
INLINE octets high_16(octets a, octets b) { return (octets)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b); }
INLINE octets largest(octets a, octets b) { return (octets)_mm512_max_epu8((__m512i)a, (__m512i)b); }
INLINE octets smallest(octets a, octets b) { return (octets)_mm512_min_epu8((__m512i)a, (__m512i)b); }
INLINE reals multiply_add(reals a, reals b, reals c) { return (reals)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE sums round_even(reals x) { return (sums)_mm512_cvtps_epi32((__m512)x); }
INLINE octets pack(sums a, sums b, sums c, sums d) {
  return (octets)_mm512_packus_epi16(_mm512_packs_epi32((__m512i)a, (__m512i)b), _mm512_packs_epi32((__m512i)c, (__m512i)d));
}
INLINE __m512i low_words(sums a, sums b) {
  const __m512i order = _mm512_setr_epi32( /* in each 16 bytes: 4 words of a, then 4 of b */
      0x00020000, 0x00060004, 0x00220020, 0x00260024, 0x000A0008, 0x000E000C, 0x002A0028, 0x002E002C,
      0x00120010, 0x00160014, 0x00320030, 0x00360034, 0x001A0018, 0x001E001C, 0x003A0038, 0x003E003C);
  return _mm512_permutex2var_epi16((__m512i)a, order, (__m512i)b);
}
INLINE octets pack_words(sums a, sums b, sums c, sums d) {
  return (octets)_mm512_packus_epi16(low_words(a, b), low_words(c, d));
}
#elif SPAN == 32
INLINE octets low_8(octets a, octets b) { return (octets)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
INLINE octets high_8(octets a, octets b) { return (octets)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
INLINE octets low_16(octets a, octets b) { return (octets)_mm256_unpacklo_epi16((__m256i)a, (__m256i)b); }
INLINE octets high_16(octets a, octets b) { return (octets)_mm256_unpackhi_epi16((__m256i)a, (__m256i)b); }
INLINE octets largest(octets a, octets b) { return (octets)_mm256_max_epu8((__m256i)a, (__m256i)b); }
INLINE octets smallest(octets a, octets b) { return (octets)_mm256_min_epu8((__m256i)a, (__m256i)b); }
INLINE reals multiply_add(reals a, reals b, reals c) { return (reals)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
INLINE sums round_even(reals x) { return (sums)_mm256_cvtps_epi32((__m256)x); }
INLINE octets pack(sums a, sums b, sums c, sums d) {
  return (octets)_mm256_packus_epi16(_mm256_packs_epi32((__m256i)a, (__m256i)b), _mm256_packs_epi32((__m256i)c, (__m256i)d));
}
INLINE __m256i low_words(sums a, sums b) { return _mm256_packus_epi32((__m256i)(a & 0xFFFF), (__m256i)(b & 0xFFFF)); }
INLINE octets pack_words(sums a, sums b, sums c, sums d) {
  return (octets)_mm256_packus_epi16(low_words(a, b), low_words(c, d));
}

/* ---- ARM */

#elif defined(NEON)
INLINE octets low_8(octets a, octets b) { return (octets)vzip1q_u8((uint8x16_t)a, (uint8x16_t)b); }
INLINE octets high_8(octets a, octets b) { return (octets)vzip2q_u8((uint8x16_t)a, (uint8x16_t)b); }
INLINE octets low_16(octets a, octets b) { return (octets)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b); }
INLINE octets high_16(octets a, octets b) { return (octets)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b); }
INLINE octets largest(octets a, octets b) { return (octets)vmaxq_u8((uint8x16_t)a, (uint8x16_t)b); }
INLINE octets smallest(octets a, octets b) { return (octets)vminq_u8((uint8x16_t)a, (uint8x16_t)b); }
INLINE reals multiply_add(reals a, reals b, reals c) {
  return (reals)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE sums round_even(reals x) { return (sums)vcvtnq_s32_f32((float32x4_t)x); }
INLINE octets pack(sums a, sums b, sums c, sums d) {
  const int16x8_t low = vqmovn_high_s32(vqmovn_s32((int32x4_t)a), (int32x4_t)b);
  const int16x8_t high = vqmovn_high_s32(vqmovn_s32((int32x4_t)c), (int32x4_t)d);
  return (octets)vqmovun_high_s16(vqmovun_s16(low), high);
}
INLINE octets pack_words(sums a, sums b, sums c, sums d) {
  const int16x8_t low = vuzp1q_s16((int16x8_t)a, (int16x8_t)b), high = vuzp1q_s16((int16x8_t)c, (int16x8_t)d);
  return (octets)vqmovun_high_s16(vqmovun_s16(low), high);
}

/* ---- any machine */

#else

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (octets){__VA_ARGS__})
#endif
INLINE octets low_8(octets a, octets b) { return PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
INLINE octets high_8(octets a, octets b) { return PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }
INLINE octets low_16(octets a, octets b) { return PICK(a, b, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23); }
INLINE octets high_16(octets a, octets b) { return PICK(a, b, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31); }
INLINE octets largest(octets a, octets b) { return select_octets((octets)(a > b), a, b); }
INLINE octets smallest(octets a, octets b) { return select_octets((octets)(a < b), a, b); }
INLINE reals multiply_add(reals a, reals b, reals c) {
  for (int i = 0; i < SPAN / 4; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
INLINE sums round_even(reals x) { /* values beyond the limit end as 0 or 255 in any case */
  const float limit = 1 << 20, magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  for (int i = 0; i < SPAN / 4; i++) x[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
  return __builtin_convertvector((x + magic) - magic, sums);
}
INLINE octets pack(sums a, sums b, sums c, sums d) {
  const sums from[4] = {a, b, c, d};
  octets result;
  for (int i = 0; i < SPAN; i++) {
    const int32_t x = from[i / 4][i % 4];
    result[i] = x < 0 ? 0 : x > 255 ? 255 : x;
  }
  return result;
}
INLINE octets pack_words(sums a, sums b, sums c, sums d) { return pack(a << 16 >> 16, b << 16 >> 16, c << 16 >> 16, d << 16 >> 16); }
#endif

/* ---- sums of 4 products of an unsigned byte, minus SHIFT, and a signed byte from -127 to 127, exact */

INLINE weights repeat_weights(int32_t four) {
#if defined(__AVX512VNNI__) && SPAN == 64 || defined(__AVXVNNI__) && SPAN == 32 || defined(NEON)
  return (weights){repeat_sum(four)};
#else
  const shorts x = (shorts)repeat_sum(four);
  return (weights){(shorts)((words)x << 8) >> 8, x >> 8};
#endif
}

INLINE sums add_products(sums total, octets x, weights w) {
#if defined(__AVX512VNNI__) && SPAN == 64
  __asm__("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(x), "v"(w.all)); /* gcc would copy the sum first */
  return total;
#elif defined(__AVXVNNI__) && SPAN == 32
  return (sums)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)x, (__m256i)w.all);
#elif defined(NEON) && SHIFT == 0
  return (sums)vusdotq_s32((int32x4_t)total, (uint8x16_t)x, (int8x16_t)w.all);
#elif defined(NEON)
  const int8x16_t signed_x = (int8x16_t)(x ^ SHIFT), y = (int8x16_t)w.all;
#if defined(__ARM_FEATURE_DOTPROD)
  return (sums)vdotq_s32((int32x4_t)total, signed_x, y);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(signed_x), vget_low_s8(y)), high = vmull_high_s8(signed_x, y);
  return (sums)vpadalq_s16((int32x4_t)total, vpaddq_s16(low, high)); /* 2 products fit: 2 * 128 * 127 < 2^15 */
#endif
#else
  const words even = (words)x & 255, odd = (words)x >> 8;
#if SPAN == 64
  return total + (sums)_mm512_madd_epi16((__m512i)even, (__m512i)w.even) + (sums)_mm512_madd_epi16((__m512i)odd, (__m512i)w.odd);
#elif SPAN == 32
  return total + (sums)_mm256_madd_epi16((__m256i)even, (__m256i)w.even) + (sums)_mm256_madd_epi16((__m256i)odd, (__m256i)w.odd);
#else
  const sums a = (sums)(shorts)(even * (words)w.even), b = (sums)(shorts)(odd * (words)w.odd); /* a product fits 16 bits */
  return total + (a << 16 >> 16) + (a >> 16) + (b << 16 >> 16) + (b >> 16);
#endif
#endif
}

INLINE quad interleave(const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d) {
  const octets w = load_octets(a), x = load_octets(b), y = load_octets(c), z = load_octets(d);
  const octets l = low_8(w, x), h = high_8(w, x), l2 = low_8(y, z), h2 = high_8(y, z);
  return (quad){{low_16(l, l2), high_16(l, l2), low_16(h, h2), high_16(h, h2)}};
}

/* Read four taps at SPAN positions, v * SPAN positions from where the rows begin. A row has BLOCK bytes for each position, so
   there are 4 / BLOCK rows. */
INLINE quad read_taps(const int BLOCK, const uint8_t *const *row, int v) {
  if (BLOCK == 1) return interleave(row[0] + SPAN * v, row[1] + SPAN * v, row[2] + SPAN * v, row[3] + SPAN * v);
  quad q;
  if (BLOCK == 2)
    UNROLL for (int i = 0; i < 2; i++) {
      const octets a = load_octets(row[0] + SPAN * (2 * v + i)), b = load_octets(row[1] + SPAN * (2 * v + i));
      q.part[2 * i] = low_16(a, b), q.part[2 * i + 1] = high_16(a, b);
    }
  else
    UNROLL for (int p = 0; p < 4; p++) q.part[p] = load_octets(row[0] + SPAN * (4 * v + p));
  return q;
}

/* The position of number i in part p of 4 vectors of sums. */
INLINE int position_of(int block, int p, int i) {
  if (block == 1) return i / 4 * 16 + p * 4 + i % 4;
  if (block == 2) return p / 2 * (SPAN / 2) + i / 4 * 8 + p % 2 * 4 + i % 4;
  return p * (SPAN / 4) + i;
}

/* Put packed results into the order of positions, and back. Only layers that read blocks of 2 or 4 need this. */
INLINE octets in_order(int block, octets x) {
#if SPAN == 64
  const __m512i by_2 = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m512i by_4 = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return block == 1 ? x : (octets)_mm512_permutexvar_epi32(block == 2 ? by_2 : by_4, (__m512i)x);
#elif SPAN == 32
  const __m256i by_2 = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7), by_4 = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return block == 1 ? x : (octets)_mm256_permutevar8x32_epi32((__m256i)x, block == 2 ? by_2 : by_4);
#else
  return x;
#endif
}
INLINE octets out_of_order(int block, octets x) {
#if SPAN == 64
  const __m512i by_2 = _mm512_setr_epi32(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  return block != 2 ? in_order(block, x) : (octets)_mm512_permutexvar_epi32(by_2, (__m512i)x);
#elif SPAN == 32
  const __m256i by_4 = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  return block != 4 ? in_order(block, x) : (octets)_mm256_permutevar8x32_epi32((__m256i)x, by_4);
#else
  return x;
#endif
}

/* Read only two taps, from 2 rows of single bytes. The other 2 bytes of each group of 4 are 0. */
INLINE quad read_two_taps(const uint8_t *const *row, int v) {
  const octets a = load_octets(row[0] + SPAN * v), b = load_octets(row[1] + SPAN * v);
#if SPAN == 64 && defined(__AVX512VBMI__) /* 4 instructions instead of 6 */
#define QUARTER(first) (first) * 257 + 0x4000, (first) * 257 + 0x4101, (first) * 257 + 0x4202, (first) * 257 + 0x4303
  quad q;
  UNROLL for (int p = 0; p < 4; p++) {
    const sums index = {QUARTER(4 * p), QUARTER(4 * p + 16), QUARTER(4 * p + 32), QUARTER(4 * p + 48)};
    q.part[p] = (octets)_mm512_maskz_permutex2var_epi8(0x3333333333333333, (__m512i)a, (__m512i)index, (__m512i)b);
  }
  return q;
#else
  const octets l = low_8(a, b), h = high_8(a, b), zero = repeat_octet(0);
  return (quad){{low_16(l, zero), high_16(l, zero), low_16(h, zero), high_16(h, zero)}};
#endif
}

/* The bytes of a vector as integers, in the order of sums. */
INLINE quad widen(octets x) {
  const octets zero = repeat_octet(0), l = low_8(x, zero), h = high_8(x, zero);
  return (quad){{low_16(l, zero), high_16(l, zero), low_16(h, zero), high_16(h, zero)}};
}

INLINE int32_t add_lanes(sums x) {
#if SPAN == 64
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t sum = 0;
  for (int l = 0; l < SPAN / 4; l++) sum += x[l];
  return sum;
#endif
}

INLINE octets clamp_octets(octets x, uint8_t low, uint8_t high) {
  return smallest(repeat_octet(high), largest(repeat_octet(low), x));
}

/* ---- rescaling, as docs/int8.md defines it */

/* The 4 vectors of reals -> bytes: round to the nearest integer, ties to even, and saturate. */
INLINE octets quantize_reals(const reals *x) {
  return pack(round_even(x[0]), round_even(x[1]), round_even(x[2]), round_even(x[3]));
}

/* Sums of a narrow layer start from the bits of 1.5 * 2^23. So their own bits are those of the float 1.5 * 2^23 + sum. */

/* scale * sum + offset -> bytes, saturated. The offset contains 1.5 * 2^23: so adding it rounds to an integer, the low word. */
INLINE octets quantize_sums(const sums *x, reals scale, reals offset) {
  sums y[4];
  UNROLL for (int p = 0; p < 4; p++) y[p] = (sums)multiply_add((reals)x[p], scale, offset);
  return pack_words(y[0], y[1], y[2], y[3]);
}

/* The bytes r as the floats 256 r, in the order of sums: the bytes 0, r, 0, 0x4B are 2^23 + 256 r. */
INLINE void widen_to_reals(octets r, reals *y) {
  const octets zero = repeat_octet(0), exponent = (octets)repeat_sum(0x4B004B00), l = low_8(zero, r), h = high_8(zero, r);
  const quad wide = {{low_16(l, exponent), high_16(l, exponent), low_16(h, exponent), high_16(h, exponent)}};
  UNROLL for (int p = 0; p < 4; p++) y[p] = (reals)wide.part[p] - repeat_real(0x1p23f);
}

/* scale * sum + offset + residual * 256 r -> bytes, saturated. */
INLINE octets quantize_sums_and_residual(const sums *x, reals scale, octets r, reals residual, reals offset) {
  reals y[4];
  widen_to_reals(r, y);
  UNROLL for (int p = 0; p < 4; p++) y[p] = multiply_add(y[p], residual, multiply_add((reals)x[p], scale, offset));
  return quantize_reals(y);
}

#endif
