/* Sparse and dense convolutions, and linear layers, which are convolutions whose kernel covers the input.

   A convolution is a list of taps per output channel: (offset of the input, weight), without the zeros. A tile of outputs stays
   in registers while the taps stream by; each tap costs one multiply-add with a memory operand per vector of the tile.
   Where weights are dense, a few output channels share their taps and so their loads. Where a tile reads more of the input than
   the first cache holds, it is computed in several rounds, each for some of the input channels.

   Every tile size is a function of its own, unrolled by the compiler. Framed kernels are in framed_convolution.c. */

#include "../convolution.h"

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

#define DEFINE(G, R, W, S) \
  static void kernel_##G##_##R##_##W##_##S(const job *j) { convolve(G, R, W, S, 0, j); }
#define DECLARE_FRAMED(G, R, W, S) void framed_##G##_##R##_##W##_##S(const job *);
KERNELS(DEFINE)
FRAMED(DECLARE_FRAMED)

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
