/* The engine that runs a sparse network on a CPU: threads, and the entry points that Python calls.

   Data. One vector holds LANES numbers, one per *lane*. An image is cut into a grid of blocks, one per lane, or a batch gives
   each image a lane. A plane (one channel) is a small image of vectors, with a halo around it that repeats the neighbours'
   edges. So every tap of every convolution, whatever its kernel, stride and dilation, is an aligned load at a constant offset,
   and no arithmetic crosses lanes.

   Work. A program is a list of steps; each step calls the C function of one operation (ops/). build.py compiles
   these files into one library.

   Order. Threads share whole output channels or whole images: every number is computed by the same operations in the same
   order, whatever the number of threads. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "vectors.h"
#include "program.h"

int64_t engine_lanes(void) { return LANES; }

/* Whether no number is NaN or infinite: only then is every product with 0 equal to 0. */
int64_t engine_finite(const float *x, int64_t count) {
  vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    UNROLL for (int k = 0; k < 4; k++) sums[k] += *(const loose *)(x + i + k * LANES) * 0;
  float sum = 0;
  for (; i < count; i++) sum += x[i] * 0;
  for (int64_t k = 0; k < 4 * LANES; k++) sum += ((const float *)sums)[k];
  return sum == 0;
}

typedef struct {
  const step *steps;
  int64_t count, passes; /* the steps run once per image of the group, or once for all of its images */
} section;

typedef struct {
  const section *sections;
  int64_t section_count;
  char **inputs; /* the caller's tensors, from view.buffer 2 on */
  int64_t input_count;
  char **arenas; /* one per thread */
  int64_t first_group, groups;
  int64_t together; /* do all threads share the work of each group, or does each take whole groups? */
  int64_t *times;   /* the first thread's nanoseconds in each step, summed up; may be NULL */
} run;

typedef struct {
  atomic_long arrived, round;
} barrier;

typedef struct {
  int64_t threads, patience; /* how often a waiting thread polls before it yields */
  pid_t owner; /* a forked child does not have its parent's threads */
  pthread_t *ids;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  atomic_long job, done;
  int64_t quit;
  const run *what;
  barrier meet;
} thread_pool;

typedef struct {
  thread_pool *pool;
  int64_t part;
} worker;

INLINE void pause_or_yield(const thread_pool *p, int64_t i) {
  if (i < p->patience) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  } else {
    sched_yield();
  }
}

static void wait_for_all(thread_pool *p) {
  if (!p || p->threads < 2) return;
  const long round = atomic_load(&p->meet.round);
  if (atomic_fetch_add(&p->meet.arrived, 1) + 1 == p->threads) {
    atomic_store(&p->meet.arrived, 0);
    atomic_store(&p->meet.round, round + 1);
    return;
  }
  for (int64_t i = 0; atomic_load(&p->meet.round) == round; i++) pause_or_yield(p, i);
}

static void run_group(const run *r, context *c, thread_pool *p, int64_t *times) {
  for (int64_t s = 0; s < r->section_count; s++) {
    for (c->pass = 0; c->pass < r->sections[s].passes; c->pass++)
      for (int64_t i = 0; i < r->sections[s].count; i++) {
        const step *one = r->sections[s].steps + i;
        if (one->chained && c->parts == 1) {
          one->run_chain(c, one, times ? times + i : NULL);
          i += one->chained;
          continue;
        }
        const int64_t start = times ? now() : 0;
        one->run(c, one);
        if (c->parts > 1) wait_for_all(p);
        if (times) times[i] += now() - start;
      }
    if (times) times += r->sections[s].count;
  }
}

static void work(const run *r, int64_t part, int64_t parts, thread_pool *p) {
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
  thread_pool *p = w.pool;
  free(argument);
  for (long seen = 0;;) {
    for (int64_t i = 0; atomic_load(&p->job) == seen && i < 2 * p->patience; i++) pause_or_yield(p, i);
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

static void announce(thread_pool *p) {
  pthread_mutex_lock(&p->lock);
  atomic_fetch_add(&p->job, 1);
  pthread_cond_broadcast(&p->wake);
  pthread_mutex_unlock(&p->lock);
}

/* Return a pool of `threads` threads, the caller's included, on `cores` cores; NULL if out of memory. */
void *engine_pool(int64_t threads, int64_t cores) {
  thread_pool *p = calloc(1, sizeof *p);
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

int64_t engine_pool_threads(const void *pool) { return ((const thread_pool *)pool)->threads; }

void engine_pool_free(void *pool) {
  thread_pool *p = pool;
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
  thread_pool *p = pool;
  if (!p || p->threads < 2 || p->owner != getpid()) {
    work(r, 0, 1, NULL);
    return;
  }
  p->what = r;
  atomic_store(&p->done, 0);
  announce(p);
  work(r, 0, p->threads, p);
  for (int64_t i = 0; atomic_load(&p->done) + 1 < p->threads; i++) pause_or_yield(p, i);
}

/* Return the nanoseconds that a step takes, alone and with warm caches: the shortest of several runs. */
int64_t engine_time(const step *s, char *arena, char **inputs, int64_t input_count, int64_t runs) {
  char *buffers[input_count + 2];
  buffers[0] = NULL;
  buffers[1] = arena;
  memcpy(buffers + 2, inputs, input_count * sizeof *buffers);
  const context c = {.buffers = buffers, .parts = 1};
  int64_t best = INT64_MAX;
  for (int64_t i = 0; i <= runs; i++) {
    const int64_t start = now();
    s->run(&c, s);
    const int64_t taken = now() - start;
    if (i > 0 && taken < best) best = taken;
  }
  return best;
}
