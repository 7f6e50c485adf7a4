/* Crop, antialiased resize and normalisation of one RGB image in one call, with AVX2; on aarch64 with NEON.
 *
 * Bit-identical to Pillow's 8-bit resize (src/libImaging/Resample.c): weights are computed in double and rounded to 22
 * fractional bits; sums have 32 bits; results are rounded to uint8 after each of the two passes. Integer sums don't
 * depend on the order, so only the memory layout differs: the first pass handles eight rows in parallel, and its
 * results stay in the L1 cache until the second pass has used them.
 *
 *   rows first     8 rows of the image -> widen -> across -> a ring of results, four rows to a word -> down -> a row
 *   columns first  the image -> down_rows -> 8 rows -> widen -> across -> spread -> 8 rows
 *
 * Vectors multiply 16 by 16 bits, so a weight is split in two signed parts: 2^16 high + low. Sums equal Pillow's modulo
 * 2^32, so overflow in the sum of one part is harmless.
 *
 * Only a part of the resized image may be requested; then only the needed part of the source is read. Each row of the
 * result is written as uint8 (channels last) or normalised to float32 (channels first) as torch does: level / 255, minus
 * the mean, divided by the standard deviation, each rounded to float32.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
/* With `fma` a compiler may fuse a product and a sum into one rounding: only `put` enables it, and says where. */
#define WITH_AVX2 __attribute__((target("avx2")))
#define WITH_FMA __attribute__((target("avx2,fma")))
/* Keeps this order of the sums: other orders are correct, too, but need more registers than there are. */
#define KEEP(a, b, c) __asm__("" : "+x"(a), "+x"(b), "+x"(c))

/* Whether the processor has AVX2 and FMA, and the system keeps their registers: by CPUID, as `__builtin_cpu_supports`
 * is false everywhere in what zig links. */
static int has_instructions(void) {
    enum { FMA = 1 << 12, OSXSAVE = 1 << 27, AVX2 = 1 << 5, XMM_AND_YMM = 6 };
    unsigned a, b, c, d, kept, upper;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & FMA) || !(c & OSXSAVE))
        return 0;
    __asm__("xgetbv" : "=a"(kept), "=d"(upper) : "c"(0));
    return (kept & XMM_AND_YMM) == XMM_AND_YMM && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & AVX2);
}
#elif defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include "_neon.h"
#define WITH_AVX2
#define WITH_FMA /* always there: -ffp-contract=off keeps the compiler from using it by itself */
#define KEEP(a, b, c) ((void)0)
static int has_instructions(void) { return 1; }
#else
#error "x86-64 or little-endian aarch64 is needed; without this module torch or Pillow resizes"
#endif
#define INLINE static inline __attribute__((always_inline)) WITH_AVX2

enum filter { BICUBIC, BILINEAR };

enum { BAND = 8, VECTOR = 32, SLACK = 32 }; /* rows at a time; bytes; what a load may read past a row of ours */
enum { POINT = 22 };                        /* fractional bits of a weight */
enum { HALF = 1 << (POINT - 1) };
enum { LONGEST = 1 << 16 };                 /* pixels of a side */

/* ---- Weights ---- */

/* The weights along one axis, for the outputs from `begin` on of `whole`; each uses `count` inputs from `first` on. */
struct axis {
    int input, whole, begin, output;
    int most;         /* maximum taps of an output, padded with zeros */
    int units;        /* groups of weights per output */
    int *first, *count;
    double *exact;    /* [most], of one output */
    int32_t *fixed;   /* [output][most] */
    int32_t *weights; /* [output][units], several words each, in the layout of the pass */
};

static double reach(enum filter by, const struct axis *axis) {
    const double radius = by == BICUBIC ? 2.0 : 1.0, scale = (double)axis->input / axis->whole;
    return scale >= 1.0 ? radius * scale : radius;
}

static int taps(enum filter by, const struct axis *axis) { return (2 * (int)ceil(reach(by, axis)) + 4) / 4 * 4; }

