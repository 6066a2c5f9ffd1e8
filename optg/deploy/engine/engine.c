/* The engine that runs a sparse network on a CPU.

   Data. One vector holds LANES numbers that lie in as many *lanes*: an image cut into a grid of blocks gives each block a
   lane, a batch gives each image a lane. A plane (one channel) is a small image of vectors, with a halo around it that repeats
   the neighbours' edges. So every tap of every convolution, whatever its kernel, stride and dilation, is an aligned load at
   a constant offset, and no arithmetic ever crosses lanes.

   Work. A convolution is a list of taps per output channel: (offset of the input, weight), zeros left out. A tile of outputs
   stays in registers while the taps stream by; each tap costs one multiply-add with a memory operand per vector of the tile.
   Where weights are dense, a few output channels share their taps and so their loads. Where a tile sees more of the input than
   the first cache holds, it comes several times, each time for some of the input's channels.

   Order. Threads share out whole output channels or whole images: every number is made by the same operations in the same
   order, whatever the number of threads. */

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- vectors */

#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#elif defined(__SSE2__) || defined(__ARM_NEON)
#define LANES 4
#else
#define LANES 1
#endif
#endif

/* Vector registers that hold a tile; the others hold a weight and what the compiler needs. */
#if LANES == 16 || defined(__ARM_NEON)
#define ACCUMULATORS 28
#else
#define ACCUMULATORS 12
#endif

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* at any address */
typedef int32_t ints __attribute__((vector_size(4 * LANES), may_alias));

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
#define BYTES ((int64_t)sizeof(vec))

INLINE vec splat(float x) { return (vec){0} + x; }
INLINE vec choose(ints where, vec yes, vec no) { return (vec)(((ints)yes & where) | ((ints)no & ~where)); }

#if LANES == 16 && defined(__AVX512F__)
#include <immintrin.h>
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); } /* NaN if b is NaN */
INLINE vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif LANES == 8 && defined(__AVX__)
#include <immintrin.h>
INLINE vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec smaller(vec a, vec b) { return choose(a < b, a, b); }
#endif

/* e^x to about 2e-7: x = n ln 2 + r, and a polynomial in r. */
INLINE vec exponential(vec x) {
  x = smaller(splat(88.3f), larger(splat(-87.3f), x));
  const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
  const vec n = (x * 1.44269504f + magic) - magic;
  const vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const ints power = ((ints)(n + magic) - (ints)magic + 127) << 23;
  return p * (vec)power;
}

enum { PLAIN, HARDSWISH, HARDSIGMOID, SIGMOID, SILU, TANH, LEAKY, ACTIVATIONS };

INLINE vec activate(int64_t which, float slope, vec x) {
  switch (which) {
    case HARDSWISH: return x * smaller(splat(6), larger(splat(0), x + 3)) / 6;
    case HARDSIGMOID: return smaller(splat(6), larger(splat(0), x + 3)) / 6;
    case SIGMOID: return 1 / (1 + exponential(-x));
    case SILU: return choose(x < splat(-100), splat(-0.0f), x / (1 + exponential(-x))); /* whose exponent has an end */
    case TANH: { /* 1 - 2 / (1 + e^2x) loses digits near 0, where the odd series is good */
      const vec s = x * x, series = x * (1 - s * (1.0f / 3 - s * (2.0f / 15 - s * (17.0f / 315 - s * (62.0f / 2835)))));
      return choose(s < splat(0.04f), series, 1 - 2 / (1 + exponential(2 * x)));
    }
    case LEAKY: return choose(x < splat(0), x * slope, x);
    default: return x;
  }
}

/* ---- what a program is made of; the Python side fills these structs */

typedef struct { /* where a value lies */
  int64_t buffer; /* 0: nowhere, 1: the arena, from 2: what the caller handed in */
  int64_t start;  /* bytes to the first vector that is not halo */
  int64_t row, channel; /* bytes from one to the next */
  int64_t pass, group;  /* bytes to add for each image of a group, for each group of a batch */
} view;

