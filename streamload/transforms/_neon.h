/* The AVX2 intrinsics that _avx2.c uses, for aarch64: each vector of 256 bits is two of NEON's.
 *
 * The names and their meaning are Intel's. A line stands for both halves; only `inserti128`, `permutevar8x32` and the
 * like move anything from one half to the other. Every aarch64 processor has these instructions, FMA included.
 */

#pragma once

#include <arm_neon.h>

typedef int8x16_t __m128i;
typedef struct { int8x16_t half[2]; } __m256i;
typedef struct { float32x4_t half[2]; } __m256;
typedef struct { float64x2_t half[2]; } __m256d;

#define NEON static inline __attribute__((always_inline))

/* From and to the types of lanes. */
#define S16 vreinterpretq_s16_s8
#define U16 vreinterpretq_u16_s8
#define S32 vreinterpretq_s32_s8
#define S64 vreinterpretq_s64_s8
#define U8 vreinterpretq_u8_s8
#define OF_S16 vreinterpretq_s8_s16
#define OF_U16 vreinterpretq_s8_u16
#define OF_S32 vreinterpretq_s8_s32
#define OF_S64 vreinterpretq_s8_s64
#define OF_U8 vreinterpretq_s8_u8
#define BITS vreinterpretq_s64_f64
#define OF_BITS vreinterpretq_f64_s64

/* A function whose halves are `of` the halves `x` of a and `y` of b, or of a alone. */
#define TWO(type, name, of) \
    NEON type name(type a, type b) { \
        for (int h = 0; h < 2; h++) { \
            const __typeof__(a.half[0]) x = a.half[h], y = b.half[h]; \
            a.half[h] = of; \
        } \
        return a; \
    }
#define SHIFT(name, of) \
    NEON __m256i name(__m256i a, int n) { \
        for (int h = 0; h < 2; h++) { \
            const int8x16_t x = a.half[h]; \
            a.half[h] = of; \
        } \
        return a; \
    }

/* ---- Integers ---- */

TWO(__m256i, _mm256_and_si256, vandq_s8(x, y))
TWO(__m256i, _mm256_or_si256, vorrq_s8(x, y))
TWO(__m256i, _mm256_xor_si256, veorq_s8(x, y))
TWO(__m256i, _mm256_add_epi8, vaddq_s8(x, y))
TWO(__m256i, _mm256_add_epi16, OF_S16(vaddq_s16(S16(x), S16(y))))
TWO(__m256i, _mm256_add_epi32, OF_S32(vaddq_s32(S32(x), S32(y))))
TWO(__m256i, _mm256_unpacklo_epi8, vzip1q_s8(x, y))
TWO(__m256i, _mm256_unpackhi_epi8, vzip2q_s8(x, y))
TWO(__m256i, _mm256_unpacklo_epi16, OF_S16(vzip1q_s16(S16(x), S16(y))))
TWO(__m256i, _mm256_unpackhi_epi16, OF_S16(vzip2q_s16(S16(x), S16(y))))
TWO(__m256i, _mm256_unpacklo_epi32, OF_S32(vzip1q_s32(S32(x), S32(y))))
TWO(__m256i, _mm256_unpackhi_epi32, OF_S32(vzip2q_s32(S32(x), S32(y))))
TWO(__m256i, _mm256_unpacklo_epi64, OF_S64(vzip1q_s64(S64(x), S64(y))))
TWO(__m256i, _mm256_unpackhi_epi64, OF_S64(vzip2q_s64(S64(x), S64(y))))
TWO(__m256i, _mm256_packs_epi32, OF_S16(vcombine_s16(vqmovn_s32(S32(x)), vqmovn_s32(S32(y)))))
TWO(__m256i, _mm256_packus_epi16, OF_U8(vcombine_u8(vqmovun_s16(S16(x)), vqmovun_s16(S16(y)))))
SHIFT(_mm256_slli_epi32, OF_S32(vshlq_s32(S32(x), vdupq_n_s32(n))))
SHIFT(_mm256_srai_epi32, OF_S32(vshlq_s32(S32(x), vdupq_n_s32(-n))))
SHIFT(_mm256_srli_epi16, OF_U16(vshlq_u16(U16(x), vdupq_n_s16((int16_t)-n))))

