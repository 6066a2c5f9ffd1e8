/* Position by position: sums of two values, and functions by table. */

#include "../bytes.h"

typedef struct {
  const uint8_t *table;  /* 256 results */
  const char *mask;      /* 255 for each byte of a plane that holds a pixel; NULL if nothing reads the padding */
  int64_t plane, lead;
  float scale, add_scale, offset;
  uint8_t low, high, fill;
} int8_pointwise;

INLINE octets masked(const int8_pointwise *k, int64_t x, octets value) {
  return k->mask ? select_octets(load_octets(k->mask + x), value, repeat_octet(k->fill)) : value;
}

void op_int8_add(const context *c, const step *s) {
  const int8_pointwise *k = s->own;
  const reals scale = repeat_real(k->scale), add_scale = repeat_real(k->add_scale), offset = repeat_real(k->offset);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  if (k->mask && c->part == 0) memset(at(c, &s->out) - k->lead, k->fill, k->lead);
  for (int64_t o = first; o < last; o++)
    for (int64_t x = 0; x < k->plane; x += SPAN) {
      const quad a = widen(load_octets(at(c, &s->in) + o * s->in.channel + x));
      const quad b = widen(load_octets(at(c, &s->add) + o * s->add.channel + x));
      reals y[4];
      UNROLL for (int p = 0; p < 4; p++) {
        y[p] = multiply_add(to_reals((sums)a.part[p]), scale, offset);
        y[p] = multiply_add(to_reals((sums)b.part[p]), add_scale, y[p]);
      }
      const octets result = clamp_octets(quantize_reals(y), k->low, k->high);
      store_octets(at(c, &s->out) + o * s->out.channel + x, masked(k, x, result));
    }
}

void op_int8_table(const context *c, const step *s) {
  const int8_pointwise *k = s->own;
  int64_t first, last;
  share(c, s->channels, &first, &last);
  if (k->mask && c->part == 0) memset(at(c, &s->out) - k->lead, k->fill, k->lead);
  for (int64_t o = first; o < last; o++) {
    const uint8_t *in = (const uint8_t *)at(c, &s->in) + o * s->in.channel;
    for (int64_t x = 0; x < k->plane; x += SPAN) {
      uint8_t part[SPAN];
      for (int i = 0; i < SPAN; i++) part[i] = k->table[in[x + i]];
      store_octets(at(c, &s->out) + o * s->out.channel + x, masked(k, x, load_octets(part)));
    }
  }
}
