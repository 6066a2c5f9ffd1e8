/* Sparse and dense convolutions, and linear layers, which are convolutions whose kernel covers the input.

   A convolution is a list of taps per output channel: (offset of the input, weight), without the zeros. A tile of outputs stays
   in registers while the taps stream by; each tap costs one multiply-add with a memory operand per vector of the tile.
   Where weights are dense, a few output channels share their taps and so their loads. Where a tile reads more of the input than
   the first cache holds, it is computed in several rounds, each for some of the input channels.

   The list of kernels makes this file long: every tile size is a function of its own, unrolled by the compiler. */

/* Vector registers that hold a tile; the others hold a weight and temporaries. */
#if LANES == 16 || defined(__ARM_NEON)
#define ACCUMULATORS 28
#else
#define ACCUMULATORS 12
#endif

typedef struct { /* a rectangle of output positions, and the kernels for it */
  int64_t in, out, add; /* bytes from the views' start */
  int32_t rows, columns;
  int32_t shared, single; /* kernels for a group of channels, and for a single channel left over */
  int32_t first, last;    /* is this the first, or the last, round over the input channels? */
  int64_t filters;        /* index of the tile's first filter: tiles at an edge, and rounds, have filters of their own */
} tile;

enum { SIDES = 9 }; /* (all rows, all but the first, all but the last) times the same for columns */

typedef struct { /* output channels that share their taps */
  const char *taps; /* each tap: an int32 offset in bytes, and a float for every channel */
  int64_t count;
  int64_t channel, width;
  int32_t framed[SIDES + 1]; /* for framed kernels: how many taps touch which part of the image (the last is unused) */
} filter;

typedef struct {
  const tile *tiles;
  const filter *filters;
  const int64_t *cost; /* work of all filters before each one, to split the work evenly between threads */
  const float *bias;
  int64_t tile_count, filter_count, stride_row, stride_column;
  int64_t filters_outside; /* is the outer loop over filters, not over tiles? */
  const int64_t *strips;   /* the first tile of each strip of rows; chained steps run strip by strip */
  int64_t strip_count;
} convolution;

typedef struct { /* arguments of a kernel */
  const char *in;
  char *out;
  const char *add;
  int64_t in_row, in_column, out_row, out_channel, add_row, add_channel; /* in_row, in_column: with the stride */
  const filter *filter;
  const float *bias;
  float low, high;
  int64_t resumes; /* start from the output's present values, not from the bias */
} job;

/* Add one tap to a tile of G channels, R rows and W columns. ROWS and COLUMNS say which of them the tap touches:
   0: all, 1: all but the first, 2: all but the last. */
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

enum { AHEAD = 2048 }; /* bytes to prefetch ahead */

/* Add `count` taps and return the address after the last. CHAINS taps at a time go into separate sums, because each addition
   of a single chain would have to wait for the previous one. */
INLINE const char *add_taps(const int G, const int R, const int W, const int CHAINS, const int ROWS, const int COLUMNS,
                            const char *tap, int64_t count, const char *const *row, int64_t column, vec *sums) {
  const int64_t size = 4 + 4 * G;
  for (; count >= CHAINS; count -= CHAINS, tap += CHAINS * size) {
    if (G * R * W <= 16) __builtin_prefetch(tap + AHEAD); /* small tiles consume taps faster than memory delivers them */
    UNROLL for (int c = 0; c < CHAINS; c++)
      add_tap(G, R, W, ROWS, COLUMNS, tap + c * size, row, column, sums + c * G * R * W);
  }
  if (CHAINS > 1)
    for (; count > 0; count--, tap += size) add_tap(G, R, W, ROWS, COLUMNS, tap, row, column, sums);
  return tap;
}

/* Compute G channels of R rows of W vectors. S is the stride between columns, 0 if it is only known at run time.
   A framed kernel computes whole rows of a small image. Its taps are sorted by the edge at which they would read padding, and
   skip it: this saves a third of the work of a 3 x 3 kernel on 4 x 4 pixels, and the input needs no halo. */
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

/* The list of kernels: for each number of channels, rows and stride, all widths that fit into the accumulators. */
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

