/* Between torch's tensors and planes of bytes, and between planes of different layouts. */

#include "../bytes.h"

typedef struct { /* how a value lies in planes */
  int64_t columns, rows;          /* bytes from row to row, and rows from image to image, padding included */
  int64_t height, width, images;
  int64_t plane, lead;            /* bytes of a plane, and of the padding before the first one */
  int64_t fill;                   /* the value of padding; -1: nothing reads it */
} planes;

typedef struct {
  planes in, out;
  float scale;        /* quantize: 1 / scale; dequantize: scale */
  int64_t zero_point;
  int64_t number;     /* bytes of a number in torch's tensor: 4 for floats, 1 for bytes */
  int64_t stride_row, stride_column, phases; /* split: planes of every n-th pixel, one for each phase in use */
  const int32_t *phase; /* row and column of each */
} int8_copy;

typedef uint8_t narrow __attribute__((vector_size(LANES), aligned(1), may_alias));

/* Fill the padding of one plane, by filling all of it: the pixels are written next. */
INLINE void fill_plane(const planes *p, char *plane, int first) {
  if (p->fill < 0) return;
  if (first) memset(plane - p->lead, (int)p->fill, p->lead);
  memset(plane, (int)p->fill, p->plane);
}

INLINE uint8_t quantize_one(float x, float scale, int64_t zero_point) {
  float y = x * scale;
  y = y > -512.0f ? y : -512.0f; /* so NaN becomes the lowest value */
  y = y < 512.0f ? y : 512.0f;
  const int64_t n = (int64_t)((y + 12582912.0f) - 12582912.0f) + zero_point; /* adding 1.5 * 2^23 rounds to an integer */
  return n < 0 ? 0 : n > 255 ? 255 : n;
}

static void quantize_row(const float *x, uint8_t *y, int64_t n, float scale, int64_t zero_point) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vec v = *(const loose *)(x + i) * scale;
    v = smaller(splat(512), larger(v, splat(-512)));
    ints q = __builtin_convertvector((v + 12582912.0f) - 12582912.0f, ints) + (int32_t)zero_point;
    q &= ~(q < 0);
    q = (q & ~(q > 255)) | ((q > 255) & 255);
    *(narrow *)(y + i) = __builtin_convertvector(q, narrow);
  }
  for (; i < n; i++) y[i] = quantize_one(x[i], scale, zero_point);
}

/* torch's tensor -> planes; floats are quantized, bytes are copied. */
void op_int8_pack(const context *c, const step *s) {
  const int8_copy *k = s->own;
  const planes *p = &k->out;
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    char *out = at(c, &s->out) + o * s->out.channel;
    fill_plane(p, out, o == 0);
    for (int64_t i = 0; i < p->images; i++)
      for (int64_t y = 0; y < p->height; y++) {
        const char *in = at(c, &s->in) + (((i * s->channels + o) * p->height + y) * p->width) * k->number;
        char *row = out + (i * p->rows + y) * p->columns;
        if (k->number == 1) memcpy(row, in, p->width);
        else quantize_row((const float *)in, (uint8_t *)row, p->width, k->scale, k->zero_point);
      }
  }
}

/* Planes of bytes -> torch's tensor; floats are dequantized, bytes are copied. */
void op_int8_unpack(const context *c, const step *s) {
  const int8_copy *k = s->own;
  const planes *p = &k->in;
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++)
    for (int64_t i = 0; i < p->images; i++)
      for (int64_t y = 0; y < p->height; y++) {
        const uint8_t *row = (const uint8_t *)at(c, &s->in) + o * s->in.channel + (i * p->rows + y) * p->columns;
        char *out = at(c, &s->out) + (((i * s->channels + o) * p->height + y) * p->width) * k->number;
        if (k->number == 1) memcpy(out, row, p->width);
        else
          for (int64_t x = 0; x < p->width; x++) ((float *)out)[x] = (float)(row[x] - (int32_t)k->zero_point) * k->scale;
      }
}

/* Planes of floats -> torch's tensor. */
void op_int8_unpack_reals(const context *c, const step *s) {
  const int8_copy *k = s->own;
  const planes *p = &k->in;
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++)
    for (int64_t i = 0; i < p->images; i++)
      for (int64_t y = 0; y < p->height; y++)
        memcpy(at(c, &s->out) + 4 * (((i * s->channels + o) * p->height + y) * p->width),
               at(c, &s->in) + o * s->in.channel + 4 * (i * p->rows + y) * p->columns, 4 * p->width);
}

typedef uint8_t half __attribute__((vector_size(SPAN / 2), aligned(1), may_alias));