typedef struct { /* the halo of a plane: vector `to` is the vector at `from`, its lanes moved, where the mask says so */
  int32_t to, from, mask;
} edge;

typedef struct {
  const edge *edges;
  int64_t count;
  const ints *masks;
  float fill; /* for all other lanes: 0, or -infinity before a maximum */
} halo;

typedef struct { /* a rectangle of positions, and the kernels for it */
  int64_t in, out, add; /* bytes from the views' start */
  int32_t rows, columns;
  int32_t shared, single; /* kernels for a group of channels, and for one left over */
  int32_t first, last;    /* of several times that it comes, each for some of the input's channels? */
  int64_t filters;        /* tiles may have filters of their own, at an edge or for some channels: the first of them */
} tile;

enum { SIDES = 9 }; /* (all rows, all but the first, all but the last) times the same for columns */

typedef struct { /* output channels that share their taps */
  const char *taps; /* each an int32 offset in bytes and a float for every channel */
  int64_t count;
  int64_t channel, width;
  int32_t framed[SIDES + 1]; /* for framed kernels: how many taps see which part of the image (the last is not used) */
} filter;

typedef struct { /* a number to copy, in bytes from the planes' starts */
  int32_t to, from;
} move;

enum { CONVOLUTION, POOL_MAX, POOL_MEAN, MEAN, COPY, POINTWISE_ADD, POINTWISE_MUL, SOFTMAX };

typedef struct {
  int64_t kind, channels;
  view in, add, out;
  int64_t rows, columns; /* positions of the output */
  int64_t activation;
  float low, high; /* ReLU: 0 and infinity */
  float slope, scale;
  halo finish;
  /* convolution */
  const tile *tiles;
  const filter *filters;
  const int64_t *cost; /* of the filters before each one, for a fair share-out */
  const float *bias;
  int64_t tile_count, filter_count, stride_row, stride_column, filters_outside;
  const int64_t *strips; /* the first tile of each strip of rows; a chain of steps goes through them strip by strip */
  int64_t strip_count, chained; /* how many steps that follow are in the chain */
  /* pooling */
  int64_t window_rows, window_columns, dilation_row, dilation_column;
  const vec *weights; /* of a mean's pixels, for each position; as masks where it is over all of them */
  /* copying */
  const move *moves;
  int64_t move_count, fill_count; /* fills come after the moves, and come from nowhere */
  /* lanes of one image, in a mean over images */
  int64_t images, lanes;
} step;

typedef struct {
  const step *steps;
  int64_t count, passes; /* each step once per image of the group, or once for all of them */
} section;

typedef struct {
  char **buffers; /* of views; buffers[1] is the thread's arena */
  int64_t pass, group;
  int64_t part, parts; /* this thread's share of every step */
} context;

INLINE char *at(const context *c, const view *v) {
  return v->buffer ? c->buffers[v->buffer] + v->start + c->pass * v->pass + c->group * v->group : NULL;
}

/* ---- convolution kernels */

typedef struct {
  const char *in;
  char *out;
  const char *add;
  int64_t in_row, in_column, out_row, out_channel, add_row, add_channel; /* in_row, in_column: with the stride */
  const filter *filter;
  const float *bias;
  float low, high;
  int64_t resumes; /* start with what the output holds, not with the bias */
} job;

/* One tap, on a tile of G channels, R rows and W columns: ROWS and COLUMNS are 0 if it sees all of them, 1 if not the first,
   2 if not the last. */
INLINE void add_tap(const int G, const int R, const int W, const int ROWS, const int COLUMNS, const char *tap,
                    const char *const *row, int64_t column, vec *sums) {
  const int64_t offset = *(const int32_t *)tap;
  const float *weight = (const float *)(tap + 4);
  UNROLL for (int r = ROWS == 1; r < R - (ROWS == 2); r++) {
    UNROLL for (int w = COLUMNS == 1; w < W - (COLUMNS == 2); w++) {
      const vec x = *(const vec *)(row[r] + offset + w * column);
      UNROLL for (int g = 0; g < G; g++) sums[(g * R + r) * W + w] += x * weight[g];
    }
  }
}

