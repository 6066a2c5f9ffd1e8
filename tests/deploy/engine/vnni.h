/* Compile the source for AVX-VNNI, 256 bits wide, to the AVX-512VL encodings of the same instructions. */

#include <immintrin.h>
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 _mm256_dpbusd_epi32
