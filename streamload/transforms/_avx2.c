/* Crop, resize with antialias and normalise one RGB image in one go, with AVX2.
 *
 * The levels are those of torch's uint8 kernel (aten/src/ATen/native/cpu/UpSampleKernel.cpp), bit for bit: weights in
 * double, rounded to 15 bits and a sign, with as many of them behind the point as the largest allows; sums in 32 bits;
 * a rounding to uint8 after each of the two passes. Integers add up to the same in any order, so what differs is only
 * where they lie: eight rows go through the first pass side by side, and what it makes of them stays in the
 * processor's first cache until the second pass has used it.
 *
 *   rows first     8 rows of the image -> widen -> across -> a ring of results, four rows to a word -> down -> a row
 *   columns first  the image -> down_rows -> 8 rows -> widen -> across -> spread -> 8 rows
 *
 * Each row of the result is written as it is (uint8, channels last) or normalised (float32, channels first).
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define WITH_AVX2 __attribute__((target("avx2")))
#define INLINE static inline __attribute__((always_inline)) WITH_AVX2

enum filter { BICUBIC, BILINEAR };

enum { BAND = 8, VECTOR = 32, SLACK = 32 }; /* rows at a time; bytes; what a load may read behind a row of our own */

/* ---- Weights ---- */

/* How the outputs along one axis are made of its inputs: of `count` from `first` on. */
struct axis {
    int input, output;
    int most;         /* taps of an output at most */
    int units;        /* what `weights` has for an output, in units of 32 bits */
    int precision;    /* bits behind the point */
    int *first, *count;
    double *exact;    /* [output][most] */
    int32_t *weights; /* [output][units], two weights in each */
};

static double reach(enum filter by, const struct axis *axis) {
    const double radius = by == BICUBIC ? 2.0 : 1.0, scale = (double)axis->input / axis->output;
    return scale >= 1.0 ? radius * scale : radius;
}

static int taps(enum filter by, const struct axis *axis) { return 2 * (int)ceilf(reach(by, axis)) + 1; }

/* Keys' cubic with a = -0.5, or a triangle. */
static double weight(enum filter by, double x) {
    x = fabs(x);
    if (by == BILINEAR)
        return x < 1.0 ? 1.0 - x : 0.0;
    if (x < 1.0)
        return (1.5 * x - 2.5) * x * x + 1.0;
    return x < 2.0 ? ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0 : 0.0;
}

static void weigh(struct axis *axis, enum filter by) {
    const double scale = (double)axis->input / axis->output, support = reach(by, axis);
    const double inverse = scale >= 1.0 ? 1.0 / scale : 1.0;
    double largest = 0.0;
    for (int i = 0; i < axis->output; i++) {
        const double centre = scale * (i + 0.5);
        const int before = (int)(centre - support + 0.5), behind = (int)(centre + support + 0.5);
        const int first = before > 0 ? before : 0;
        int count = (behind < axis->input ? behind : axis->input) - first;
        if (count > axis->most)
            count = axis->most; /* by one, by rounding */
        double *exact = axis->exact + (size_t)i * axis->most, sum = 0.0;
        for (int j = 0; j < count; j++) {
            exact[j] = weight(by, (j + first - centre + 0.5) * inverse);
            sum += exact[j];
        }
        for (int j = 0; j < count && sum != 0.0; j++) {
            exact[j] /= sum;
            if (exact[j] > largest)
                largest = exact[j];
        }
        axis->first[i] = first;
        axis->count[i] = count;
    }
    axis->precision = 0;
    while (axis->precision < 22 && (int)(0.5 + largest * (1 << (axis->precision + 1))) < 1 << 15)
        axis->precision++;
}