enum { AHEAD = 2048 }; /* bytes */

/* So many taps; returns the one after the last. CHAINS at a time go into sums of their own: one chain of additions would wait
   for itself. */
INLINE const char *add_taps(const int G, const int R, const int W, const int CHAINS, const int ROWS, const int COLUMNS,
                            const char *tap, int64_t count, const char *const *row, int64_t column, vec *sums) {
  const int64_t size = 4 + 4 * G;
  for (; count >= CHAINS; count -= CHAINS, tap += CHAINS * size) {
    if (G * R * W <= 16) __builtin_prefetch(tap + AHEAD); /* small tiles use up taps faster than memory delivers them */
    UNROLL for (int c = 0; c < CHAINS; c++)
      add_tap(G, R, W, ROWS, COLUMNS, tap + c * size, row, column, sums + c * G * R * W);
  }
  if (CHAINS > 1)
    for (; count > 0; count--, tap += size) add_tap(G, R, W, ROWS, COLUMNS, tap, row, column, sums);
  return tap;
}

/* G channels of R rows of W vectors. S is the stride between columns, 0 if it is only known at run time.
   A framed kernel makes whole rows of a small image. Its taps are sorted by the edge where they see padding, which it leaves
   out: of a 3 x 3 kernel's work on 4 x 4 pixels that is a third, and the input needs no halo. */
INLINE void convolve(const int G, const int R, const int W, const int S, const int FRAMED, const job *j) {
  const int T = G * R * W, CHAINS = T >= (FRAMED ? 10 : 6) ? 1 : T >= (FRAMED ? 5 : 3) ? 2 : 4;
  vec sums[32];
  const char *row[8];
  const int64_t column = S ? S * BYTES : j->in_column;
  UNROLL for (int r = 0; r < R; r++) row[r] = j->in + r * j->in_row;
  if (j->resumes) {
    UNROLL for (int t = 0; t < T; t++)
      sums[t] = *(const vec *)(j->out + t / (R * W) * j->out_channel + t / W % R * j->out_row + t % W * BYTES);
  } else {
    UNROLL for (int t = 0; t < T; t++) sums[t] = splat(j->bias[t / (R * W)]);
  }
  UNROLL for (int t = T; t < CHAINS * T; t++) sums[t] = splat(0);
  const char *tap = j->filter->taps;
  if (FRAMED) {
#define SIDE(ROWS, COLUMNS) \
  tap = add_taps(G, R, W, CHAINS, ROWS, COLUMNS, tap, j->filter->framed[3 * ROWS + COLUMNS], row, column, sums)
    SIDE(0, 0), SIDE(0, 1), SIDE(0, 2), SIDE(1, 0), SIDE(1, 1), SIDE(1, 2), SIDE(2, 0), SIDE(2, 1), SIDE(2, 2);
#undef SIDE
  } else {
    add_taps(G, R, W, CHAINS, 0, 0, tap, j->filter->count, row, column, sums);
  }
  UNROLL for (int t = T; t < CHAINS * T; t++) sums[t % T] += sums[t];
  if (j->add) {
    UNROLL for (int t = 0; t < T; t++)
      sums[t] += *(const vec *)(j->add + t / (R * W) * j->add_channel + t / W % R * j->add_row + t % W * BYTES);
  }
  const vec low = splat(j->low), high = splat(j->high);
  UNROLL for (int t = 0; t < T; t++)
    *(vec *)(j->out + t / (R * W) * j->out_channel + t / W % R * j->out_row + t % W * BYTES) =
        smaller(high, larger(low, sums[t]));
}

