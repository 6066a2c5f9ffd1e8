/* Convolutions and linear layers on bytes, as docs/int8.md defines them.

   A plane is the image row by row, with padding between the rows. So each tap of a convolution is the whole plane, shifted by
   a constant number of bytes. Four taps, of any channels and positions, are interleaved in registers: each 4 bytes then belong
   to one output position, and one instruction multiplies them by 4 weights and adds up. A tile of V vectors stays in registers
   while the taps of a filter stream by. Where weights are dense, several filters share the interleaved bytes. Where weights come
   in blocks of 2 or 4 neighbouring channels, the input has these interleaved already (int8_copy.c). Where a tile reads more than
   the first cache holds, the input channels are taken in parts, and sums are kept in memory between them. */

#include "../bytes.h"

typedef struct { /* filters that share their taps */
  const char *taps; /* groups of 4 taps: an offset for each block, and 4 weights for each filter */
  int32_t groups;
  int32_t channel, width; /* the filters are the output channels from `channel` on */
  int32_t ends_short;     /* does the last group of a single filter have one or two taps? */
} bundle;

typedef struct {
  const bundle *bundles; /* those of the first part of the input channels, then those of the next one, and so on */
  const int64_t *cost;  /* work of all bundles before each one, to split the work evenly between threads */
  const int32_t *start; /* of each channel's sum */
  const float *scale, *offset;
  const char *mask; /* 255 for each byte of a plane that holds a pixel; NULL if nothing reads the padding */
  const int64_t *bases; /* bytes to the first tap of each part */
  int64_t bundle_count, wide_count, parts; /* the first `wide_count` bundles have several filters */
  int64_t scratch;      /* bytes from the arena's start to the sums that are kept between parts */
  int64_t positions, plane, lead;   /* bytes to compute, of a whole plane, and of the padding before the first plane */
  int64_t wide_tile, tile;          /* vectors that a kernel computes at once */
  int64_t block;                    /* input channels that lie interleaved: 1, 2 or 4 */
  int64_t offset_unit;              /* offsets of single filters are uint16, in so many bytes; 0: they are int32, in bytes */
  int64_t narrow, clamps;           /* how results are rescaled; do they have bounds other than 0 and 255? */
  int64_t real;                     /* write floats, not bytes */
  float residual;                   /* scale of the value to add */
  float real_low, real_high;        /* clamp floats */
  uint8_t low, high, fill;          /* clamp bytes; the value of padding */
} int8_convolution;

typedef struct { /* a tile, and where it lies */
  const int8_convolution *k;
  const uint8_t *in, *add;
  char *out;
  sums *kept; /* sums between parts */
  int64_t position, part, add_channel, out_channel;
} int8_tile;

#define OFFSET_BYTES(UNIT, BLOCK) (UNIT ? 8 : 16 / BLOCK)

/* Add the products of a group. Of groups with TAPS = 2, only the first two taps count. */
INLINE void add_group(
    const int F, const int V, const int UNIT, const int BLOCK, const int TAPS, sums *acc, const uint8_t *in, const char *tap) {
  const uint8_t *row[4];
  uint64_t offsets[2]; /* one or two loads instead of four: loads are what limits many layers */
  memcpy(offsets, tap, OFFSET_BYTES(UNIT, BLOCK));
  UNROLL for (int i = 0; i < TAPS / BLOCK; i++)
    row[i] = in + (UNIT ? (offsets[0] >> 16 * i & 0xFFFF) * UNIT : offsets[i / 2] >> 32 * (i % 2) & 0xFFFFFFFF);
  tap += OFFSET_BYTES(UNIT, BLOCK);
  weights w[6];
  UNROLL for (int f = 0; f < F; f++) w[f] = repeat_weights(((const int32_t *)tap)[f]);
  UNROLL for (int v = 0; v < V; v++) {
    const quad q = TAPS == 2 ? read_two_taps(row, v) : read_taps(BLOCK, row, v);
    UNROLL for (int f = 0; f < F; f++)
      UNROLL for (int p = 0; p < 4; p++) acc[(f * V + v) * 4 + p] = add_products(acc[(f * V + v) * 4 + p], q.part[p], w[f]);
  }
}