/* Keys' cubic with a = -0.5, or a triangle; products and sums in Pillow's order. */
INLINE __m256d weight(enum filter by, __m256d x) {
    const __m256d one = _mm256_set1_pd(1.0), half = _mm256_set1_pd(-0.5);
    x = _mm256_andnot_pd(_mm256_set1_pd(-0.0), x);
    const __m256d is_near = _mm256_cmp_pd(x, one, _CMP_LT_OQ);
    if (by == BILINEAR)
        return _mm256_and_pd(is_near, _mm256_sub_pd(one, x));
    __m256d near = _mm256_sub_pd(_mm256_mul_pd(_mm256_set1_pd(1.5), x), _mm256_set1_pd(2.5));
    near = _mm256_add_pd(_mm256_mul_pd(_mm256_mul_pd(near, x), x), one);
    __m256d far = _mm256_add_pd(_mm256_mul_pd(_mm256_sub_pd(x, _mm256_set1_pd(5.0)), x), _mm256_set1_pd(8.0));
    far = _mm256_mul_pd(_mm256_sub_pd(_mm256_mul_pd(far, x), _mm256_set1_pd(4.0)), half);
    far = _mm256_and_pd(far, _mm256_cmp_pd(x, _mm256_set1_pd(2.0), _CMP_LT_OQ));
    return _mm256_blendv_pd(far, near, is_near);
}

INLINE void weigh_by(enum filter by, struct axis *axis) {
    const double scale = (double)axis->input / axis->whole, support = reach(by, axis);
    const double inverse = 1.0 / (scale >= 1.0 ? scale : 1.0);
    const __m256d half = _mm256_set1_pd(0.5), sign = _mm256_set1_pd(-0.0), unit = _mm256_set1_pd(1 << POINT);
    double *exact = axis->exact;
    for (int i = 0; i < axis->output; i++) {
        const double centre = (axis->begin + i + 0.5) * scale;
        const int before = (int)(centre - support + 0.5), behind = (int)(centre + support + 0.5);
        const int first = before > 0 ? before : 0;
        const int count = (behind < axis->input ? behind : axis->input) - first;
        const __m256d centres = _mm256_set1_pd(centre), inverses = _mm256_set1_pd(inverse);
        __m128i place = _mm_add_epi32(_mm_set1_epi32(first), _mm_setr_epi32(0, 1, 2, 3));
        for (int j = 0; j < count; j += 4, place = _mm_add_epi32(place, _mm_set1_epi32(4))) {
            const __m256d distance = _mm256_add_pd(_mm256_sub_pd(_mm256_cvtepi32_pd(place), centres), half);
            _mm256_storeu_pd(exact + j, weight(by, _mm256_mul_pd(distance, inverses)));
        }
        double sum = 0.0;
        for (int j = 0; j < count; j++)
            sum += exact[j];
        for (int j = count; j % 4; j++)
            exact[j] = 0.0;
        int32_t *fixed = axis->fixed + (size_t)i * axis->most;
        for (int j = 0; j < count; j += 4) {
            __m256d share = _mm256_loadu_pd(exact + j);
            if (sum != 0.0)
                share = _mm256_div_pd(share, _mm256_set1_pd(sum));
            const __m256d rounding = _mm256_or_pd(half, _mm256_and_pd(share, sign));
            share = _mm256_add_pd(rounding, _mm256_mul_pd(share, unit));
            _mm_storeu_si128((__m128i *)(fixed + j), _mm256_cvttpd_epi32(share));
        }
        axis->first[i] = first;
        axis->count[i] = count;
    }
}

static WITH_AVX2 void weigh(enum filter by, struct axis *axis) {
    if (by == BICUBIC)
        weigh_by(BICUBIC, axis);
    else
        weigh_by(BILINEAR, axis);
}

/* The inputs that the outputs need: their number, and the first one, which becomes input 0. */
static int cut(struct axis *axis, int *count) {
    const int last = axis->output - 1, start = axis->first[0];
    *count = axis->first[last] + axis->count[last] - start;
    for (int i = 0; i <= last; i++)
        axis->first[i] -= start;
    return start;
}

static int16_t low_of(int32_t weight) { return (int16_t)weight; }

static int32_t high_of(int32_t weight) { return (weight - low_of(weight)) >> 16; } /* fits in 8 bits */

enum { WORDS_OF_TWO = 2, WORDS_OF_FOUR = 3 }; /* per group of weights */