static int16_t rounded(const struct axis *axis, int output, int tap) {
    const double scaled = axis->exact[(size_t)output * axis->most + tap] * (1 << axis->precision);
    return (int16_t)(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
}

/* Put each output's weights where its inputs lie if these come in pairs, the first pair at an even number, or not. */
static void weigh_pairs(struct axis *axis, int aligned) {
    memset(axis->weights, 0, (size_t)axis->output * axis->units * sizeof(int32_t));
    for (int i = 0; i < axis->output; i++) {
        int16_t *at = (int16_t *)(axis->weights + (size_t)i * axis->units);
        if (aligned)
            at += axis->first[i] % 2;
        for (int j = 0; j < axis->count[i]; j++)
            at[j] = rounded(axis, i, j);
    }
}

/* The same for inputs four to a word, of which the first and third come before the second and fourth. */
static void weigh_fours(struct axis *axis) {
    memset(axis->weights, 0, (size_t)axis->output * axis->units * sizeof(int32_t));
    for (int i = 0; i < axis->output; i++) {
        int16_t *at = (int16_t *)(axis->weights + (size_t)i * axis->units);
        for (int j = 0; j < axis->count[i]; j++) {
            const int place = axis->first[i] % 4 + j;
            at[place / 4 * 4 + place % 2 * 2 + place % 4 / 2] = rounded(axis, i, j);
        }
    }
}

/* ---- Passes ---- */

/* 8 rows of RGB -> words[pair of neighbours][channel], in which each row has 32 bits: the two neighbours' levels.
 * Four pixels at a time; up to 13 bytes behind a row are read. */
INLINE void widen(const uint8_t *const rows[BAND], int fours, __m256i *words) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 6, 3, 9, 1, 7, 4, 10, 2, 8, 5, 11, -1, -1, -1, -1));
    const __m256i low = _mm256_set1_epi16(0xff);
    for (int i = 0; i < fours; i++, words += 6) {
        __m256i of[4]; /* two rows: red, green, blue of four pixels each */
        for (int r = 0; r < 4; r++) {
            const __m128i one = _mm_loadu_si128((const __m128i *)(rows[r] + 12 * i));
            const __m128i other = _mm_loadu_si128((const __m128i *)(rows[r + 4] + 12 * i));
            of[r] = _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(one), other, 1), order);
        }
        const __m256i rg01 = _mm256_unpacklo_epi32(of[0], of[1]), rg23 = _mm256_unpacklo_epi32(of[2], of[3]);
        const __m256i b01 = _mm256_unpackhi_epi32(of[0], of[1]), b23 = _mm256_unpackhi_epi32(of[2], of[3]);
        const __m256i channels[3] = {_mm256_unpacklo_epi64(rg01, rg23), _mm256_unpackhi_epi64(rg01, rg23),
                                     _mm256_unpacklo_epi64(b01, b23)};
        for (int c = 0; c < 3; c++) {
            words[c] = _mm256_and_si256(channels[c], low);
            words[c + 3] = _mm256_srli_epi16(channels[c], 8);
        }
    }
}

/* What `widen` gave -> 8 rows with the new width, four of them to a word: upper and lower[pixel][channel][row].
 * A word more than that is written. */