INLINE void add_groups(const int F, const int V, const int UNIT, const int BLOCK, sums *acc, const uint8_t *in, const bundle *b) {
  const int size = OFFSET_BYTES(UNIT, BLOCK) + 4 * F, can_be_short = F == 1 && BLOCK == 1;
  const char *tap = b->taps;
  int32_t n = can_be_short ? b->groups - b->ends_short : b->groups;
  if (F * V == 1) { /* every second group has sums of its own: an addition waits for the one before it */
    sums other[4] = {repeat_sum(0), repeat_sum(0), repeat_sum(0), repeat_sum(0)};
    for (; n > 1; n -= 2, tap += 2 * size) {
      add_group(F, V, UNIT, BLOCK, 4, acc, in, tap);
      add_group(F, V, UNIT, BLOCK, 4, other, in, tap + size);
    }
    UNROLL for (int p = 0; p < 4; p++) acc[p] += other[p];
  }
  for (; n > 0; n--, tap += size) add_group(F, V, UNIT, BLOCK, 4, acc, in, tap);
  if (can_be_short && b->ends_short) add_group(F, V, UNIT, BLOCK, 2, acc, in, tap);
}

/* Write 4 vectors of reals in the order of positions. */
INLINE void write_reals(int block, char *out, const reals *y, float low, float high) {
  for (int p = 0; p < 4; p++)
    for (int i = 0; i < SPAN / 4; i++) {
      const float x = y[p][i] < low ? low : y[p][i] > high ? high : y[p][i];
      memcpy(out + 4 * position_of(block, p, i), &x, 4);
    }
}

typedef struct { /* where the bytes of a channel go. A copy, because the compiler reads what pointers lead to after each store */
  char *out;
  const char *mask;
  int block, clamps;
  uint8_t low, high, fill;
} target;

INLINE target target_of(int block, const int8_tile *t, int64_t channel) {
  const int8_convolution *k = t->k;
  const char *mask = k->mask ? k->mask + t->position : NULL;
  return (target){t->out + channel * t->out_channel, mask, block, (int)k->clamps, k->low, k->high, k->fill};
}

INLINE void write_octets(target to, int v, octets x) {
  x = in_order(to.block, x);
  if (to.clamps) x = clamp_octets(x, to.low, to.high);
  if (to.mask) x = select_octets(load_octets(to.mask + SPAN * v), x, repeat_octet(to.fill));
  store_octets(to.out + SPAN * v, x);
}

/* Rescale the sums of `vectors` vectors of one channel of a wide layer, and write them. */
static __attribute__((noinline)) void rescale_wide(const sums *acc, int vectors, const int8_tile *t, int64_t channel) {
  const int8_convolution *k = t->k;
  const target to = target_of((int)k->block, t, channel);
  const reals scale = repeat_real(k->scale[channel]), offset = repeat_real(k->offset[channel]);
  for (int v = 0; v < vectors; v++) {
    reals y[4];
    UNROLL for (int p = 0; p < 4; p++) y[p] = multiply_add(to_reals(acc[4 * v + p]), scale, offset);
    if (t->add) {
      const quad r = widen(out_of_order(to.block, load_octets(t->add + channel * t->add_channel + SPAN * v)));
      const reals residual = repeat_real(k->residual);
      UNROLL for (int p = 0; p < 4; p++) y[p] = multiply_add(to_reals((sums)r.part[p]), residual, y[p]);
    }
    if (k->real) write_reals(to.block, to.out + 4 * SPAN * v, y, k->real_low, k->real_high);
    else write_octets(to, v, quantize_reals(y));
  }
}