/* The list of kernels: rows of tiles, each up to the number of accumulators. */
#define TO_1(K, G, R, S) K(G, R, 1, S)
#define TO_2(K, G, R, S) TO_1(K, G, R, S) K(G, R, 2, S)
#define TO_3(K, G, R, S) TO_2(K, G, R, S) K(G, R, 3, S)
#define TO_4(K, G, R, S) TO_3(K, G, R, S) K(G, R, 4, S)
#define TO_5(K, G, R, S) TO_4(K, G, R, S) K(G, R, 5, S)
#define TO_6(K, G, R, S) TO_5(K, G, R, S) K(G, R, 6, S)
#define TO_7(K, G, R, S) TO_6(K, G, R, S) K(G, R, 7, S)
#define TO_8(K, G, R, S) TO_7(K, G, R, S) K(G, R, 8, S)
#define TO_9(K, G, R, S) TO_8(K, G, R, S) K(G, R, 9, S)
#define TO_12(K, G, R, S) TO_9(K, G, R, S) K(G, R, 10, S) K(G, R, 11, S) K(G, R, 12, S)
#define TO_14(K, G, R, S) TO_12(K, G, R, S) K(G, R, 13, S) K(G, R, 14, S)
#define TO_20(K, G, R, S) \
  TO_14(K, G, R, S) K(G, R, 15, S) K(G, R, 16, S) K(G, R, 17, S) K(G, R, 18, S) K(G, R, 19, S) K(G, R, 20, S)
#define TO_28(K, G, R, S) \
  TO_20(K, G, R, S) K(G, R, 21, S) K(G, R, 22, S) K(G, R, 23, S) K(G, R, 24, S) K(G, R, 25, S) K(G, R, 26, S) \
  K(G, R, 27, S) K(G, R, 28, S)

#if defined(KERNELS) /* a shorter list, to test with */
#elif ACCUMULATORS == 28
#define KERNELS(K) \
  TO_28(K, 1, 1, 1) TO_14(K, 1, 2, 1) TO_9(K, 1, 3, 1) TO_7(K, 1, 4, 1) TO_5(K, 1, 5, 1) TO_4(K, 1, 6, 1) TO_4(K, 1, 7, 1) \
  TO_28(K, 1, 1, 2) TO_14(K, 1, 2, 2) TO_7(K, 1, 3, 2) TO_7(K, 1, 4, 2) TO_8(K, 1, 1, 0) TO_4(K, 1, 2, 0) \
  TO_14(K, 2, 1, 1) TO_7(K, 2, 2, 1) TO_4(K, 2, 3, 1) TO_3(K, 2, 4, 1) TO_14(K, 2, 1, 2) \
  TO_7(K, 4, 1, 1) TO_3(K, 4, 2, 1) TO_2(K, 4, 3, 1) TO_7(K, 4, 1, 2) TO_3(K, 4, 2, 2) TO_4(K, 4, 1, 0) TO_3(K, 8, 1, 1)
#else
#define KERNELS(K) \
  TO_12(K, 1, 1, 1) TO_6(K, 1, 2, 1) TO_4(K, 1, 3, 1) TO_3(K, 1, 4, 1) TO_12(K, 1, 1, 2) TO_6(K, 1, 2, 2) TO_8(K, 1, 1, 0) \
  TO_6(K, 2, 1, 1) TO_3(K, 2, 2, 1) TO_6(K, 2, 1, 2) TO_3(K, 4, 1, 1) TO_3(K, 4, 1, 2) TO_3(K, 4, 1, 0)
#endif

#if ACCUMULATORS == 28
#define FRAMED(K) \
  K(1, 1, 1, 1) K(1, 2, 2, 1) K(1, 3, 3, 1) K(1, 4, 4, 1) K(1, 5, 5, 1) \
  K(1, 3, 7, 1) K(1, 4, 7, 1) K(1, 2, 8, 1) K(1, 3, 8, 1) K(1, 1, 14, 1) K(1, 1, 16, 1)
#else
#define FRAMED(K) K(1, 1, 1, 1) K(1, 2, 2, 1) K(1, 3, 3, 1) K(1, 1, 7, 1) K(1, 1, 8, 1)
#endif

#define DEFINE(G, R, W, S) \
  static void kernel_##G##_##R##_##W##_##S(const job *j) { convolve(G, R, W, S, 0, j); }