INLINE void across_by(const __m256i *words, const struct axis *axis, int units, uint8_t *upper, uint8_t *lower) {
    const __m256i half = _mm256_set1_epi32(1 << (axis->precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(axis->precision);
    const int32_t *weights = axis->weights;
    for (int x = 0; x < axis->output; x++, weights += axis->units) {
        const __m256i *at = words + 3 * (axis->first[x] / 2);
        __m256i r = half, g = half, b = half;
        for (int i = 0; i < units; i++, at += 3) {
            const __m256i two = _mm256_set1_epi32(weights[i]);
            r = _mm256_add_epi32(r, _mm256_madd_epi16(at[0], two));
            g = _mm256_add_epi32(g, _mm256_madd_epi16(at[1], two));
            b = _mm256_add_epi32(b, _mm256_madd_epi16(at[2], two));
        }
        r = _mm256_sra_epi32(r, shift), g = _mm256_sra_epi32(g, shift), b = _mm256_sra_epi32(b, shift);
        const __m256i levels = _mm256_packus_epi16(_mm256_packs_epi32(r, g), _mm256_packs_epi32(b, b));
        _mm_storeu_si128((__m128i *)(upper + 12 * x), _mm256_castsi256_si128(levels));
        _mm_storeu_si128((__m128i *)(lower + 12 * x), _mm256_extracti128_si256(levels, 1));
    }
}

/* Loops of a known length are worth their code: enlarging takes 3 pairs, making half as large 5. */
static WITH_AVX2 void across(const __m256i *words, const struct axis *axis, uint8_t *upper, uint8_t *lower) {
    switch (axis->units) {
    case 3: across_by(words, axis, 3, upper, lower); break;
    case 4: across_by(words, axis, 4, upper, lower); break;
    case 5: across_by(words, axis, 5, upper, lower); break;
    case 6: across_by(words, axis, 6, upper, lower); break;
    default: across_by(words, axis, axis->units, upper, lower);
    }
}

/* Words of four rows -> one row, of so many vectors. */
INLINE void down_by(const uint8_t *const *fours, int count, const int32_t *weights, int precision, int vectors,
                    uint8_t *row) {
    const __m256i half = _mm256_set1_epi32(1 << (precision - 1)), low = _mm256_set1_epi16(0xff);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m128i shift = _mm_cvtsi32_si128(precision);
    for (int v = 0; v < vectors; v++) {
        __m256i sums[4] = {half, half, half, half};
        for (int i = 0; i < count; i++) {
            const __m256i *at = (const __m256i *)fours[i] + 4 * v;
            const __m256i even = _mm256_set1_epi32(weights[2 * i]), odd = _mm256_set1_epi32(weights[2 * i + 1]);
            for (int k = 0; k < 4; k++) {
                const __m256i word = _mm256_load_si256(at + k);
                sums[k] = _mm256_add_epi32(sums[k], _mm256_madd_epi16(_mm256_and_si256(word, low), even));
                sums[k] = _mm256_add_epi32(sums[k], _mm256_madd_epi16(_mm256_srli_epi16(word, 8), odd));
            }
        }
        for (int k = 0; k < 4; k++)
            sums[k] = _mm256_sra_epi32(sums[k], shift);
        const __m256i levels =
            _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
        _mm256_storeu_si256((__m256i *)row + v, _mm256_permutevar8x32_epi32(levels, order));
    }
}

static WITH_AVX2 void down(const uint8_t *const *fours, int count, const int32_t *weights, int precision,
                           int vectors, uint8_t *row) {
    switch (count) {
    case 1: down_by(fours, 1, weights, precision, vectors, row); break;
    case 2: down_by(fours, 2, weights, precision, vectors, row); break;
    case 3: down_by(fours, 3, weights, precision, vectors, row); break;
    default: down_by(fours, count, weights, precision, vectors, row);
    }
}

/* 32 bytes of each of the rows that an output is made of -> those of the output. */
INLINE __m256i down_bytes(const uint8_t *top, size_t row_bytes, int count, const int32_t *weights, int precision) {
    const __m256i half = _mm256_set1_epi32(1 << (precision - 1)), zero = _mm256_setzero_si256();
    const __m128i shift = _mm_cvtsi32_si128(precision);
    __m256i sums[4] = {half, half, half, half};
    for (int j = 0; j < count; j += 2) {
        const uint8_t *next = top + row_bytes * (j + 1 < count ? j + 1 : j); /* whose weight is 0 then */
        const __m256i one = _mm256_loadu_si256((const __m256i *)(top + row_bytes * j));
        const __m256i other = _mm256_loadu_si256((const __m256i *)next);
        const __m256i left = _mm256_unpacklo_epi8(one, other), right = _mm256_unpackhi_epi8(one, other);
        const __m256i two = _mm256_set1_epi32(weights[j / 2]);
        sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(_mm256_unpacklo_epi8(left, zero), two));
        sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(_mm256_unpackhi_epi8(left, zero), two));
        sums[2] = _mm256_add_epi32(sums[2], _mm256_madd_epi16(_mm256_unpacklo_epi8(right, zero), two));
        sums[3] = _mm256_add_epi32(sums[3], _mm256_madd_epi16(_mm256_unpackhi_epi8(right, zero), two));
    }
    for (int k = 0; k < 4; k++)
        sums[k] = _mm256_sra_epi32(sums[k], shift);
    return _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
}