/* Rescale the sums of V vectors of one channel and write them. */
INLINE void rescale(const int V, const int BLOCK, const sums *acc, const int8_tile *t, int64_t channel) {
  const int8_convolution *k = t->k;
  if (!k->narrow) {
    sums copy[24]; /* in memory; the sums themselves stay in registers */
    UNROLL for (int i = 0; i < 4 * V; i++) copy[i] = acc[i];
    rescale_wide(copy, V, t, channel);
    return;
  }
  const target to = target_of(BLOCK, t, channel);
  const reals scale = repeat_real(k->scale[channel]), offset = repeat_real(k->offset[channel]);
  if (t->add) {
    const reals residual = repeat_real(k->residual / 256);
    const uint8_t *add = t->add + channel * t->add_channel;
    UNROLL for (int v = 0; v < V; v++) {
      const octets r = out_of_order(BLOCK, load_octets(add + SPAN * v));
      write_octets(to, v, quantize_sums_and_residual(acc + 4 * v, scale, r, residual, offset));
    }
  } else {
    UNROLL for (int v = 0; v < V; v++) write_octets(to, v, quantize_sums(acc + 4 * v, scale, offset));
  }
}

INLINE void convolve_tile(
    const int F, const int V, const int UNIT, const int BLOCK, const int8_tile *t, int64_t first, int64_t last) {
  const int8_convolution *k = t->k;
  const bundle *bundles = k->bundles + t->part * k->bundle_count;
  for (const bundle *b = bundles + first; b < bundles + last; b++) {
    sums acc[24]; /* not F * V * 4: gcc keeps arrays of variable length in memory */
    sums *kept = t->kept + (b - bundles) * 4 * k->tile; /* not V: another thread may be at a smaller tile */
    if (t->part) {
      UNROLL for (int i = 0; i < F * V * 4; i++) acc[i] = kept[i];
    } else {
      UNROLL for (int f = 0; f < F; f++) {
        const sums start = repeat_sum(k->start[b->channel + f]);
        UNROLL for (int i = 0; i < V * 4; i++) acc[f * V * 4 + i] = start;
      }
    }
    if (t->position == 0)
      for (int64_t line = 0; line < b->groups * (OFFSET_BYTES(UNIT, BLOCK) + 4 * F); line += 64)
        __builtin_prefetch(b->taps + PREFETCHED + line, 0, 2);
    add_groups(F, V, UNIT, BLOCK, acc, t->in, b);
    if (t->part + 1 < k->parts) {
      UNROLL for (int i = 0; i < F * V * 4; i++) kept[i] = acc[i];
    } else {
      UNROLL for (int f = 0; f < F; f++) rescale(V, BLOCK, acc + f * V * 4, t, b->channel + f);
    }
  }
}

/* Filters, vectors, unit of offsets, block of channels */
#if SPAN == 64 || defined(__ARM_NEON)
#define INT8_SINGLE(K, UNIT, BLOCK) \
  K(1, 1, UNIT, BLOCK) K(1, 2, UNIT, BLOCK) K(1, 3, UNIT, BLOCK) K(1, 4, UNIT, BLOCK) K(1, 5, UNIT, BLOCK) K(1, 6, UNIT, BLOCK)
#define INT8_SHARED(K) K(2, 1, 0, 1) K(2, 2, 0, 1) K(2, 3, 0, 1) K(4, 1, 0, 1) K(6, 1, 0, 1)
#else
#define INT8_SINGLE(K, UNIT, BLOCK) K(1, 1, UNIT, BLOCK) K(1, 2, UNIT, BLOCK)
#define INT8_SHARED(K) K(2, 1, 0, 1)
#endif
#define INT8_KERNELS(K) INT8_SINGLE(K, 0, 1) INT8_SINGLE(K, 8, 1) INT8_SINGLE(K, 0, 2) INT8_SINGLE(K, 0, 4) INT8_SHARED(K)

#define INT8_DEFINE(F, V, UNIT, BLOCK) \
  static void int8_##F##_##V##_##UNIT##_##BLOCK(const int8_tile *t, int64_t first, int64_t last) { \
    convolve_tile(F, V, UNIT, BLOCK, t, first, last); \
  }
