/* What convolution.c and framed_convolution.c share: the structs of a convolution, and how a kernel computes a tile. */

#ifndef CONVOLUTION_H
#define CONVOLUTION_H

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

/* The list of framed kernels. */
#if ACCUMULATORS == 28
#define FRAMED(K) \
  K(1, 1, 1, 1) K(1, 2, 2, 1) K(1, 3, 3, 1) K(1, 4, 4, 1) K(1, 5, 5, 1) \
  K(1, 3, 7, 1) K(1, 4, 7, 1) K(1, 2, 8, 1) K(1, 3, 8, 1) K(1, 1, 14, 1) K(1, 1, 16, 1)
#else
#define FRAMED(K) K(1, 1, 1, 1) K(1, 2, 2, 1) K(1, 3, 3, 1) K(1, 1, 7, 1) K(1, 1, 8, 1)
#endif

#endif