/* Rows of an image -> one row, `bytes` long. */
static WITH_AVX2 void down_rows(const uint8_t *top, size_t row_bytes, int bytes, int count, const int32_t *weights,
                                int precision, uint8_t *row) {
    int at = 0;
    for (; at + VECTOR <= bytes; at += VECTOR)
        _mm256_storeu_si256((__m256i *)(row + at), down_bytes(top + at, row_bytes, count, weights, precision));
    if (at == bytes)
        return;
    if (bytes >= VECTOR) { /* the last ones once more */
        at = bytes - VECTOR;
        _mm256_storeu_si256((__m256i *)(row + at), down_bytes(top + at, row_bytes, count, weights, precision));
        return;
    }
    for (; at < bytes; at++) {
        int32_t sum = 1 << (precision - 1);
        for (int j = 0; j < count; j++)
            sum += top[row_bytes * j + at] * ((const int16_t *)weights)[j];
        sum >>= precision;
        row[at] = (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
    }
}

/* Words of four rows, so many vectors of results -> the rows. */
static WITH_AVX2 void spread(const uint8_t *fours, int vectors, uint8_t *const rows[4]) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i lanes = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int v = 0; v < vectors; v++) {
        __m256i of[4];
        for (int k = 0; k < 4; k++)
            of[k] = _mm256_shuffle_epi8(_mm256_load_si256((const __m256i *)fours + 4 * v + k), order);
        const __m256i upper01 = _mm256_unpacklo_epi32(of[0], of[1]), upper23 = _mm256_unpacklo_epi32(of[2], of[3]);
        const __m256i lower01 = _mm256_unpackhi_epi32(of[0], of[1]), lower23 = _mm256_unpackhi_epi32(of[2], of[3]);
        const __m256i four[4] = {_mm256_unpacklo_epi64(upper01, upper23), _mm256_unpackhi_epi64(upper01, upper23),
                                 _mm256_unpacklo_epi64(lower01, lower23), _mm256_unpackhi_epi64(lower01, lower23)};
        for (int r = 0; r < 4; r++)
            _mm256_storeu_si256((__m256i *)rows[r] + v, _mm256_permutevar8x32_epi32(four[r], lanes));
    }
}

/* ---- Results ---- */

/* Where an image goes. */
struct result {
    int height, width;
    uint8_t *levels;            /* [height][width][3], or */
    float *floats;              /* [3][height][width]: (level - offset) * factor */
    float offset[3], factor[3]; /* of each channel */
};

/* Take over a row of levels; up to 16 bytes behind it are read. */
static WITH_AVX2 void put(const struct result *to, int y, const uint8_t *row) {
    if (!to->floats) {
        memcpy(to->levels + (size_t)y * to->width * 3, row, (size_t)to->width * 3);
        return;
    }
    for (int c = 0; c < 3; c++) {
        const __m256i pick = _mm256_add_epi8(
            _mm256_set1_epi32(c), _mm256_broadcastsi128_si256(_mm_setr_epi32(
                                      (int)0x80808000, (int)0x80808003, (int)0x80808006, (int)0x80808009)));
        const __m256 offset = _mm256_set1_ps(to->offset[c]), factor = _mm256_set1_ps(to->factor[c]);
        float *plane = to->floats + ((size_t)c * to->height + y) * to->width;
        int x = 0;
        for (; x + 8 <= to->width; x += 8) {
            const __m128i one = _mm_loadu_si128((const __m128i *)(row + 3 * x));
            const __m128i other = _mm_loadu_si128((const __m128i *)(row + 3 * x + 12));
            const __m256i eight = _mm256_inserti128_si256(_mm256_castsi128_si256(one), other, 1);
            const __m256 levels = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(eight, pick));
            _mm256_storeu_ps(plane + x, _mm256_mul_ps(_mm256_sub_ps(levels, offset), factor));
        }
        for (; x < to->width; x++)
            plane[x] = ((float)row[3 * x + c] - to->offset[c]) * to->factor[c];
    }
}

/* ---- The whole ---- */

struct image {
    int height, width;
    const uint8_t *levels; /* [height][width][3], and so many bytes from row to row: */
    size_t row_bytes;
};

/* Memory that is taken piece by piece; without a base it is only counted. */
struct arena {
    uint8_t *base;
    size_t used;
};

static void *take(struct arena *arena, size_t count, size_t size) {
    void *piece = arena->base ? arena->base + arena->used : NULL;
    arena->used += (count * size + 63) / 64 * 64;
    return piece;
}

struct work {
    struct axis columns, rows;
    int vectors;               /* of a row of the result */
    size_t four_bytes;         /* of four rows of results, a word for each level */
    int ring;                  /* of so many of these */
    size_t line_bytes;         /* of a row that is copied or made first */
    __m256i *words;            /* what `widen` gives */
    uint8_t *fours;            /* [ring][four_bytes] */
    uint8_t *lines;            /* [BAND][line_bytes] */
    uint8_t *results;          /* [BAND] rows */
    const uint8_t **used;      /* [ring] */
};

