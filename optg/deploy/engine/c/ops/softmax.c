/* Softmax over the channels, at every position. Threads share the positions, so another step fills the halo. */

void op_softmax(const context *c, const step *s) {
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->rows * s->columns, &first, &last);
  for (int64_t p = first; p < last; p++) {
    const char *x = in + p / s->columns * s->in.row + p % s->columns * BYTES;
    char *y = out + p / s->columns * s->out.row + p % s->columns * BYTES;
    vec top = splat(-INFINITY), sum = splat(0);
    for (int64_t o = 0; o < s->channels; o++) top = larger(top, *(const vec *)(x + o * s->in.channel));
    for (int64_t o = 0; o < s->channels; o++) {
      const vec e = exponential(*(const vec *)(x + o * s->in.channel) - top);
      *(vec *)(y + o * s->out.channel) = e;
      sum += e;
    }
    for (int64_t o = 0; o < s->channels; o++) *(vec *)(y + o * s->out.channel) /= sum;
  }
}