#define DEFINE_FRAMED(G, R, W, S) \
  static void framed_##G##_##R##_##W##_##S(const job *j) { convolve(G, R, W, S, 1, j); }
KERNELS(DEFINE)
FRAMED(DEFINE_FRAMED)

typedef struct {
  void (*run)(const job *);
  int32_t channels, rows, columns, stride, framed;
} kernel;

#define LIST(G, R, W, S) {kernel_##G##_##R##_##W##_##S, G, R, W, S, 0},
#define LIST_FRAMED(G, R, W, S) {framed_##G##_##R##_##W##_##S, G, R, W, S, 1},
static const kernel kernels[] = {KERNELS(LIST) FRAMED(LIST_FRAMED)};

int64_t engine_lanes(void) { return LANES; }
int64_t engine_accumulators(void) { return ACCUMULATORS; }
int64_t engine_kernel_count(void) { return sizeof kernels / sizeof *kernels; }
void engine_kernel(int64_t i, int32_t *shape) { memcpy(shape, &kernels[i].channels, 5 * sizeof *shape); }

/* ---- the steps */

INLINE int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

static void finish(const halo *h, char *plane) {
  const vec fill = splat(h->fill);
  for (int64_t e = 0; e < h->count; e++) {
    const edge *g = h->edges + e;
    *(vec *)(plane + g->to) = choose(h->masks[g->mask], *(const loose *)(plane + g->from), fill);
  }
}

/* The first and last of n things that fall to this thread. */
INLINE void share(const context *c, int64_t n, int64_t *first, int64_t *last) {
  *first = n * c->part / c->parts;
  *last = n * (c->part + 1) / c->parts;
}

static int64_t filter_at(const step *s, int64_t cost) { /* the first filter with so much work before it */
  int64_t low = 0, high = s->filter_count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (s->cost[middle] < cost) low = middle + 1;
    else high = middle;
  }
  return low;
}

static void one_tile(const step *s, const tile *t, int64_t number, const char *in, char *out, const char *add) {
  const filter *f = s->filters + t->filters + number;
  out += f->channel * s->out.channel + t->out;
  const job j = {
      .in = in + t->in,
      .out = out,
      .add = add && t->first ? add + f->channel * s->add.channel + t->add : NULL,
      .in_row = s->stride_row * s->in.row,
      .in_column = s->stride_column * BYTES,
      .out_row = s->out.row,
      .out_channel = s->out.channel,
      .add_row = s->add.row,
      .add_channel = s->add.channel,
      .filter = f,
      .bias = s->bias + f->channel,
      .low = t->last ? s->low : -INFINITY,
      .high = t->last ? s->high : INFINITY,
      .resumes = !t->first,
  };
  kernels[f->width > 1 ? t->shared : t->single].run(&j);
  if (s->activation == PLAIN || !t->last) return;
  for (int64_t g = 0; g < f->width; g++)
    for (int32_t r = 0; r < t->rows; r++)
      for (int32_t w = 0; w < t->columns; w++) {
        vec *x = (vec *)(out + g * s->out.channel + r * s->out.row + w * BYTES);
        *x = activate(s->activation, s->slope, *x);
      }
}

static void some_tiles(const context *c, const step *s, int64_t from, int64_t to, int64_t first, int64_t last) {
  const char *in = at(c, &s->in), *add = at(c, &s->add);
  char *out = at(c, &s->out);
  if (s->filters_outside) {
    for (int64_t f = first; f < last; f++)
      for (int64_t t = from; t < to; t++) one_tile(s, s->tiles + t, f, in, out, add);
  } else {
    for (int64_t t = from; t < to; t++)
      for (int64_t f = first; f < last; f++) one_tile(s, s->tiles + t, f, in, out, add);
  }
}

static void finish_filters(const context *c, const step *s, int64_t first, int64_t last) {
  if (!s->finish.count) return;
  char *out = at(c, &s->out);
  for (int64_t f = first; f < last; f++)
    for (int64_t g = 0; g < s->filters[f].width; g++) finish(&s->finish, out + (s->filters[f].channel + g) * s->out.channel);
}

