/* Maximum and mean over a window. */

typedef struct {
  int64_t window_rows, window_columns, dilation_row, dilation_column, stride_row, stride_column;
  const vec *weights; /* of a mean: 1 / number of pixels, for each position */
} pooling;

INLINE void pool(const context *c, const step *s, const int maximum) {
  const pooling *k = s->own;
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    for (int64_t r = 0; r < s->rows; r++)
      for (int64_t w = 0; w < s->columns; w++) {
        const char *corner = in + o * s->in.channel + r * k->stride_row * s->in.row + w * k->stride_column * BYTES;
        vec sum = splat(maximum ? -INFINITY : 0);
        for (int64_t y = 0; y < k->window_rows; y++)
          for (int64_t x = 0; x < k->window_columns; x++) {
            const vec v = *(const vec *)(corner + y * k->dilation_row * s->in.row + x * k->dilation_column * BYTES);
            if (maximum) sum = choose((v > sum) | (v != v), v, sum); /* NaN stays */
            else sum += v;
          }
        if (!maximum) sum *= k->weights[r * s->columns + w];
        *(vec *)(out + o * s->out.channel + r * s->out.row + w * BYTES) = clamp(&s->activation, sum);
      }
    fill_halo(&s->halo, out + o * s->out.channel);
  }
}

void op_pool_max(const context *c, const step *s) { pool(c, s, 1); }
void op_pool_mean(const context *c, const step *s) { pool(c, s, 0); }