static void take_axis(struct axis *axis, struct arena *arena, double *exact) {
    axis->first = take(arena, axis->output, sizeof(int));
    axis->count = take(arena, axis->output, sizeof(int));
    axis->weights = take(arena, (size_t)axis->output * axis->units, sizeof(int32_t));
    axis->exact = exact;
}

static void lay_out(struct work *work, const struct image *image, struct arena *arena) {
    const size_t columns = (size_t)work->columns.output * work->columns.most;
    const size_t rows = (size_t)work->rows.output * work->rows.most;
    double *exact = take(arena, columns > rows ? columns : rows, sizeof(double)); /* of one after the other */
    take_axis(&work->columns, arena, exact);
    take_axis(&work->rows, arena, exact);
    work->words = take(arena, ((size_t)image->width + 3) / 4 * 2 + work->columns.units, 3 * sizeof(__m256i));
    work->fours = take(arena, work->ring, work->four_bytes);
    work->lines = take(arena, BAND, work->line_bytes);
    work->results = take(arena, BAND, (size_t)work->vectors * VECTOR + SLACK);
    work->used = take(arena, work->ring, sizeof(const uint8_t *));
}

static uint8_t *four_of(const struct work *work, int number) {
    return work->fours + work->four_bytes * (number % work->ring);
}

static WITH_AVX2 void rows_first(struct work *work, const struct image *image, const struct result *to) {
    const struct axis *rows = &work->rows;
    const int fours = (image->width + 3) / 4;
    int y = 0;
    for (int top = 0; top < image->height; top += BAND) {
        const uint8_t *band[BAND];
        /* What is read behind a row lies in the next one, but for the last rows of an image. */
        const int has_next = top + BAND < image->height && 3 * image->width > 13;
        for (int r = 0; r < BAND; r++) {
            const int row = top + r < image->height ? top + r : image->height - 1;
            band[r] = image->levels + image->row_bytes * row;
            if (!has_next)
                band[r] = memcpy(work->lines + work->line_bytes * r, band[r], 3 * (size_t)image->width);
        }
        widen(band, fours, work->words);
        across(work->words, &work->columns, four_of(work, top / 4), four_of(work, top / 4 + 1));
        const int ready = top + BAND < image->height ? top + BAND : image->height;
        for (; y < to->height && rows->first[y] + rows->count[y] <= ready; y++) {
            const int first = rows->first[y] / 4, count = (rows->first[y] + rows->count[y] + 3) / 4 - first;
            for (int i = 0; i < count; i++)
                work->used[i] = four_of(work, first + i);
            down(work->used, count, rows->weights + (size_t)y * rows->units, rows->precision, work->vectors,
                 work->results);
            put(to, y, work->results);
        }
    }
}

static WITH_AVX2 void columns_first(struct work *work, const struct image *image, const struct result *to) {
    const struct axis *rows = &work->rows;
    for (int top = 0; top < to->height; top += BAND) {
        const uint8_t *band[BAND];
        uint8_t *results[BAND];
        for (int r = 0; r < BAND; r++) {
            const int y = top + r < to->height ? top + r : to->height - 1;
            uint8_t *line = work->lines + work->line_bytes * r;
            down_rows(image->levels + image->row_bytes * rows->first[y], image->row_bytes, 3 * image->width,
                      rows->count[y], rows->weights + (size_t)y * rows->units, rows->precision, line);
            band[r] = line;
            results[r] = work->results + ((size_t)work->vectors * VECTOR + SLACK) * r;
        }
        widen(band, (image->width + 3) / 4, work->words);
        across(work->words, &work->columns, four_of(work, 0), four_of(work, 1));
        spread(four_of(work, 0), work->vectors, results);
        spread(four_of(work, 1), work->vectors, results + 4);
        for (int r = 0; r < BAND && top + r < to->height; r++)
            put(to, top + r, results[r]);
    }
}