static void convolution(const context *c, const step *s) {
  const int64_t total = s->cost[s->filter_count];
  const int64_t first = filter_at(s, total * c->part / c->parts);
  const int64_t last = c->part + 1 == c->parts ? s->filter_count : filter_at(s, total * (c->part + 1) / c->parts);
  some_tiles(c, s, 0, s->tile_count, first, last);
  finish_filters(c, s, first, last);
}

/* Convolutions of one pixel that follow each other: strip by strip, so that a strip is still in the cache when it is read. */
static void chain(const context *c, const step *first, int64_t *times) {
  for (int64_t i = 0; i < first->strip_count; i++)
    for (const step *s = first; s <= first + first->chained; s++) {
      const int64_t start = times ? now() : 0;
      some_tiles(c, s, s->strips[i], s->strips[i + 1], 0, s->filter_count);
      if (times) times[s - first] += now() - start;
    }
  for (const step *s = first; s <= first + first->chained; s++) finish_filters(c, s, 0, s->filter_count);
}

INLINE void pool(const context *c, const step *s, const int maximum) {
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    for (int64_t r = 0; r < s->rows; r++)
      for (int64_t w = 0; w < s->columns; w++) {
        const char *corner = in + o * s->in.channel + r * s->stride_row * s->in.row + w * s->stride_column * BYTES;
        vec sum = splat(maximum ? -INFINITY : 0);
        for (int64_t y = 0; y < s->window_rows; y++)
          for (int64_t x = 0; x < s->window_columns; x++) {
            const vec v = *(const vec *)(corner + y * s->dilation_row * s->in.row + x * s->dilation_column * BYTES);
            if (maximum) sum = choose((v > sum) | (v != v), v, sum); /* NaN stays */
            else sum += v;
          }
        if (!maximum) sum *= s->weights[r * s->columns + w];
        *(vec *)(out + o * s->out.channel + r * s->out.row + w * BYTES) = smaller(splat(s->high), larger(splat(s->low), sum));
      }
    finish(&s->finish, out + o * s->out.channel);
  }
}

/* The mean over all positions and over the lanes of each image; image i's goes to lane i. */
static void mean(const context *c, const step *s) {
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    vec sum = splat(0);
    for (int64_t r = 0; r < s->rows; r++)
      for (int64_t w = 0; w < s->columns; w++) {
        const vec x = *(const vec *)(in + o * s->in.channel + r * s->in.row + w * BYTES);
        sum += choose(((const ints *)s->weights)[r * s->columns + w], x, splat(0));
      }
    vec result = splat(0);
    for (int64_t i = 0; i < s->images; i++) {
      float one = 0;
      for (int64_t l = 0; l < s->lanes; l++) one += ((const float *)&sum)[i * s->lanes + l];
      ((float *)&result)[i] = one * s->scale;
    }
    *(vec *)(out + o * s->out.channel) = result;
    finish(&s->finish, out + o * s->out.channel);
  }
}

/* From any layout to any other, number by number. */
static void copy(const context *c, const step *s) {
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    const char *from = in + o * s->in.channel;
    char *to = out + o * s->out.channel;
    const move *m = s->moves, *fills = m + s->move_count;
    for (; m < fills; m++) *(float *)(to + m->to) = *(const float *)(from + m->from);
    for (; m < fills + s->fill_count; m++) *(float *)(to + m->to) = s->finish.fill;
    finish(&s->finish, to);
  }
}

static void pointwise(const context *c, const step *s) {
  const char *in = at(c, &s->in), *add = at(c, &s->add);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    for (int64_t r = 0; r < s->rows; r++)
      for (int64_t w = 0; w < s->columns; w++) {
        vec x = *(const vec *)(in + o * s->in.channel + r * s->in.row + w * BYTES);
        if (add) {
          const vec y = *(const vec *)(add + o * s->add.channel + r * s->add.row + w * BYTES);
          x = s->kind == POINTWISE_MUL ? x * y : x + y * s->scale;
        }
        x = smaller(splat(s->high), larger(splat(s->low), x));
        *(vec *)(out + o * s->out.channel + r * s->out.row + w * BYTES) = activate(s->activation, s->slope, x);
      }
    finish(&s->finish, out + o * s->out.channel);
  }
}

