/* Convolutions and linear layers on bytes, pixel by pixel: where there are too few positions to fill the vectors of planes.

   A pixel is all channels of one position, one after the other. A vector of sums belongs to 16 filters at one position. For
   each filter, one permutation picks 4 channels from two blocks of 64 channels of a pixel; one instruction multiplies them by
   the filter's weights and adds up. Filters that use fewer of the channels than the others of their group get weights of 0.
   The indices and weights of a group serve up to 8 positions, which stay in registers.

   docs/int8.md defines the results. These operations need AVX-512 with VNNI and VBMI. */

#include "../bytes.h"

#if SPAN == 64 && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

int64_t engine_permutes(void) { return 1; }

typedef struct { /* 16 filters */
  const char *picks;     /* for each pick: 64 indices, then 64 weights; 4 for each filter */
  const int32_t *blocks; /* for every second pick: bytes from a position to both blocks of 64 channels */
  int64_t count;         /* of the picks */
} pixel_filters;

typedef struct {
  const pixel_filters *filters;
  const int32_t *start; /* of each channel's sum */
  const float *scale, *offset;
  const int32_t *from, *to, *added; /* bytes to each position: in the input, the output and the value to add */
  const int32_t *holes;             /* padding of the output: first byte and length of each piece */
  int64_t hole_count, groups, channels, positions, tile;
  int64_t narrow;            /* how results are rescaled */
  int64_t real;              /* write floats to planes, not bytes to pixels */
  float residual;            /* scale of the value to add */
  float real_low, real_high; /* clamp floats */
  uint8_t low, high, fill;   /* clamp bytes; the value of padding */
} int8_pixels;

typedef struct { /* 16 filters, and where their values lie */
  const int8_pixels *k;
  const pixel_filters *filters;
  const uint8_t *in;
  const char *add;
  char *out;
  int64_t first, out_channel; /* the first filter's channel; bytes from channel to channel, in planes */
} pixel_group;

INLINE __m512i load_any(const void *p) { return (__m512i)load_octets(p); }
INLINE __m512i add_picked(__m512i total, __m512i x, __m512i w) { return (__m512i)add_products((sums)total, (octets)x, (weights){(sums)w}); }

INLINE void write_any(char *out, __m512i sums16, __m512i low, __m512i high) { /* 16 numbers as bytes */
  _mm_storeu_si128((void *)out, _mm512_cvtepi32_epi8(_mm512_min_epi32(high, _mm512_max_epi32(low, sums16))));
}

/* Rescale the sums of 16 filters at `count` positions and write them: in a wide layer, or as floats. */
static __attribute__((noinline)) void pixel_rescale_wide(const __m512i *acc, int count, const pixel_group *g, int64_t position) {
  const int8_pixels *k = g->k;
  const __m512 scale = _mm512_loadu_ps(k->scale + g->first), offset = _mm512_loadu_ps(k->offset + g->first);
  for (int t = 0; t < count; t++) {
    char *out = g->out + k->to[position + t];
    __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[t]), scale, offset);
    if (k->added) {
      const __m512i r = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(g->add + k->added[position + t])));
      y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(r), _mm512_set1_ps(k->residual), y);
    }
    if (k->real) {
      float reals[16];
      _mm512_storeu_ps(reals, _mm512_min_ps(_mm512_set1_ps(k->real_high), _mm512_max_ps(_mm512_set1_ps(k->real_low), y)));
      for (int64_t f = 0; f < 16 && g->first + f < k->channels; f++) memcpy(out + f * g->out_channel, reals + f, 4);
    } else {
      write_any(out, _mm512_cvtps_epi32(y), _mm512_set1_epi32(k->low), _mm512_set1_epi32(k->high));
    }
  }
}

INLINE void pixel_rescale(const int T, const __m512i *acc, const pixel_group *g, int64_t position) {
  const int8_pixels *k = g->k;
  if (!k->narrow) {
    __m512i copy[8]; /* in memory; the sums themselves stay in registers */
    UNROLL for (int t = 0; t < T; t++) copy[t] = acc[t];
    pixel_rescale_wide(copy, T, g, position);
    return;
  }
  const __m512 scale = _mm512_loadu_ps(k->scale + g->first), offset = _mm512_loadu_ps(k->offset + g->first);
  const __m512i low = _mm512_set1_epi32(k->low), high = _mm512_set1_epi32(k->high);
  const int32_t *to = k->to + position;
  char *out = g->out;
  if (k->added) {
    const int32_t *added = k->added + position;
    const __m512 residual = _mm512_set1_ps(k->residual);
    UNROLL for (int t = 0; t < T; t++) {
      const __m512i r = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(g->add + added[t])));
      const __m512 y = _mm512_fmadd_ps(_mm512_castsi512_ps(acc[t]), scale, offset);
      write_any(out + to[t], _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_cvtepi32_ps(r), residual, y)), low, high);
    }
  } else { /* adding 1.5 * 2^23 has rounded: the bits are those of that float, plus the result */
    const __m512i magic = _mm512_set1_epi32(0x4B400000), first = _mm512_add_epi32(low, magic), last = _mm512_add_epi32(high, magic);
    UNROLL for (int t = 0; t < T; t++)
      write_any(out + to[t], _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(acc[t]), scale, offset)), first, last);
  }
}

