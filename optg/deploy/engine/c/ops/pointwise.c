/* x + scale * y, x * y, or x alone; then the activation. */

typedef struct {
  int64_t multiply; /* x * y, not x + scale * y */
  float scale;
} combining;

void op_pointwise(const context *c, const step *s) {
  const combining *k = s->own;
  const char *in = at(c, &s->in), *add = at(c, &s->add);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    for (int64_t r = 0; r < s->rows; r++)
      for (int64_t w = 0; w < s->columns; w++) {
        vec x = *(const vec *)(in + o * s->in.channel + r * s->in.row + w * BYTES);
        if (add) {
          const vec y = *(const vec *)(add + o * s->add.channel + r * s->add.row + w * BYTES);
          x = k->multiply ? x * y : x + y * k->scale;
        }
        x = clamp(&s->activation, x);
        *(vec *)(out + o * s->out.channel + r * s->out.row + w * BYTES) =
            activate(s->activation.function, s->activation.slope, x);
      }
    fill_halo(&s->halo, out + o * s->out.channel);
  }
}
