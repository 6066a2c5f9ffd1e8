/* The framed kernels of convolution.c: a file of their own, because compilation then takes less time on two cores. */

#include "../convolution.h"

#define DEFINE_FRAMED(G, R, W, S) \
  void framed_##G##_##R##_##W##_##S(const job *j) { convolve(G, R, W, S, 1, j); }
FRAMED(DEFINE_FRAMED)