/* Over the channels, at every position. The threads share the positions. */
static void softmax(const context *c, const step *s) {
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->rows * s->columns, &first, &last);
  for (int64_t p = first; p < last; p++) {
    const char *x = in + p / s->columns * s->in.row + p % s->columns * BYTES;
    char *y = out + p / s->columns * s->out.row + p % s->columns * BYTES;
    vec top = splat(-INFINITY), sum = splat(0);
    for (int64_t o = 0; o < s->channels; o++) top = larger(top, *(const vec *)(x + o * s->in.channel));
    for (int64_t o = 0; o < s->channels; o++) {
      const vec e = exponential(*(const vec *)(x + o * s->in.channel) - top);
      *(vec *)(y + o * s->out.channel) = e;
      sum += e;
    }
    for (int64_t o = 0; o < s->channels; o++) *(vec *)(y + o * s->out.channel) /= sum;
  }
}

static void run_step(const context *c, const step *s) {
  switch (s->kind) {
    case CONVOLUTION: convolution(c, s); break;
    case POOL_MAX: pool(c, s, 1); break;
    case POOL_MEAN: pool(c, s, 0); break;
    case MEAN: mean(c, s); break;
    case COPY: copy(c, s); break;
    case POINTWISE_ADD:
    case POINTWISE_MUL: pointwise(c, s); break;
    case SOFTMAX: softmax(c, s); break;
  }
}

/* ---- threads */

typedef struct {
  const section *sections;
  int64_t section_count;
  char **inputs; /* what the caller hands in, from view.buffer 2 on */
  int64_t input_count;
  char **arenas; /* one per thread */
  int64_t first_group, groups;
  int64_t together; /* do all threads share the work of one group, or does each take groups of its own? */
  int64_t *times;   /* nanoseconds of the first thread in each step, added up; NULL: nobody asks */
} run;

typedef struct {
  atomic_long arrived, round;
} barrier;

typedef struct {
  int64_t threads, patience; /* how often a thread looks for news before it lets others run */
  pid_t owner; /* a forked child has none of its parent's threads */
  pthread_t *ids;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  atomic_long job, done;
  int64_t quit;
  const run *what;
  barrier meet;
} pool_of_threads;

typedef struct {
  pool_of_threads *pool;
  int64_t part;
} worker;

INLINE void pause_a_little(const pool_of_threads *p, int64_t i) {
  if (i < p->patience) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  } else {
    sched_yield();
  }
}

static void wait_for_all(pool_of_threads *p) {
  if (!p || p->threads < 2) return;
  const long round = atomic_load(&p->meet.round);
  if (atomic_fetch_add(&p->meet.arrived, 1) + 1 == p->threads) {
    atomic_store(&p->meet.arrived, 0);
    atomic_store(&p->meet.round, round + 1);
    return;
  }
  for (int64_t i = 0; atomic_load(&p->meet.round) == round; i++) pause_a_little(p, i);
}

static void run_group(const run *r, context *c, pool_of_threads *p, int64_t *times) {
  for (int64_t s = 0; s < r->section_count; s++) {
    for (c->pass = 0; c->pass < r->sections[s].passes; c->pass++)
      for (int64_t i = 0; i < r->sections[s].count; i++) {
        const step *one = r->sections[s].steps + i;
        if (one->chained && c->parts == 1) {
          chain(c, one, times ? times + i : NULL);
          i += one->chained;
          continue;
        }
        const int64_t start = times ? now() : 0;
        run_step(c, one);
        if (c->parts > 1) wait_for_all(p);
        if (times) times[i] += now() - start;
      }
    if (times) times += r->sections[s].count;
  }
}