INLINE void pixel_tile(const int T, const pixel_group *g, int64_t position) {
  const pixel_filters *f = g->filters;
  const uint8_t *x[8];
  __m512i acc[8], other[8]; /* every second pick has sums of its own: an addition waits for the one before it */
  UNROLL for (int t = 0; t < T; t++) {
    x[t] = g->in + g->k->from[position + t];
    acc[t] = load_any(g->k->start + g->first);
    other[t] = _mm512_setzero_si512();
  }
  const char *pick = f->picks;
  for (const int32_t *block = f->blocks, *end = block + f->count; block < end; block += 2, pick += 256) {
    const __m512i index = load_any(pick), weight = load_any(pick + 64), next_index = load_any(pick + 128), next_weight = load_any(pick + 192);
    UNROLL for (int line = 0; line < 256; line += 64) __builtin_prefetch(pick + PREFETCHED + line, 0, 2);
    const int64_t a = block[0], b = block[1];
    UNROLL for (int t = 0; t < T; t++) {
      const __m512i first = load_any(x[t] + a), second = load_any(x[t] + b);
      acc[t] = add_picked(acc[t], _mm512_permutex2var_epi8(first, index, second), weight);
      const __m512i picked = _mm512_permutex2var_epi8(first, next_index, second);
      if (T < 4) other[t] = add_picked(other[t], picked, next_weight);
      else acc[t] = add_picked(acc[t], picked, next_weight);
    }
  }
  UNROLL for (int t = 0; t < T; t++) acc[t] = _mm512_add_epi32(acc[t], other[t]);
  pixel_rescale(T, acc, g, position);
}

#define PIXEL_TILES(K) K(8) K(7) K(4) K(2) K(1)
#define PIXEL_DEFINE(T) \
  static void pixel_tile_##T(const pixel_group *g, int64_t position) { pixel_tile(T, g, position); }
PIXEL_TILES(PIXEL_DEFINE)

static void fill_holes(const int32_t *holes, int64_t count, char *out, uint8_t fill) {
  for (int64_t i = 0; i < count; i++) memset(out + holes[2 * i], fill, holes[2 * i + 1]);
}

void op_int8_pixels(const context *c, const step *s) {
  const int8_pixels *k = s->own;
  int64_t first, last;
  share(c, k->groups, &first, &last);
  for (int64_t i = first; i < last; i++) {
    const pixel_group g = {
        .k = k,
        .filters = k->filters + i,
        .in = (const uint8_t *)at(c, &s->in),
        .add = k->added ? at(c, &s->add) + 16 * i : NULL,
        .out = at(c, &s->out) + 16 * i * (k->real ? s->out.channel : 1),
        .first = 16 * i,
        .out_channel = s->out.channel,
    };
    int64_t p = 0;
#define PIXEL_RUN(T) \
  for (; k->tile >= T && p + T <= k->positions; p += T) pixel_tile_##T(&g, p);
    PIXEL_TILES(PIXEL_RUN)
  }
  if (c->part == 0) fill_holes(k->holes, k->hole_count, at(c, &s->out), k->fill);
}

/* ---- between planes and pixels */

typedef struct {
  const int32_t *place; /* for each byte of a plane: where its pixel lies; -1: it holds no pixel */
  const int32_t *holes; /* padding of the pixels: first byte and length of each piece */
  int64_t hole_count, channels, plane, lead;
  uint8_t fill; /* the value of padding */
} int8_turn;

/* Transpose 16 x 16 bytes in each quarter of 16 vectors: shuffling their halves perfectly, four times, does it. */
INLINE void transpose_quarters(const __m512i *rows, __m512i *out) {
  __m512i a[16], b[16];
#define SHUFFLE(from, to) \
  UNROLL for (int i = 0; i < 8; i++) { \
    to[2 * i] = _mm512_unpacklo_epi8(from[i], from[i + 8]); \
    to[2 * i + 1] = _mm512_unpackhi_epi8(from[i], from[i + 8]); \
  }
  SHUFFLE(rows, a) SHUFFLE(a, b) SHUFFLE(b, a) SHUFFLE(a, out)
}

