/* Mean over height and width: over all positions and over the lanes of each image. Image i's mean goes to lane i. */

typedef struct {
  const ints *masks; /* which lanes hold a pixel, for each position */
  int64_t images, lanes; /* lanes of one image */
  float scale;           /* 1 / number of pixels */
} averaging;

void op_mean(const context *c, const step *s) {
  const averaging *k = s->own;
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    vec sum = splat(0);
    for (int64_t r = 0; r < s->rows; r++)
      for (int64_t w = 0; w < s->columns; w++) {
        const vec x = *(const vec *)(in + o * s->in.channel + r * s->in.row + w * BYTES);
        sum += choose(k->masks[r * s->columns + w], x, splat(0));
      }
    vec result = splat(0);
    for (int64_t i = 0; i < k->images; i++) {
      float one = 0;
      for (int64_t l = 0; l < k->lanes; l++) one += ((const float *)&sum)[i * k->lanes + l];
      ((float *)&result)[i] = one * k->scale;
    }
    *(vec *)(out + o * s->out.channel) = result;
    fill_halo(&s->halo, out + o * s->out.channel);
  }
}
