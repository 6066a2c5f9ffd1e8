/* Copy a value from any layout to any other, number by number. */

typedef struct { /* one number, in bytes from the planes' starts */
  int32_t to, from;
} move;

typedef struct {
  const move *moves;
  int64_t move_count, fill_count; /* after the moves come the numbers to set to `fill` */
  float fill;
} copying;

void op_copy(const context *c, const step *s) {
  const copying *k = s->own;
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    const char *from = in + o * s->in.channel;
    char *to = out + o * s->out.channel;
    const move *m = k->moves, *fills = m + k->move_count;
    for (; m < fills; m++) *(float *)(to + m->to) = *(const float *)(from + m->from);
    for (; m < fills + k->fill_count; m++) *(float *)(to + m->to) = k->fill;
    fill_halo(&s->halo, to);
  }
}
