/* Convolutions of at most 16 or 32 positions, where a whole vector of each row would be mostly padding.

   The short pieces of 4 rows are put into one or two registers, and one permutation of bytes interleaves them. */

#if SPAN == 64 && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define FEW_KERNELS(K) K(16, 1) K(16, 0) K(32, 1) K(32, 0)

/* Byte 4 p + j of the result is byte p of row j. `rows` says how far apart rows are in the registers. */
INLINE __m512i few_order(const int first, const int rows) {
  uint8_t order[64];
  for (int p = 0; p < 16; p++)
    for (int j = 0; j < 4; j++) order[4 * p + j] = (uint8_t)(rows * j + first + p);
  return _mm512_loadu_si512(order);
}

INLINE __m512i few_dot(__m512i total, __m512i x, __m512i w) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(total) : "v"(x), "v"(w));
  return total;
}

/* Add one group of 4 taps to the sums of N positions. */
INLINE void few_group(const int N, const int SHORT, const char *tap, const uint8_t *in, int64_t shift, const __m512i *order,
                      __m512i *acc) {
  const uint8_t *row[4];
  UNROLL for (int i = 0; i < 4; i++)
    row[i] = in + (SHORT ? (int64_t)((const uint16_t *)tap)[i] << shift : ((const int32_t *)tap)[i]);
  const __m512i w = _mm512_set1_epi32(*(const int32_t *)(tap + (SHORT ? 8 : 16)));
  if (N == 16) {
    __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const void *)row[0]));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)row[1]), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)row[2]), 2);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const void *)row[3]), 3);
    acc[0] = few_dot(acc[0], _mm512_permutexvar_epi8(order[0], x), w);
  } else {
    __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)row[0]));
    __m512i y = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)row[2]));
    x = _mm512_inserti64x4(x, _mm256_loadu_si256((const void *)row[1]), 1);
    y = _mm512_inserti64x4(y, _mm256_loadu_si256((const void *)row[3]), 1);
    acc[0] = few_dot(acc[0], _mm512_permutex2var_epi8(x, order[0], y), w);
    acc[1] = few_dot(acc[1], _mm512_permutex2var_epi8(x, order[1], y), w);
  }
}

/* Rescale 16 sums and write them. */
INLINE void few_rescale(__m512i total, const int8_tile *t, int64_t channel, int64_t first) {
  const int8_convolution *k = t->k;
  __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_set1_ps(k->scale[channel]), _mm512_set1_ps(k->offset[channel]));
  if (t->add) {
    const __m128i r = _mm_loadu_si128((const void *)(t->add + channel * t->add_channel + first));
    y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(r)), _mm512_set1_ps(k->residual), y);
  }
  char *out = t->out + channel * t->out_channel;
  if (k->real) {
    y = _mm512_min_ps(_mm512_set1_ps(k->real_high), _mm512_max_ps(_mm512_set1_ps(k->real_low), y));
    _mm512_storeu_ps(out + 4 * first, y);
    return;
  }
  const __m512i n = _mm512_max_epi32(_mm512_cvtps_epi32(y), _mm512_setzero_si512());
  __m128i q = _mm512_cvtusepi32_epi8(n);
  q = _mm_min_epu8(_mm_set1_epi8((char)k->high), _mm_max_epu8(_mm_set1_epi8((char)k->low), q));
  if (k->mask) q = _mm_blendv_epi8(_mm_set1_epi8((char)k->fill), q, _mm_loadu_si128((const void *)(k->mask + first)));
  _mm_storeu_si128((void *)(out + first), q);
}

/* 4 groups at a time go into separate sums, because each addition of a single chain would wait for the previous one. */
INLINE void few_positions(const int N, const int SHORT, const int8_tile *t, int64_t first, int64_t last) {
  const int8_convolution *k = t->k;
  const int size = SHORT ? 12 : 20;
  const __m512i order[2] = {few_order(0, N), few_order(16, N)};
  for (const bundle *b = k->bundles + first; b < k->bundles + last; b++) {
    __m512i acc[8];
    UNROLL for (int i = 0; i < 8; i++) acc[i] = i < N / 16 ? _mm512_set1_epi32(k->start[b->channel]) : _mm512_setzero_si512();
    const char *tap = b->taps;
    int32_t n = b->groups;
    for (; n >= 4; n -= 4, tap += 4 * size)
      UNROLL for (int g = 0; g < 4; g++) few_group(N, SHORT, tap + g * size, t->in, k->shift, order, acc + g * (N / 16));
    for (; n > 0; n--, tap += size) few_group(N, SHORT, tap, t->in, k->shift, order, acc);
    UNROLL for (int i = N / 16; i < 4 * (N / 16); i++) acc[i % (N / 16)] = _mm512_add_epi32(acc[i % (N / 16)], acc[i]);
    UNROLL for (int i = 0; i < N / 16; i++) few_rescale(acc[i], t, b->channel, 16 * i);
  }
}

#define FEW_DEFINE(N, SHORT) \
  static void int8_few_##N##_##SHORT(const int8_tile *t, int64_t first, int64_t last) { few_positions(N, SHORT, t, first, last); }
FEW_KERNELS(FEW_DEFINE)
#define FEW_LIST(N, SHORT) {int8_few_##N##_##SHORT, 1, -N, SHORT},
#else
#define FEW_KERNELS(K)
#define FEW_LIST(N, SHORT)
#endif