/* For `across`: [two low] of each pair of neighbours, the first at an even index, then [four high] of each four. */
static void weigh_across(struct axis *axis) {
    const int fours = axis->units / 2 + 1;
    memset(axis->weights, 0, (size_t)axis->output * (axis->units + fours) * sizeof(int32_t));
    for (int i = 0; i < axis->output; i++) {
        int32_t *at = axis->weights + (size_t)i * (axis->units + fours);
        int16_t *lows = (int16_t *)at + axis->first[i] % 2;
        int8_t *highs = (int8_t *)(at + axis->units);
        const int32_t *fixed = axis->fixed + (size_t)i * axis->most;
        for (int j = 0; j < axis->count[i]; j++) {
            const int place = axis->first[i] % 4 + j;
            lows[j] = low_of(fixed[j]);
            highs[place / 4 * 4 + place % 2 * 2 + place % 4 / 2] = (int8_t)high_of(fixed[j]);
        }
    }
}

/* For `down_rows`: [two low][the bytes high, high, twice], of an output's first two inputs, the next two … */
static void weigh_pairs(struct axis *axis) {
    memset(axis->weights, 0, (size_t)axis->output * axis->units * WORDS_OF_TWO * sizeof(int32_t));
    for (int i = 0; i < axis->output; i++) {
        int32_t *at = axis->weights + (size_t)i * axis->units * WORDS_OF_TWO;
        const int32_t *fixed = axis->fixed + (size_t)i * axis->most;
        for (int j = 0; j < axis->count[i]; j++) {
            int32_t *pair = at + j / 2 * WORDS_OF_TWO;
            ((int16_t *)pair)[j % 2] = low_of(fixed[j]);
            ((int8_t *)(pair + 1))[j % 2] = ((int8_t *)(pair + 1))[j % 2 + 2] = (int8_t)high_of(fixed[j]);
        }
    }
}

/* For `down`: [low of the first, third][low of the second, fourth][the bytes high of all], four to a word. */
static void weigh_fours(struct axis *axis) {
    memset(axis->weights, 0, (size_t)axis->output * axis->units * WORDS_OF_FOUR * sizeof(int32_t));
    for (int i = 0; i < axis->output; i++) {
        int32_t *at = axis->weights + (size_t)i * axis->units * WORDS_OF_FOUR;
        const int32_t *fixed = axis->fixed + (size_t)i * axis->most;
        for (int j = 0; j < axis->count[i]; j++) {
            const int place = axis->first[i] % 4 + j, of_four = place % 4;
            int32_t *four = at + place / 4 * WORDS_OF_FOUR;
            ((int16_t *)four)[of_four % 2 * 2 + of_four / 2] = low_of(fixed[j]);
            ((int8_t *)(four + 2))[of_four] = (int8_t)high_of(fixed[j]);
        }
    }
}

/* ---- Passes ---- */

/* Eight rows in parallel: each has 32 bits of every vector. */
struct band {
    __m256i *pairs; /* [pair of neighbours][channel], of 16 bits each */
    __m256i *fours; /* [four neighbours][channel], a byte each: the first, the third, the second, the fourth */
};

/* 8 rows of RGB in parallel, four pixels at a time. Reads up to 13 bytes past a row. */
INLINE void widen(const uint8_t *const rows[BAND], int fours, const struct band *to) {
    __m256i *pairs = to->pairs, *bytes = to->fours;
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 6, 3, 9, 1, 7, 4, 10, 2, 8, 5, 11, -1, -1, -1, -1));
    const __m256i low = _mm256_set1_epi16(0xff);
    for (int i = 0; i < fours; i++, pairs += 6, bytes += 3) {
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
            bytes[c] = channels[c];
            pairs[c] = _mm256_and_si256(channels[c], low);
            pairs[c + 3] = _mm256_srli_epi16(channels[c], 8);
        }
    }
}

/* High parts in 16-bit sums, two to a word -> their position in a 32-bit sum. */
INLINE __m256i raised(__m256i highs) {
    const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
    return _mm256_add_epi32(_mm256_slli_epi32(highs, 16), _mm256_and_si256(highs, upper));
}

