/* The structs of a program, which Python fills in (structs.py), and what every operation needs. */

#include <string.h>
#include <time.h>

typedef struct { /* where a value lies */
  int64_t buffer;       /* 0: nowhere, 1: the arena, from 2: the caller's tensors */
  int64_t start;        /* bytes to the first vector after the halo */
  int64_t row, channel; /* bytes from one to the next */
  int64_t pass, group;  /* bytes to add for each image of a group, and for each group of a batch */
} view;

typedef struct { /* one vector of a halo: the vector at `from`, shifted by some lanes, where the mask is set */
  int32_t to, from, mask;
} edge;

typedef struct {
  const edge *edges;
  int64_t count;
  const ints *masks;
  float fill; /* for all other lanes: 0, or -infinity before a maximum */
} halo;

typedef struct {
  char **buffers; /* indexed by view.buffer; buffers[1] is the thread's arena */
  int64_t pass, group;
  int64_t part, parts; /* this thread's share of every step */
} context;

typedef struct step { /* one call of an operation's C function */
  void (*run)(const context *, const struct step *);
  void (*run_chain)(const context *, const struct step *, int64_t *times); /* runs this step and those chained to it */
  int64_t chained; /* how many of the following steps are chained to this one; 0: none */
  view in, add, out;
  int64_t channels, rows, columns;
  activation activation;
  halo halo;       /* of the output */
  const void *own; /* the operation's own struct */
} step;

INLINE char *at(const context *c, const view *v) {
  return v->buffer ? c->buffers[v->buffer] + v->start + c->pass * v->pass + c->group * v->group : NULL;
}

INLINE int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

static void fill_halo(const halo *h, char *plane) {
  const vec fill = splat(h->fill);
  for (int64_t e = 0; e < h->count; e++) {
    const edge *g = h->edges + e;
    *(vec *)(plane + g->to) = choose(h->masks[g->mask], *(const loose *)(plane + g->from), fill);
  }
}

/* This thread's share of n items: from `first` up to, but without, `last`. */
INLINE void share(const context *c, int64_t n, int64_t *first, int64_t *last) {
  *first = n * c->part / c->parts;
  *last = n * (c->part + 1) / c->parts;
}