INT8_KERNELS(INT8_DEFINE)

typedef struct {
  void (*run)(const int8_tile *, int64_t, int64_t);
  int32_t width, vectors, offset_unit, block;
} int8_kernel;

#define INT8_LIST(F, V, UNIT, BLOCK) {int8_##F##_##V##_##UNIT##_##BLOCK, F, V, UNIT, BLOCK},
static const int8_kernel int8_kernels[] = {INT8_KERNELS(INT8_LIST)};

int64_t engine_span(void) { return SPAN; }
int64_t engine_shift(void) { return SHIFT; }
int64_t engine_int8_kernel_count(void) { return sizeof int8_kernels / sizeof *int8_kernels; }
void engine_int8_kernel(int64_t i, int32_t *shape) { memcpy(shape, &int8_kernels[i].width, 4 * sizeof *shape); }

static const int8_kernel *int8_find(int64_t width, int64_t vectors, int64_t unit, int64_t block) {
  for (size_t i = 0; i < sizeof int8_kernels / sizeof *int8_kernels; i++) {
    const int8_kernel *k = int8_kernels + i;
    if (k->width == width && k->vectors == vectors && k->offset_unit == unit && k->block == block) return k;
  }
  return NULL;
}

/* Run these bundles, all of one width, on all positions, in tiles of at most `largest` vectors. */
static void int8_tiles(int8_tile t, int64_t largest, int64_t first, int64_t last) {
  if (first >= last) return;
  const int8_convolution *k = t.k;
  const int64_t width = k->bundles[first].width, unit = width == 1 ? k->offset_unit : 0;
  const int8_tile start = t;
  const int64_t vectors = (k->positions + SPAN - 1) / SPAN, tiles = (vectors + largest - 1) / largest;
  for (int64_t i = 0; i < tiles; i++) {
    const int64_t from = vectors * i / tiles, to = vectors * (i + 1) / tiles;
    t.position = from * SPAN;
    t.out = start.out + t.position * (k->real ? 4 : 1);
    t.add = start.add ? start.add + t.position : NULL;
    const int8_kernel *kernel = int8_find(width, to - from, unit, k->block);
    for (t.part = 0; t.part < k->parts; t.part++) {
      t.in = start.in + k->bases[t.part] + t.position * k->block;
      kernel->run(&t, first, last);
    }
  }
}

static int64_t bundle_at(const int8_convolution *k, int64_t cost) {
  int64_t i = 0;
  while (i < k->bundle_count && k->cost[i] < cost) i++;
  return i;
}

void op_int8_convolution(const context *c, const step *s) {
  const int8_convolution *k = s->own;
  const int64_t total = k->cost[k->bundle_count];
  const int64_t first = bundle_at(k, total * c->part / c->parts);
  const int64_t last = c->part + 1 == c->parts ? k->bundle_count : bundle_at(k, total * (c->part + 1) / c->parts);
  const int8_tile t = {
      .k = k,
      .in = (const uint8_t *)at(c, &s->in),
      .add = (const uint8_t *)at(c, &s->add),
      .out = at(c, &s->out),
      .kept = (sums *)(c->buffers[1] + k->scratch),
      .add_channel = s->add.channel,
      .out_channel = s->out.channel,
  };
  const int64_t middle = last < k->wide_count ? last : first > k->wide_count ? first : k->wide_count;
  int8_tiles(t, k->wide_tile, first, middle);
  int8_tiles(t, k->tile, middle, last);
  if (!k->mask) return;
  if (c->part == 0) memset(t.out - k->lead, k->fill, k->lead);
  const int64_t done = (k->positions + SPAN - 1) / SPAN * SPAN;
  for (const bundle *b = k->bundles + first; b < k->bundles + last; b++)
    for (int32_t f = 0; f < b->width; f++)
      memset(t.out + (b->channel + f) * s->out.channel + done, k->fill, k->plane - done);
}