/* Results of `widen` -> 8 rows of the new width, four of them to a word: upper and lower[pixel][channel][row].
 * Writes one more word. */
INLINE void across_by(const struct band *band, const struct axis *axis, int units, uint8_t *upper, uint8_t *lower) {
    const __m256i half = _mm256_set1_epi32(HALF), zero = _mm256_setzero_si256();
    const int fours = units / 2 + 1;
    const int32_t *weights = axis->weights;
    for (int x = 0; x < axis->output; x++, weights += units + fours) {
        const __m256i *pairs = band->pairs + 3 * (axis->first[x] / 2), *bytes = band->fours + 3 * (axis->first[x] / 4);
        __m256i r = half, g = half, b = half, high_r = zero, high_g = zero, high_b = zero;
        for (int i = 0; i < units; i++) {
            const __m256i low = _mm256_set1_epi32(weights[i]);
            r = _mm256_add_epi32(r, _mm256_madd_epi16(pairs[3 * i], low));
            g = _mm256_add_epi32(g, _mm256_madd_epi16(pairs[3 * i + 1], low));
            b = _mm256_add_epi32(b, _mm256_madd_epi16(pairs[3 * i + 2], low));
            KEEP(r, g, b);
        }
        for (int i = 0; i < fours; i++) {
            const __m256i high = _mm256_set1_epi32(weights[units + i]);
            high_r = _mm256_add_epi16(high_r, _mm256_maddubs_epi16(bytes[3 * i], high));
            high_g = _mm256_add_epi16(high_g, _mm256_maddubs_epi16(bytes[3 * i + 1], high));
            high_b = _mm256_add_epi16(high_b, _mm256_maddubs_epi16(bytes[3 * i + 2], high));
            KEEP(high_r, high_g, high_b);
        }
        r = _mm256_srai_epi32(_mm256_add_epi32(r, raised(high_r)), POINT);
        g = _mm256_srai_epi32(_mm256_add_epi32(g, raised(high_g)), POINT);
        b = _mm256_srai_epi32(_mm256_add_epi32(b, raised(high_b)), POINT);
        const __m256i levels = _mm256_packus_epi16(_mm256_packs_epi32(r, g), _mm256_packs_epi32(b, b));
        _mm_storeu_si128((__m128i *)(upper + 12 * x), _mm256_castsi256_si128(levels));
        _mm_storeu_si128((__m128i *)(lower + 12 * x), _mm256_extracti128_si256(levels, 1));
    }
}

/* Loops of known length are worth their code size: enlarging takes 3 pairs, halving 5. */
static WITH_AVX2 void across(const struct band *band, const struct axis *axis, uint8_t *upper, uint8_t *lower) {
    switch (axis->units) {
    case 3: across_by(band, axis, 3, upper, lower); break;
    case 4: across_by(band, axis, 4, upper, lower); break;
    case 5: across_by(band, axis, 5, upper, lower); break;
    case 6: across_by(band, axis, 6, upper, lower); break;
    default: across_by(band, axis, axis->units, upper, lower);
    }
}

/* Words of four rows -> one row of this many vectors. */
INLINE void down_by(const uint8_t *const *fours, int count, const int32_t *weights, int vectors, uint8_t *row) {
    const __m256i half = _mm256_set1_epi32(HALF), zero = _mm256_setzero_si256();
    const __m256i lower = _mm256_set1_epi16(0xff);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int v = 0; v < vectors; v++) {
        __m256i lows[4] = {half, half, half, half}, highs[4] = {zero, zero, zero, zero}; /* highs: two of 16 bits */
        for (int i = 0; i < count; i++) {
            const __m256i *at = (const __m256i *)fours[i] + 4 * v;
            const int32_t *own = weights + WORDS_OF_FOUR * i;
            const __m256i even = _mm256_set1_epi32(own[0]), odd = _mm256_set1_epi32(own[1]);
            const __m256i high = _mm256_set1_epi32(own[2]);
            for (int k = 0; k < 4; k++) {
                const __m256i word = _mm256_load_si256(at + k);
                lows[k] = _mm256_add_epi32(lows[k], _mm256_madd_epi16(_mm256_and_si256(word, lower), even));
                lows[k] = _mm256_add_epi32(lows[k], _mm256_madd_epi16(_mm256_srli_epi16(word, 8), odd));
                highs[k] = _mm256_add_epi16(highs[k], _mm256_maddubs_epi16(word, high));
            }
        }
        for (int k = 0; k < 4; k++) {
            lows[k] = _mm256_srai_epi32(_mm256_add_epi32(lows[k], raised(highs[k])), POINT);
        }
        const __m256i levels =
            _mm256_packus_epi16(_mm256_packs_epi32(lows[0], lows[1]), _mm256_packs_epi32(lows[2], lows[3]));
        _mm256_storeu_si256((__m256i *)row + v, _mm256_permutevar8x32_epi32(levels, order));
    }
}