/* Transpose 64 x 64 bytes: out[i] holds byte i of every row. */
static void transpose_64(const __m512i *rows, __m512i *out) {
  __m512i part[64]; /* quarter j of part[16 g + i] holds byte 16 j + i of the rows from 16 g on */
  for (int g = 0; g < 64; g += 16) transpose_quarters(rows + g, part + g);
  for (int i = 0; i < 16; i++) {
    const __m512i a = _mm512_shuffle_i32x4(part[i], part[16 + i], 0x44), b = _mm512_shuffle_i32x4(part[i], part[16 + i], 0xEE);
    const __m512i c = _mm512_shuffle_i32x4(part[32 + i], part[48 + i], 0x44), d = _mm512_shuffle_i32x4(part[32 + i], part[48 + i], 0xEE);
    out[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    out[16 + i] = _mm512_shuffle_i32x4(a, c, 0xDD);
    out[32 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
    out[48 + i] = _mm512_shuffle_i32x4(b, d, 0xDD);
  }
}

void op_int8_to_pixels(const context *c, const step *s) {
  const int8_turn *k = s->own;
  __m512i rows[64], pixels[64];
  int64_t first, last;
  share(c, (k->channels + 63) / 64, &first, &last);
  for (int64_t block = first; block < last; block++) {
    const int64_t stride = s->in.channel, some = k->channels - 64 * block, count = some < 64 ? some : 64;
    const char *in = at(c, &s->in) + 64 * block * stride;
    char *out = at(c, &s->out) + 64 * block;
    for (int64_t o = count; o < 64; o++) rows[o] = _mm512_setzero_si512();
    for (int64_t v = 0; v < k->plane; v += 64) {
      const int32_t *place = k->place + v;
      for (int64_t o = 0; o < count; o++) rows[o] = load_any(in + o * stride + v);
      transpose_64(rows, pixels);
      for (int64_t i = 0; i < 64; i++)
        if (place[i] >= 0) _mm512_storeu_si512(out + place[i], pixels[i]);
    }
  }
  if (c->part == 0) fill_holes(k->holes, k->hole_count, at(c, &s->out), k->fill);
}

void op_int8_from_pixels(const context *c, const step *s) {
  const int8_turn *k = s->own;
  const __m512i fill = _mm512_set1_epi8((char)k->fill);
  __m512i rows[64], pixels[64];
  int64_t first, last;
  share(c, (k->channels + 63) / 64, &first, &last);
  if (c->part == 0) memset(at(c, &s->out) - k->lead, k->fill, k->lead);
  for (int64_t block = first; block < last; block++) {
    const int64_t stride = s->out.channel, some = k->channels - 64 * block, count = some < 64 ? some : 64;
    const char *in = at(c, &s->in) + 64 * block;
    char *out = at(c, &s->out) + 64 * block * stride;
    for (int64_t v = 0; v < k->plane; v += 64) {
      const int32_t *place = k->place + v;
      for (int64_t i = 0; i < 64; i++) pixels[i] = place[i] < 0 ? fill : load_any(in + place[i]);
      transpose_64(pixels, rows);
      for (int64_t o = 0; o < count; o++) _mm512_storeu_si512(out + o * stride + v, rows[o]);
    }
  }
}

/* ---- maximum over a window */

typedef struct {
  const int32_t *from, *to; /* bytes to each position: in the input, to the first pixel of the window; in the output */
  const int32_t *taps;      /* bytes from there to every pixel of the window */
  const uint8_t *inside;    /* for each position and tap: does it lie inside the image? */
  const int32_t *holes;     /* padding of the output: first byte and length of each piece */
  int64_t hole_count, positions, count, blocks;
  uint8_t fill;
} int8_pixel_pool;

void op_int8_pool_pixels(const context *c, const step *s) {
  const int8_pixel_pool *k = s->own;
  int64_t first, last;
  share(c, k->positions, &first, &last);
  const char *from = at(c, &s->in);
  char *to = at(c, &s->out);
  for (int64_t p = first; p < last; p++) {
    const uint8_t *inside = k->inside + p * k->count;
    for (int64_t block = 0; block < 64 * k->blocks; block += 64) {
      const char *in = from + k->from[p] + block;
      __m512i m = _mm512_setzero_si512();
      for (int64_t i = 0; i < k->count; i++)
        if (inside[i]) m = _mm512_max_epu8(m, load_any(in + k->taps[i]));
      _mm512_storeu_si512(to + k->to[p] + block, m);
    }
  }
  if (c->part == 0) fill_holes(k->holes, k->hole_count, to, k->fill);
}

#else
int64_t engine_permutes(void) { return 0; }
#endif