/* An index with its highest bit set gives 0; TBL does so for any above 15, and the bits between are no part of it. */
TWO(__m256i, _mm256_shuffle_epi8, vqtbl1q_s8(x, vandq_u8(U8(y), vdupq_n_u8(0x8f))))

/* Products of 16 bits, the neighbours' sums. */
TWO(__m256i, _mm256_madd_epi16,
    OF_S32(vpaddq_s32(vmull_s16(vget_low_s16(S16(x)), vget_low_s16(S16(y))), vmull_high_s16(S16(x), S16(y)))))

/* Products of an unsigned and a signed byte, the neighbours' sums, saturated. */
TWO(__m256i, _mm256_maddubs_epi16,
    OF_S16(vqaddq_s16(
        vmulq_s16(S16(vandq_s8(x, OF_S16(vdupq_n_s16(0xff)))), vshrq_n_s16(vshlq_n_s16(S16(y), 8), 8)),
        vmulq_s16(vreinterpretq_s16_u16(vshrq_n_u16(U16(x), 8)), vshrq_n_s16(S16(y), 8)))))

NEON __m128i _mm_loadu_si128(const __m128i *at) { return vld1q_s8((const int8_t *)at); }
NEON void _mm_storeu_si128(__m128i *at, __m128i a) { vst1q_s8((int8_t *)at, a); }
NEON __m128i _mm_set1_epi32(int32_t a) { return OF_S32(vdupq_n_s32(a)); }
NEON __m128i _mm_add_epi32(__m128i a, __m128i b) { return OF_S32(vaddq_s32(S32(a), S32(b))); }
NEON __m128i _mm_setr_epi32(int32_t a, int32_t b, int32_t c, int32_t d) {
    return OF_S32((int32x4_t){a, b, c, d});
}
#define _mm_setr_epi8(...) ((int8x16_t){__VA_ARGS__})

NEON __m256i _mm256_broadcastsi128_si256(__m128i a) { return (__m256i){{a, a}}; }
NEON __m256i _mm256_castsi128_si256(__m128i a) { return (__m256i){{a, a}}; } /* the upper half is undefined */
NEON __m128i _mm256_castsi256_si128(__m256i a) { return a.half[0]; }
NEON __m128i _mm256_extracti128_si256(__m256i a, int h) { return a.half[h]; }
NEON __m256i _mm256_inserti128_si256(__m256i a, __m128i b, int h) {
    a.half[h] = b;
    return a;
}
NEON __m256i _mm256_loadu_si256(const __m256i *at) {
    return (__m256i){{vld1q_s8((const int8_t *)at), vld1q_s8((const int8_t *)at + 16)}};
}
NEON void _mm256_storeu_si256(__m256i *at, __m256i a) {
    vst1q_s8((int8_t *)at, a.half[0]);
    vst1q_s8((int8_t *)at + 16, a.half[1]);
}
#define _mm256_load_si256 _mm256_loadu_si256
NEON __m256i _mm256_setzero_si256(void) { return _mm256_broadcastsi128_si256(vdupq_n_s8(0)); }
NEON __m256i _mm256_set1_epi16(int16_t a) { return _mm256_broadcastsi128_si256(OF_S16(vdupq_n_s16(a))); }
NEON __m256i _mm256_set1_epi32(int32_t a) { return _mm256_broadcastsi128_si256(_mm_set1_epi32(a)); }
NEON __m256i _mm256_setr_epi32(int32_t a, int32_t b, int32_t c, int32_t d, int32_t e, int32_t f, int32_t g, int32_t h) {
    return (__m256i){{_mm_setr_epi32(a, b, c, d), _mm_setr_epi32(e, f, g, h)}};
}
NEON int _mm256_testz_si256(__m256i a, __m256i b) {
    a = _mm256_and_si256(a, b);
    return vmaxvq_u8(U8(vorrq_s8(a.half[0], a.half[1]))) == 0;
}
/* The numbers of words -> the numbers of their bytes, in a table of both halves. */
NEON __m256i _mm256_permutevar8x32_epi32(__m256i a, __m256i words) {
    const int8x16x2_t table = {{a.half[0], a.half[1]}};
    for (int h = 0; h < 2; h++) {
        const int32x4_t first = vmulq_n_s32(S32(words.half[h]), 0x04040404);
        words.half[h] = vqtbl2q_s8(table, U8(OF_S32(vaddq_s32(first, vdupq_n_s32(0x03020100)))));
    }
    return words;
}