static WITH_AVX2 void down(const uint8_t *const *fours, int count, const int32_t *weights, int vectors,
                           uint8_t *row) {
    switch (count) {
    case 1: down_by(fours, 1, weights, vectors, row); break;
    case 2: down_by(fours, 2, weights, vectors, row); break;
    case 3: down_by(fours, 3, weights, vectors, row); break;
    default: down_by(fours, count, weights, vectors, row);
    }
}

/* 32 bytes of each of an output's input rows -> 32 bytes of the output. */
INLINE __m256i down_bytes(const uint8_t *top, size_t row_bytes, int count, const int32_t *weights) {
    const __m256i half = _mm256_set1_epi32(HALF), zero = _mm256_setzero_si256();
    __m256i lows[4] = {half, half, half, half}, highs[2] = {zero, zero}; /* highs: of 16 bits */
    for (int j = 0; j < count; j += 2, weights += WORDS_OF_TWO) {
        const uint8_t *next = top + row_bytes * (j + 1 < count ? j + 1 : j); /* its weight is 0 then */
        const __m256i one = _mm256_loadu_si256((const __m256i *)(top + row_bytes * j));
        const __m256i other = _mm256_loadu_si256((const __m256i *)next);
        const __m256i low = _mm256_set1_epi32(weights[0]), high = _mm256_set1_epi32(weights[1]);
        const __m256i both[2] = {_mm256_unpacklo_epi8(one, other), _mm256_unpackhi_epi8(one, other)};
        for (int k = 0; k < 2; k++) {
            const __m256i left = _mm256_unpacklo_epi8(both[k], zero), right = _mm256_unpackhi_epi8(both[k], zero);
            lows[2 * k] = _mm256_add_epi32(lows[2 * k], _mm256_madd_epi16(left, low));
            lows[2 * k + 1] = _mm256_add_epi32(lows[2 * k + 1], _mm256_madd_epi16(right, low));
            highs[k] = _mm256_add_epi16(highs[k], _mm256_maddubs_epi16(both[k], high));
        }
    }
    for (int k = 0; k < 2; k++) {
        lows[2 * k] = _mm256_add_epi32(lows[2 * k], _mm256_unpacklo_epi16(zero, highs[k]));
        lows[2 * k + 1] = _mm256_add_epi32(lows[2 * k + 1], _mm256_unpackhi_epi16(zero, highs[k]));
    }
    for (int k = 0; k < 4; k++)
        lows[k] = _mm256_srai_epi32(lows[k], POINT);
    return _mm256_packus_epi16(_mm256_packs_epi32(lows[0], lows[1]), _mm256_packs_epi32(lows[2], lows[3]));
}

