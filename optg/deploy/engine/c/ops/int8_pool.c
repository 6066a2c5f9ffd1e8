/* Maximum and mean over a window of bytes. */

#include "../bytes.h"

typedef struct {
  planes in, out;
  int64_t kernel_row, kernel_column, stride_row, stride_column, padding_row, padding_column, dilation_row, dilation_column;
  const float *scale; /* of a mean, for each output position: in scale / (out scale * pixels) */
  float offset;       /* of a mean: the output's zero point */
  int64_t zero_point; /* of the input */
  const char *mask;   /* of a mean over the whole image: 255 for each byte that holds a pixel */
} int8_pooling;

/* The part of a window that lies inside the image: from `*first` up to, but without, `*last`. */
INLINE void clip(int64_t start, int64_t count, int64_t step, int64_t size, int64_t *first, int64_t *last) {
  *first = start < 0 ? (-start + step - 1) / step : 0;
  *last = start + (count - 1) * step < size ? count : (size - start + step - 1) / step;
}

void op_int8_pool_max(const context *c, const step *s) {
  const int8_pooling *k = s->own;
  const planes *p = &k->in, *q = &k->out;
  const int64_t padded = p->width + 2 * k->padding_column + k->kernel_column * k->dilation_column;
  const int64_t beyond = k->padding_column + k->kernel_column * k->dilation_column; /* bytes that a window may read there */
  const int64_t end = (q->height - 1) * q->columns + q->width;
  uint8_t top[padded + 2 * SPAN], wide[padded + 2 * SPAN], result[q->width + 2 * SPAN];
  memset(top, 0, sizeof top);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    char *out = at(c, &s->out) + o * s->out.channel;
    fill_plane(q, out, o == 0);
    for (int64_t i = 0; i < p->images; i++)
      for (int64_t y = 0; y < q->height; y++) {
        const int64_t start = y * k->stride_row - k->padding_row;
        int64_t from, to;
        clip(start, k->kernel_row, k->dilation_row, p->height, &from, &to);
        const uint8_t *in = (const uint8_t *)at(c, &s->in) + o * s->in.channel + (i * p->rows + start) * p->columns;
        for (int64_t x = 0; x < p->width; x += SPAN) { /* maximum of the window's rows; padding stays 0, the lowest value */
          octets m = repeat_octet(0);
          for (int64_t r = from; r < to; r++) m = largest(m, load_octets(in + r * k->dilation_row * p->columns + x));
          store_octets(top + k->padding_column + x, m);
        }
        memset(top + k->padding_column + p->width, 0, beyond);
        const int64_t span = (q->width - 1) * k->stride_column + 1;
        for (int64_t x = 0; x < span; x += SPAN) {
          octets m = load_octets(top + x);
          for (int64_t r = 1; r < k->kernel_column; r++) m = largest(m, load_octets(top + x + r * k->dilation_column));
          store_octets(wide + x, m);
        }
        uint8_t *row = (uint8_t *)out + (i * q->rows + y) * q->columns;
        if (y * q->columns + q->width + SPAN / 2 <= end) {
          every_nth(wide, row, q->width, k->stride_column); /* the next rows overwrite what is too much */
        } else {
          every_nth(wide, result, q->width, k->stride_column);
          memcpy(row, result, q->width);
        }
        if (q->fill >= 0 && y > 0)
          for (int64_t x = q->width; x < q->columns; x++) row[x - q->columns] = (uint8_t)q->fill;
      }
  }
}

INLINE uint8_t mean_of(const int8_pooling *k, int32_t sum, float scale) {
  const float y = __builtin_fmaf((float)sum, scale, k->offset);
  return quantize_one(y, 1.0f, 0);
}

void op_int8_pool_mean(const context *c, const step *s) {
  const int8_pooling *k = s->own;
  const planes *p = &k->in, *q = &k->out;
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    char *out = at(c, &s->out) + o * s->out.channel;
    fill_plane(q, out, o == 0);
    for (int64_t i = 0; i < p->images; i++) {
      const uint8_t *in = (const uint8_t *)at(c, &s->in) + o * s->in.channel + i * p->rows * p->columns;
      for (int64_t y = 0; y < q->height; y++)
        for (int64_t x = 0; x < q->width; x++) {
          int64_t top, bottom, left, right;
          const int64_t row = y * k->stride_row - k->padding_row, column = x * k->stride_column - k->padding_column;
          clip(row, k->kernel_row, 1, p->height, &top, &bottom);
          clip(column, k->kernel_column, 1, p->width, &left, &right);
          int32_t sum = -(int32_t)((bottom - top) * (right - left) * k->zero_point);
          for (int64_t a = top; a < bottom; a++)
            for (int64_t b = left; b < right; b++) sum += in[(row + a) * p->columns + column + b];
          out[(i * q->rows + y) * q->columns + x] = mean_of(k, sum, k->scale[y * q->width + x]);
        }
    }
  }
}

/* Mean over the whole image. */
void op_int8_mean(const context *c, const step *s) {
  const int8_pooling *k = s->own;
  const planes *p = &k->in, *q = &k->out;
  const weights ones = repeat_weights(0x01010101);
  const int64_t image = p->rows * p->columns, bytes = (image + SPAN - 1) / SPAN * SPAN;
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    char *out = at(c, &s->out) + o * s->out.channel;
    fill_plane(q, out, o == 0);
    for (int64_t i = 0; i < p->images; i++) {
      const uint8_t *in = (const uint8_t *)at(c, &s->in) + o * s->in.channel + i * image;
      sums total = repeat_sum(0);
      for (int64_t x = 0; x < bytes; x += SPAN) total = add_products(total, load_octets(in + x) & load_octets(k->mask + x), ones);
      int32_t sum = (int32_t)(SHIFT * bytes - p->height * p->width * k->zero_point);
      sum += add_lanes(total);
      out[i * q->rows * q->columns] = mean_of(k, sum, k->scale[0]);
    }
  }
}