/* ---- float32 ---- */

TWO(__m256, _mm256_add_ps, vaddq_f32(x, y))
TWO(__m256, _mm256_sub_ps, vsubq_f32(x, y))
TWO(__m256, _mm256_mul_ps, vmulq_f32(x, y))
TWO(__m256, _mm256_div_ps, vdivq_f32(x, y))

NEON __m256 _mm256_set1_ps(float a) { return (__m256){{vdupq_n_f32(a), vdupq_n_f32(a)}}; }
NEON __m256 _mm256_setr_ps(float a, float b, float c, float d, float e, float f, float g, float h) {
    return (__m256){{(float32x4_t){a, b, c, d}, (float32x4_t){e, f, g, h}}};
}
NEON void _mm256_storeu_ps(float *at, __m256 a) {
    vst1q_f32(at, a.half[0]);
    vst1q_f32(at + 4, a.half[1]);
}
NEON __m256 _mm256_fmadd_ps(__m256 a, __m256 b, __m256 c) { /* c + a b, rounded once */
    return (__m256){{vfmaq_f32(c.half[0], a.half[0], b.half[0]), vfmaq_f32(c.half[1], a.half[1], b.half[1])}};
}
NEON __m256 _mm256_fnmadd_ps(__m256 a, __m256 b, __m256 c) { /* c - a b, rounded once */
    return (__m256){{vfmsq_f32(c.half[0], a.half[0], b.half[0]), vfmsq_f32(c.half[1], a.half[1], b.half[1])}};
}
NEON __m256 _mm256_cvtepi32_ps(__m256i a) {
    return (__m256){{vcvtq_f32_s32(S32(a.half[0])), vcvtq_f32_s32(S32(a.half[1]))}};
}
NEON __m256i _mm256_castps_si256(__m256 a) {
    return (__m256i){{vreinterpretq_s8_f32(a.half[0]), vreinterpretq_s8_f32(a.half[1])}};
}

/* ---- float64 ---- */

TWO(__m256d, _mm256_add_pd, vaddq_f64(x, y))
TWO(__m256d, _mm256_sub_pd, vsubq_f64(x, y))
TWO(__m256d, _mm256_mul_pd, vmulq_f64(x, y))
TWO(__m256d, _mm256_div_pd, vdivq_f64(x, y))
TWO(__m256d, _mm256_and_pd, OF_BITS(vandq_s64(BITS(x), BITS(y))))
TWO(__m256d, _mm256_or_pd, OF_BITS(vorrq_s64(BITS(x), BITS(y))))
TWO(__m256d, _mm256_andnot_pd, OF_BITS(vbicq_s64(BITS(y), BITS(x))))
TWO(__m256d, less, vreinterpretq_f64_u64(vcltq_f64(x, y)))
#define _mm256_cmp_pd(a, b, _CMP_LT_OQ) less(a, b) /* no other comparison is used */

NEON __m256d _mm256_set1_pd(double a) { return (__m256d){{vdupq_n_f64(a), vdupq_n_f64(a)}}; }
NEON __m256d _mm256_loadu_pd(const double *at) { return (__m256d){{vld1q_f64(at), vld1q_f64(at + 2)}}; }
NEON void _mm256_storeu_pd(double *at, __m256d a) {
    vst1q_f64(at, a.half[0]);
    vst1q_f64(at + 2, a.half[1]);
}
NEON __m256d _mm256_blendv_pd(__m256d a, __m256d b, __m256d is_b) { /* by the highest bits */
    for (int h = 0; h < 2; h++)
        a.half[h] = vbslq_f64(vreinterpretq_u64_s64(vshrq_n_s64(BITS(is_b.half[h]), 63)), b.half[h], a.half[h]);
    return a;
}
NEON __m256d _mm256_cvtepi32_pd(__m128i a) {
    return (__m256d){{vcvtq_f64_s64(vmovl_s32(vget_low_s32(S32(a)))), vcvtq_f64_s64(vmovl_high_s32(S32(a)))}};
}
NEON __m128i _mm256_cvttpd_epi32(__m256d a) { /* toward zero */
    return OF_S32(vcombine_s32(vmovn_s64(vcvtq_s64_f64(a.half[0])), vmovn_s64(vcvtq_s64_f64(a.half[1]))));
}