/* -1 if there isn't enough memory. */
static int resize(const struct image *image, enum filter by, int is_columns_first, const struct result *to) {
    struct work work = {
        .columns = {.input = image->width, .output = to->width},
        .rows = {.input = image->height, .output = to->height},
        .vectors = (3 * to->width + VECTOR - 1) / VECTOR,
        .line_bytes = 3 * (size_t)image->width + SLACK,
    };
    work.columns.most = taps(by, &work.columns);
    work.rows.most = taps(by, &work.rows);
    work.columns.units = work.columns.most / 2 + 1; /* from an odd number on it touches one pair more */
    work.rows.units = is_columns_first ? (work.rows.most + 1) / 2 : (work.rows.most + 6) / 4 * 2;
    work.ring = work.rows.units / 2 + 2;
    work.four_bytes = ((size_t)work.vectors * VECTOR * 4 + 16 + 63) / 64 * 64;
    struct arena arena = {NULL, 0};
    lay_out(&work, image, &arena);
    arena.base = aligned_alloc(64, arena.used);
    if (!arena.base)
        return -1;
    arena.used = 0;
    lay_out(&work, image, &arena);

    weigh(&work.columns, by);
    int units = 1;
    for (int x = 0; x < to->width; x++) {
        const int first = work.columns.first[x] / 2;
        const int touched = (work.columns.first[x] + work.columns.count[x] + 1) / 2 - first;
        units = touched > units ? touched : units;
    }
    work.columns.units = units;
    weigh_pairs(&work.columns, 1);
    weigh(&work.rows, by);
    if (is_columns_first) {
        weigh_pairs(&work.rows, 0);
        columns_first(&work, image, to);
    } else {
        weigh_fours(&work.rows);
        rows_first(&work, image, to);
    }
    free(arena.base);
    return 0;
}

/* ---- Python ---- */

static PyObject *is_supported(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    return PyBool_FromLong(__builtin_cpu_supports("avx2"));
}

static PyObject *resize_into(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    enum { SOURCE, ROW_BYTES, HEIGHT, WIDTH, BY, COLUMNS_FIRST, OUT, NEW_HEIGHT, NEW_WIDTH, NUMBERS };
    if (count != NUMBERS + 1) {
        PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", NUMBERS + 1, count);
        return NULL;
    }
    size_t numbers[NUMBERS];
    for (int i = 0; i < NUMBERS; i++) {
        numbers[i] = PyLong_AsSize_t(arguments[i]);
        if (numbers[i] == (size_t)-1 && PyErr_Occurred())
            return NULL;
    }
    for (int i = 0; i < 4; i++) {
        const size_t side = numbers[(const int[]){HEIGHT, WIDTH, NEW_HEIGHT, NEW_WIDTH}[i]];
        if (side < 1 || side > 1 << 16) {
            PyErr_Format(PyExc_ValueError, "a side of %zu pixels; 1 to %d are possible", side, 1 << 16);
            return NULL;
        }
    }
    const struct image image = {.height = (int)numbers[HEIGHT],
                                .width = (int)numbers[WIDTH],
                                .levels = (const uint8_t *)numbers[SOURCE],
                                .row_bytes = numbers[ROW_BYTES]};
    struct result to = {.height = (int)numbers[NEW_HEIGHT], .width = (int)numbers[NEW_WIDTH]};
    PyObject *const statistics = arguments[NUMBERS];
    if (statistics == Py_None) {
        to.levels = (uint8_t *)numbers[OUT];
    } else {
        char *floats;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(statistics, &floats, &size) < 0)
            return NULL;
        if (size != sizeof to.offset + sizeof to.factor) {
            PyErr_SetString(PyExc_ValueError, "statistics are six float32: offsets, then factors");
            return NULL;
        }
        memcpy(to.offset, floats, sizeof to.offset);
        memcpy(to.factor, floats + sizeof to.offset, sizeof to.factor);
        to.floats = (float *)numbers[OUT];
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = resize(&image, numbers[BY] ? BILINEAR : BICUBIC, numbers[COLUMNS_FIRST] != 0, &to);
    Py_END_ALLOW_THREADS
    return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"is_supported", is_supported, METH_NOARGS, "Whether this processor has AVX2."},
    {"resize_into", (PyCFunction)(void (*)(void))resize_into, METH_FASTCALL, "See fused.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_avx2", .m_doc = "See fused.py.", .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC PyInit__avx2(void) { return PyModuleDef_Init(&module); }