static void work(const run *r, int64_t part, int64_t parts, pool_of_threads *p) {
  char *buffers[r->input_count + 2];
  buffers[0] = NULL;
  buffers[1] = r->arenas[r->together ? 0 : part];
  memcpy(buffers + 2, r->inputs, r->input_count * sizeof *buffers);
  context c = {.buffers = buffers, .part = r->together ? part : 0, .parts = r->together ? parts : 1};
  const int64_t first = r->together ? 0 : part, stride = r->together ? 1 : parts;
  for (int64_t g = first; g < r->groups; g += stride) {
    c.group = r->first_group + g;
    run_group(r, &c, p, part == 0 ? r->times : NULL);
  }
}

static void *serve(void *argument) {
  const worker w = *(worker *)argument;
  pool_of_threads *p = w.pool;
  free(argument);
  for (long seen = 0;;) {
    for (int64_t i = 0; atomic_load(&p->job) == seen && i < 2 * p->patience; i++) pause_a_little(p, i);
    if (atomic_load(&p->job) == seen) {
      pthread_mutex_lock(&p->lock);
      while (atomic_load(&p->job) == seen) pthread_cond_wait(&p->wake, &p->lock);
      pthread_mutex_unlock(&p->lock);
    }
    seen++;
    if (p->quit) return NULL;
    work(p->what, w.part, p->threads, p);
    atomic_fetch_add(&p->done, 1);
  }
}

static void announce(pool_of_threads *p) {
  pthread_mutex_lock(&p->lock);
  atomic_fetch_add(&p->job, 1);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->lock);
}

/* A pool for so many threads, the caller's included, on so many cores. NULL if the system gives none. */
void *engine_pool(int64_t threads, int64_t cores) {
  pool_of_threads *p = calloc(1, sizeof *p);
  if (!p || !(p->ids = calloc(threads, sizeof *p->ids))) {
    free(p);
    return NULL;
  }
  p->threads = 1;
  p->patience = threads <= cores ? 4096 : 1;
  p->owner = getpid();
  pthread_mutex_init(&p->lock, NULL);
  pthread_cond_init(&p->wake, NULL);
  for (int64_t t = 1; t < threads; t++) {
    worker *w = malloc(sizeof *w);
    if (!w) break;
    *w = (worker){p, t};
    if (pthread_create(p->ids + t, NULL, serve, w)) {
      free(w);
      break;
    }
    p->threads++;
  }
  return p;
}

int64_t engine_pool_threads(const void *pool) { return ((const pool_of_threads *)pool)->threads; }

void engine_pool_free(void *pool) {
  pool_of_threads *p = pool;
  if (p->owner == getpid()) {
    p->quit = 1;
    announce(p);
    for (int64_t t = 1; t < p->threads; t++) pthread_join(p->ids[t], NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->wake);
  }
  free(p->ids);
  free(p);
}

void engine_run(void *pool, const run *r) {
  pool_of_threads *p = pool;
  if (!p || p->threads < 2 || p->owner != getpid()) {
    work(r, 0, 1, NULL);
    return;
  }
  p->what = r;
  atomic_store(&p->done, 0);
  announce(p);
  work(r, 0, p->threads, p);
  for (int64_t i = 0; atomic_load(&p->done) + 1 < p->threads; i++) pause_a_little(p, i);
}

/* Nanoseconds that a step takes, alone and with warm caches: the shortest of some runs. */
int64_t engine_time(const step *s, char *arena, char **inputs, int64_t input_count, int64_t runs) {
  char *buffers[input_count + 2];
  buffers[0] = NULL;
  buffers[1] = arena;
  memcpy(buffers + 2, inputs, input_count * sizeof *buffers);
  const context c = {.buffers = buffers, .parts = 1};
  int64_t best = INT64_MAX;
  for (int64_t i = 0; i <= runs; i++) {
    const int64_t start = now();
    run_step(&c, s);
    const int64_t taken = now() - start;
    if (i > 0 && taken < best) best = taken;
  }
  return best;
}