/* Copy every n-th byte; writes up to SPAN / 2 bytes more than asked for. */
INLINE void every_nth(const uint8_t *in, uint8_t *out, int64_t n, int64_t stride) {
  if (stride == 1) memcpy(out, in, n);
  else if (stride == 2)
    for (int64_t x = 0; x < n; x += SPAN / 2) *(half *)(out + x) = __builtin_convertvector((words)load_octets(in + 2 * x), half);
  else
    for (int64_t x = 0; x < n; x++) out[x] = in[x * stride];
}

/* Write one image of a phase, and the padding between its rows. Nothing after its last pixel is touched. */
static void split_image(const int8_copy *k, const uint8_t *in, uint8_t *out, int64_t height, int64_t width) {
  const int64_t from = k->stride_row * k->in.columns, to = k->out.columns, end = (height - 1) * to + width;
  uint8_t row[width + SPAN];
  for (int64_t y = 0; y < height; y++) {
    if (y * to + width + SPAN / 2 <= end) {
      every_nth(in + y * from, out + y * to, width, k->stride_column); /* the next rows overwrite what is too much */
    } else {
      every_nth(in + y * from, row, width, k->stride_column);
      memcpy(out + y * to, row, width);
    }
  }
  if (k->out.fill >= 0)
    for (int64_t y = 0; y + 1 < height; y++)
      for (int64_t x = width; x < to; x++) out[y * to + x] = (uint8_t)k->out.fill;
}

/* Split planes into those of every n-th row and column: a strided convolution reads these like any other. */
void op_int8_split(const context *c, const step *s) {
  const int8_copy *k = s->own;
  const planes *p = &k->in, *q = &k->out;
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++)
    for (int64_t f = 0; f < k->phases; f++) {
      const int64_t top = k->phase[2 * f], left = k->phase[2 * f + 1];
      const int64_t height = (p->height - top + k->stride_row - 1) / k->stride_row;
      const int64_t width = (p->width - left + k->stride_column - 1) / k->stride_column;
      const uint8_t *in = (const uint8_t *)at(c, &s->in) + o * s->in.channel + top * p->columns + left;
      char *out = at(c, &s->out) + (o * k->phases + f) * s->out.channel;
      if (height <= 0 || width <= 0) {
        fill_plane(q, out, o == 0 && f == 0);
        continue;
      }
      if (q->fill >= 0 && o == 0 && f == 0) memset(out - q->lead, (int)q->fill, q->lead);
      for (int64_t i = 0; i < p->images; i++) {
        uint8_t *image = (uint8_t *)out + i * q->rows * q->columns;
        split_image(k, in + i * p->rows * p->columns, image, height, width);
        const int64_t used = (height - 1) * q->columns + width, start = i * q->rows * q->columns;
        const int64_t whole = i + 1 < p->images ? q->rows * q->columns : q->plane - start;
        if (q->fill >= 0) memset(image + used, (int)q->fill, whole - used);
      }
    }
}

typedef struct {
  int64_t block, channels, phases; /* channels that are interleaved; channels of the input; planes of each channel */
  int64_t plane, lead;             /* positions of a plane; bytes before the first output plane */
  uint8_t fill;
} int8_interleave;

/* The 4 vectors of 4 interleaved rows, or of 2, in the order of positions. */
INLINE quad order_rows_of_4(quad q) {
#if SPAN == 64
  const __m512i a = (__m512i)q.part[0], b = (__m512i)q.part[1], c = (__m512i)q.part[2], d = (__m512i)q.part[3];
  const __m512i l = _mm512_shuffle_i32x4(a, b, 0x44), h = _mm512_shuffle_i32x4(a, b, 0xEE);
  const __m512i l2 = _mm512_shuffle_i32x4(c, d, 0x44), h2 = _mm512_shuffle_i32x4(c, d, 0xEE);
  return (quad){{(octets)_mm512_shuffle_i32x4(l, l2, 0x88), (octets)_mm512_shuffle_i32x4(l, l2, 0xDD),
                 (octets)_mm512_shuffle_i32x4(h, h2, 0x88), (octets)_mm512_shuffle_i32x4(h, h2, 0xDD)}};
#elif SPAN == 32
  const __m256i a = (__m256i)q.part[0], b = (__m256i)q.part[1], c = (__m256i)q.part[2], d = (__m256i)q.part[3];
  return (quad){{(octets)_mm256_permute2x128_si256(a, b, 0x20), (octets)_mm256_permute2x128_si256(c, d, 0x20),
                 (octets)_mm256_permute2x128_si256(a, b, 0x31), (octets)_mm256_permute2x128_si256(c, d, 0x31)}};
#else
  return q;
#endif
}
INLINE void order_rows_of_2(octets *l, octets *h) {
#if SPAN == 64
  const __m512i low = (__m512i)*l, high = (__m512i)*h;
  *l = (octets)_mm512_permutex2var_epi64(low, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high);
  *h = (octets)_mm512_permutex2var_epi64(low, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), high);