/* Rows of an image -> one row, `bytes` long. */
static WITH_AVX2 void down_rows(const uint8_t *top, size_t row_bytes, int bytes, int count, const int32_t *weights,
                                const int32_t *fixed, uint8_t *row) {
    int at = 0;
    for (; at + VECTOR <= bytes; at += VECTOR)
        _mm256_storeu_si256((__m256i *)(row + at), down_bytes(top + at, row_bytes, count, weights));
    if (at == bytes)
        return;
    if (bytes >= VECTOR) { /* repeats some of the last ones */
        at = bytes - VECTOR;
        _mm256_storeu_si256((__m256i *)(row + at), down_bytes(top + at, row_bytes, count, weights));
        return;
    }
    for (; at < bytes; at++) {
        int32_t sum = HALF;
        for (int j = 0; j < count; j++)
            sum += top[row_bytes * j + at] * fixed[j];
        sum >>= POINT;
        row[at] = (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
    }
}

/* Words of four rows, as vectors of results -> the rows. */
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

/* The destination of an image. */
struct result {
    int height, width;
    uint8_t *levels;       /* [height][width][3], or */
    float *floats;         /* [3][height][width], normalised per channel by: */
    float mean[3], std[3];
    int is_quick[3];       /* whether `quotient` equals division */
};

/* a / b as a product with 1 / b and a correction: mostly equal to division, and faster. */
static inline __attribute__((always_inline)) WITH_FMA __m256 quotient(__m256 a, __m256 b, __m256 inverse) {
    const __m256 near = _mm256_mul_ps(a, inverse);
    return _mm256_fmadd_ps(_mm256_fnmadd_ps(near, b, a), inverse, near);
}

/* Levels by division and by the quick quotient. */
static inline __attribute__((always_inline)) WITH_FMA __m256 slowly(__m256 levels, __m256 mean, __m256 std) {
    return _mm256_div_ps(_mm256_sub_ps(_mm256_div_ps(levels, _mm256_set1_ps(255.0f)), mean), std);
}

static inline __attribute__((always_inline)) WITH_FMA __m256 quickly(__m256 levels, __m256 mean, __m256 std,
                                                                     __m256 inverse) {
    const __m256 white = _mm256_set1_ps(255.0f), part = _mm256_set1_ps(1.0f / 255.0f);
    return quotient(_mm256_sub_ps(quotient(levels, white, part), mean), std, inverse);
}

/* Try all 256 levels of each channel. */
static WITH_FMA void find_quick(struct result *to) {
    for (int c = 0; c < 3; c++) {
        const __m256 mean = _mm256_set1_ps(to->mean[c]), std = _mm256_set1_ps(to->std[c]);
        const __m256 inverse = _mm256_set1_ps(1.0f / to->std[c]);
        __m256 levels = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i differ = _mm256_setzero_si256();
        for (int i = 0; i < 32; i++, levels = _mm256_add_ps(levels, _mm256_set1_ps(8.0f))) {
            const __m256 quick = quickly(levels, mean, std, inverse), slow = slowly(levels, mean, std);
            differ = _mm256_or_si256(
                differ, _mm256_xor_si256(_mm256_castps_si256(quick), _mm256_castps_si256(slow)));
        }
        to->is_quick[c] = _mm256_testz_si256(differ, differ);
    }
}

/* Write a row of levels; reads up to 16 bytes past it. */
static WITH_FMA void put(const struct result *to, int y, const uint8_t *row) {
    if (!to->floats) {
        memcpy(to->levels + (size_t)y * to->width * 3, row, (size_t)to->width * 3);
        return;
    }
    for (int c = 0; c < 3; c++) {
        const __m256i pick = _mm256_add_epi8(
            _mm256_set1_epi32(c), _mm256_broadcastsi128_si256(_mm_setr_epi32(
                                      (int)0x80808000, (int)0x80808003, (int)0x80808006, (int)0x80808009)));
        const __m256 mean = _mm256_set1_ps(to->mean[c]), std = _mm256_set1_ps(to->std[c]);
        const __m256 inverse = _mm256_set1_ps(1.0f / to->std[c]);
        float *plane = to->floats + ((size_t)c * to->height + y) * to->width;
        int x = 0;
        for (; x + 8 <= to->width; x += 8) {
            const __m128i one = _mm_loadu_si128((const __m128i *)(row + 3 * x));
            const __m128i other = _mm_loadu_si128((const __m128i *)(row + 3 * x + 12));
            const __m256i eight = _mm256_inserti128_si256(_mm256_castsi128_si256(one), other, 1);
            const __m256 levels = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(eight, pick));
            _mm256_storeu_ps(plane + x, to->is_quick[c] ? quickly(levels, mean, std, inverse)
                                                        : slowly(levels, mean, std));
        }
        for (; x < to->width; x++)
            plane[x] = ((float)row[3 * x + c] / 255.0f - to->mean[c]) / to->std[c];
    }
}

/* ---- The whole ---- */

struct image {
    int height, width;
    const uint8_t *levels; /* [height][width][3], with this many bytes from row to row: */
    size_t row_bytes;
};