#if defined(KERNELS) /* tests pass a shorter list */
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

int64_t engine_kernel_count(void) { return sizeof kernels / sizeof *kernels; }
void engine_kernel(int64_t i, int32_t *shape) { memcpy(shape, &kernels[i].channels, 5 * sizeof *shape); }

/* The first filter with at least this much work before it. */
static int64_t filter_at(const convolution *k, int64_t cost) {
  int64_t low = 0, high = k->filter_count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (k->cost[middle] < cost) low = middle + 1;
    else high = middle;
  }
  return low;
}

static void one_tile(const step *s, const convolution *k, const tile *t, int64_t number, const char *in, char *out,
                     const char *add) {
  const filter *f = k->filters + t->filters + number;
  out += f->channel * s->out.channel + t->out;
  const job j = {
      .in = in + t->in,
      .out = out,
      .add = add && t->first ? add + f->channel * s->add.channel + t->add : NULL,
      .in_row = k->stride_row * s->in.row,
      .in_column = k->stride_column * BYTES,
      .out_row = s->out.row,
      .out_channel = s->out.channel,
      .add_row = s->add.row,
      .add_channel = s->add.channel,
      .filter = f,
      .bias = k->bias + f->channel,
      .low = t->last ? s->activation.low : -INFINITY,
      .high = t->last ? s->activation.high : INFINITY,
      .resumes = !t->first,
  };
  kernels[f->width > 1 ? t->shared : t->single].run(&j);
  if (s->activation.function == PLAIN || !t->last) return;
  for (int64_t g = 0; g < f->width; g++)
    for (int32_t r = 0; r < t->rows; r++)
      for (int32_t w = 0; w < t->columns; w++) {
        vec *x = (vec *)(out + g * s->out.channel + r * s->out.row + w * BYTES);
        *x = activate(s->activation.function, s->activation.slope, *x);
      }
}

static void some_tiles(const context *c, const step *s, int64_t from, int64_t to, int64_t first, int64_t last) {
  const convolution *k = s->own;
  const char *in = at(c, &s->in), *add = at(c, &s->add);
  char *out = at(c, &s->out);
  if (k->filters_outside) {
    for (int64_t f = first; f < last; f++)
      for (int64_t t = from; t < to; t++) one_tile(s, k, k->tiles + t, f, in, out, add);
  } else {
    for (int64_t t = from; t < to; t++)
      for (int64_t f = first; f < last; f++) one_tile(s, k, k->tiles + t, f, in, out, add);
  }
}

static void fill_halos(const context *c, const step *s, int64_t first, int64_t last) {
  if (!s->halo.count) return;
  const convolution *k = s->own;
  char *out = at(c, &s->out);
  for (int64_t f = first; f < last; f++)
    for (int64_t g = 0; g < k->filters[f].width; g++) fill_halo(&s->halo, out + (k->filters[f].channel + g) * s->out.channel);
}

void op_convolution(const context *c, const step *s) {
  const convolution *k = s->own;
  const int64_t total = k->cost[k->filter_count];
  const int64_t first = filter_at(k, total * c->part / c->parts);
  const int64_t last = c->part + 1 == c->parts ? k->filter_count : filter_at(k, total * (c->part + 1) / c->parts);
  some_tiles(c, s, 0, k->tile_count, first, last);
  fill_halos(c, s, first, last);
}

/* 1 x 1 convolutions in a row run strip by strip, so that a strip is still in the cache when the next one reads it. */
void chain_convolution(const context *c, const step *first, int64_t *times) {
  for (int64_t i = 0; i < ((const convolution *)first->own)->strip_count; i++)
    for (const step *s = first; s <= first + first->chained; s++) {
      const convolution *k = s->own;
      const int64_t start = times ? now() : 0;
      some_tiles(c, s, k->strips[i], k->strips[i + 1], 0, k->filter_count);
      if (times) times[s - first] += now() - start;
    }
  for (const step *s = first; s <= first + first->chained; s++)
    fill_halos(c, s, 0, ((const convolution *)s->own)->filter_count);
}
