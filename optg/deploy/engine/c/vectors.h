/* Vectors of LANES floats, and the functions that work on all lanes at once. */

#include <math.h>
#include <stdint.h>

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

/* e^x with a relative error of about 2e-7: x = n ln 2 + r, and a polynomial in r. */
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

typedef struct { /* clamp to [low, high], then apply the function */
  int64_t function;
  float low, high; /* ReLU: 0 and infinity */
  float slope;     /* of a leaky ReLU */
} activation;

enum { PLAIN, HARDSWISH, HARDSIGMOID, SIGMOID, SILU, TANH, LEAKY };

INLINE vec clamp(const activation *a, vec x) { return smaller(splat(a->high), larger(splat(a->low), x)); }

INLINE vec activate(int64_t function, float slope, vec x) {
  switch (function) {
    case HARDSWISH: return x * smaller(splat(6), larger(splat(0), x + 3)) / 6;
    case HARDSIGMOID: return smaller(splat(6), larger(splat(0), x + 3)) / 6;
    case SIGMOID: return 1 / (1 + exponential(-x));
    case SILU: return choose(x < splat(-100), splat(-0.0f), x / (1 + exponential(-x))); /* `exponential` clamps its argument */
    case TANH: { /* 1 - 2 / (1 + e^2x) loses digits near 0, where the odd series is accurate */
      const vec s = x * x, series = x * (1 - s * (1.0f / 3 - s * (2.0f / 15 - s * (17.0f / 315 - s * (62.0f / 2835)))));
      return choose(s < splat(0.04f), series, 1 - 2 / (1 + exponential(2 * x)));
    }
    case LEAKY: return choose(x < splat(0), x * slope, x);
    default: return x;
  }
}