/* Bump allocator; without a base it only counts. */
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
    size_t four_bytes;         /* of four rows of results, one word per level */
    int ring;                  /* the number of these */
    size_t line_bytes;         /* of a row that is copied or computed first */
    struct band band;
    uint8_t *fours;            /* [ring][four_bytes] */
    uint8_t *lines;            /* [BAND][line_bytes] */
    uint8_t *results;          /* [BAND] rows */
    const uint8_t **used;      /* [ring] */
};

static void take_axis(struct axis *axis, struct arena *arena, int words) {
    axis->first = take(arena, axis->output, sizeof(int));
    axis->count = take(arena, axis->output, sizeof(int));
    axis->exact = take(arena, axis->most, sizeof(double));
    axis->fixed = take(arena, (size_t)axis->output * axis->most, sizeof(int32_t));
    axis->weights = take(arena, (size_t)axis->output * axis->units * words, sizeof(int32_t));
}

static void lay_out(struct work *work, const struct image *image, struct arena *arena) {
    take_axis(&work->columns, arena, WORDS_OF_TWO);
    take_axis(&work->rows, arena, WORDS_OF_FOUR);
    const size_t fours = ((size_t)image->width + 3) / 4 + work->columns.units; /* and the padding after them */
    work->band.pairs = take(arena, 2 * fours, 3 * sizeof(__m256i));
    work->band.fours = take(arena, fours, 3 * sizeof(__m256i));
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
        /* Reads past a row end in the next one, except for the last rows of an image. */
        const int has_next = top + BAND < image->height && 3 * image->width > 13;
        for (int r = 0; r < BAND; r++) {
            const int row = top + r < image->height ? top + r : image->height - 1;
            band[r] = image->levels + image->row_bytes * row;
            if (!has_next)
                band[r] = memcpy(work->lines + work->line_bytes * r, band[r], 3 * (size_t)image->width);
        }
        widen(band, fours, &work->band);
        across(&work->band, &work->columns, four_of(work, top / 4), four_of(work, top / 4 + 1));
        const int ready = top + BAND < image->height ? top + BAND : image->height;
        for (; y < to->height && rows->first[y] + rows->count[y] <= ready; y++) {
            const int first = rows->first[y] / 4, count = (rows->first[y] + rows->count[y] + 3) / 4 - first;
            for (int i = 0; i < count; i++)
                work->used[i] = four_of(work, first + i);
            down(work->used, count, rows->weights + (size_t)y * rows->units * WORDS_OF_FOUR, work->vectors,
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
                      rows->count[y], rows->weights + (size_t)y * rows->units * WORDS_OF_TWO,
                      rows->fixed + (size_t)y * rows->most, line);
            band[r] = line;
            results[r] = work->results + ((size_t)work->vectors * VECTOR + SLACK) * r;
        }
        widen(band, (image->width + 3) / 4, &work->band);
        across(&work->band, &work->columns, four_of(work, 0), four_of(work, 1));
        spread(four_of(work, 0), work->vectors, results);
        spread(four_of(work, 1), work->vectors, results + 4);
        for (int r = 0; r < BAND && top + r < to->height; r++)
            put(to, top + r, results[r]);
    }
}

/* Resize an image to height × width; the result is the part that begins at top and left. */
struct whole {
    int height, width, top, left;
};