#elif SPAN == 32
  const __m256i low = (__m256i)*l, high = (__m256i)*h;
  *l = (octets)_mm256_permute2x128_si256(low, high, 0x20), *h = (octets)_mm256_permute2x128_si256(low, high, 0x31);
#endif
}

/* Interleave neighbouring channels position by position, padding too. The last channel stands for channels that are missing. */
void op_int8_interleave(const context *c, const step *s) {
  const int8_interleave *k = s->own;
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    const uint8_t *row[4];
    for (int64_t r = 0; r < k->block; r++) {
      const int64_t channel = o / k->phases * k->block + r, known = channel < k->channels ? channel : k->channels - 1;
      row[r] = (const uint8_t *)at(c, &s->in) + (known * k->phases + o % k->phases) * s->in.channel;
    }
    char *out = at(c, &s->out) + o * s->out.channel;
    if (o == 0) memset(out - k->lead, k->fill, k->lead);
    for (int64_t x = 0; x < k->plane; x += SPAN) {
      if (k->block == 4) {
        const quad q = order_rows_of_4(interleave(row[0] + x, row[1] + x, row[2] + x, row[3] + x));
        UNROLL for (int p = 0; p < 4; p++) store_octets(out + 4 * x + SPAN * p, q.part[p]);
      } else {
        const octets a = load_octets(row[0] + x), b = load_octets(row[1] + x);
        octets l = low_8(a, b), h = high_8(a, b);
        order_rows_of_2(&l, &h);
        store_octets(out + 2 * x, l);
        store_octets(out + 2 * x + SPAN, h);
      }
    }
  }
}

#if SPAN == 64 && defined(__AVX512VBMI__)
/* Copies and maxima with permutations of bytes. */

typedef struct { /* bytes of an output vector that come from one place */
  int64_t from;     /* bytes from the input plane's start */
  uint64_t where;   /* one bit for each byte of the output */
  uint8_t index[64];
} int8_piece;

typedef struct {
  const int8_piece *pieces; /* of all vectors, one after the other */
  const int32_t *counts;    /* of each vector of the output planes that belong to one input plane */
  const char *initial;      /* of each byte there: the value of padding, or 0 */
  int64_t vectors, lead;
  uint8_t fill;
} int8_selection;

INLINE void select_planes(const int N, const int8_selection *k, const char *in, int64_t in_channel, char *out) {
  const int8_piece *piece = k->pieces;
  for (int64_t v = 0; v < k->vectors; v++) {
    __m512i x[4];
    UNROLL for (int n = 0; n < N; n++) x[n] = _mm512_loadu_si512(k->initial + 64 * v);
    for (int32_t left = k->counts[v]; left > 0; left--, piece++) {
      const __m512i index = _mm512_loadu_si512(piece->index);
      const uint64_t where = piece->where;
      UNROLL for (int n = 0; n < N; n++) {
        const __m512i bytes = (__m512i)load_octets(in + n * in_channel + piece->from);
        x[n] = _mm512_max_epu8(x[n], _mm512_maskz_permutexvar_epi8(where, index, bytes));
      }
    }
    UNROLL for (int n = 0; n < N; n++) _mm512_storeu_si512(out + 64 * (n * k->vectors + v), x[n]);
  }
}

/* Every output byte is the largest of some bytes of its input plane. */
void op_int8_select(const context *c, const step *s) {
  const int8_selection *k = s->own;
  int64_t o, last;
  share(c, s->channels, &o, &last);
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  if (o == 0 && last > 0) memset(out - k->lead, k->fill, k->lead);
  for (; o + 4 <= last; o += 4) select_planes(4, k, in + o * s->in.channel, s->in.channel, out + 64 * o * k->vectors);
  for (; o < last; o++) select_planes(1, k, in + o * s->in.channel, s->in.channel, out + 64 * o * k->vectors);
}
#endif

/* Every pixel of every channel becomes a channel of its own. */
void op_int8_flatten(const context *c, const step *s) {
  const int8_copy *k = s->own;
  const planes *p = &k->in, *q = &k->out;
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++)
    for (int64_t y = 0; y < p->height; y++)
      for (int64_t x = 0; x < p->width; x++) {
        char *out = at(c, &s->out) + ((o * p->height + y) * p->width + x) * s->out.channel;
        fill_plane(q, out, o + y + x == 0);
        for (int64_t i = 0; i < p->images; i++)
          out[i * q->rows * q->columns] = (at(c, &s->in) + o * s->in.channel)[(i * p->rows + y) * p->columns + x];
      }
}