/* -1 if there isn't enough memory. */
static int resize(struct image image, enum filter by, int is_columns_first, const struct whole *whole,
                  const struct result *to) {
    struct work work = {
        .columns = {.input = image.width, .whole = whole->width, .begin = whole->left, .output = to->width},
        .rows = {.input = image.height, .whole = whole->height, .begin = whole->top, .output = to->height},
        .vectors = (3 * to->width + VECTOR - 1) / VECTOR,
        .line_bytes = 3 * (size_t)image.width + SLACK,
    };
    work.columns.most = taps(by, &work.columns);
    work.rows.most = taps(by, &work.rows);
    work.columns.units = work.columns.most / 2 + 1; /* from an odd number on it needs one more pair */
    work.rows.units = is_columns_first ? work.rows.most / 2 : work.rows.most / 4 + 1;
    work.ring = work.rows.most / 4 + 3;
    work.four_bytes = ((size_t)work.vectors * VECTOR * 4 + 16 + 63) / 64 * 64;
    struct arena arena = {NULL, 0};
    lay_out(&work, &image, &arena);
    arena.base = aligned_alloc(64, arena.used);
    if (!arena.base)
        return -1;
    arena.used = 0;
    lay_out(&work, &image, &arena);

    weigh(by, &work.columns);
    weigh(by, &work.rows);
    image.levels += 3 * (size_t)cut(&work.columns, &image.width);
    image.levels += image.row_bytes * cut(&work.rows, &image.height);
    int units = 1;
    for (int x = 0; x < to->width; x++) {
        const int first = work.columns.first[x] / 2;
        const int touched = (work.columns.first[x] + work.columns.count[x] + 1) / 2 - first;
        units = touched > units ? touched : units;
    }
    work.columns.units = units;
    weigh_across(&work.columns);
    if (is_columns_first) {
        weigh_pairs(&work.rows);
        columns_first(&work, &image, to);
    } else {
        weigh_fours(&work.rows);
        rows_first(&work, &image, to);
    }
    free(arena.base);
    return 0;
}

/* ---- Python ---- */

static PyObject *is_supported(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    return PyBool_FromLong(has_instructions());
}

static PyObject *resize_into(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    enum { SOURCE, ROW_BYTES, HEIGHT, WIDTH, BY, COLUMNS_FIRST, NEW_HEIGHT, NEW_WIDTH,
           OUT, TOP, LEFT, PART_HEIGHT, PART_WIDTH, NUMBERS };
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
        const size_t side = numbers[(const int[]){HEIGHT, WIDTH, PART_HEIGHT, PART_WIDTH}[i]];
        if (side < 1 || side > LONGEST) {
            PyErr_Format(PyExc_ValueError, "a side of %zu pixels; 1 to %d are possible", side, LONGEST);
            return NULL;
        }
    }
    for (int i = 0; i < 2; i++) {
        const size_t begin = numbers[TOP + i], side = numbers[PART_HEIGHT + i], all = numbers[NEW_HEIGHT + i];
        if (all > INT_MAX || side > all || begin > all - side) {
            PyErr_Format(PyExc_ValueError, "%zu pixels from %zu on aren't a part of %zu", side, begin, all);
            return NULL;
        }
    }
    const struct image image = {.height = (int)numbers[HEIGHT],
                                .width = (int)numbers[WIDTH],
                                .levels = (const uint8_t *)numbers[SOURCE],
                                .row_bytes = numbers[ROW_BYTES]};
    const struct whole whole = {(int)numbers[NEW_HEIGHT], (int)numbers[NEW_WIDTH], (int)numbers[TOP],
                                (int)numbers[LEFT]};
    struct result to = {.height = (int)numbers[PART_HEIGHT], .width = (int)numbers[PART_WIDTH]};
    PyObject *const statistics = arguments[NUMBERS];
    if (statistics == Py_None) {
        to.levels = (uint8_t *)numbers[OUT];
    } else {
        char *floats;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(statistics, &floats, &size) < 0)
            return NULL;
        if (size != sizeof to.mean + sizeof to.std) {
            PyErr_SetString(PyExc_ValueError, "statistics are six float32: means, then standard deviations");
            return NULL;
        }
        memcpy(to.mean, floats, sizeof to.mean);
        memcpy(to.std, floats + sizeof to.mean, sizeof to.std);
        to.floats = (float *)numbers[OUT];
        find_quick(&to);
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = resize(image, numbers[BY] ? BILINEAR : BICUBIC, numbers[COLUMNS_FIRST] != 0, &whole, &to);
    Py_END_ALLOW_THREADS
    return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"is_supported", is_supported, METH_NOARGS, "Whether this processor has what the kernel needs: on x86 AVX2 and FMA."},
    {"resize_into", (PyCFunction)(void (*)(void))resize_into, METH_FASTCALL, "See resize.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_avx2", .m_doc = "See resize.py.", .m_size = 0, .m_methods = functions};

PyMODINIT_FUNC PyInit__avx2(void) { return PyModuleDef_Init(&module); }
