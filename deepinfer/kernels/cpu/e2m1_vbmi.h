// MXFP4 with the byte permutations of AVX-512 VBMI, which find two codes at once in a table of BF16 values that are
// scaled already. Included by groups.h.
#pragma once
#define HAS_E2M1_PAIR

// A constant for each of so many numbers, made by a macro.
#define FOR4(f, i) f(i), f((i) + 1), f((i) + 2), f((i) + 3)
#define FOR16(f, i) FOR4(f, i), FOR4(f, (i) + 4), FOR4(f, (i) + 8), FOR4(f, (i) + 12)
#define FOR64(f, i) FOR16(f, i), FOR16(f, (i) + 16), FOR16(f, (i) + 32), FOR16(f, (i) + 48)
#define FOR256(f) FOR64(f, 0), FOR64(f, 64), FOR64(f, 128), FOR64(f, 192)

// Code c times 2^(e - 127) as BF16, which holds it exactly: infinity and subnormal values as float32 has them.
#define E2M1_FINITE(e, m) ((m) < 2 && (e) > 1 ? (m) * ((e) - 1) << 7 : (m) < 2 ? (m) * 32 << (e) : \
                           (m) < 4 && (e) == 0 ? (m) * 32 : ((e) << 7) + 64 * ((m) - 2))
#define E2M1_BITS(e, m) ((e) == 255 ? 0x7fc0 : MIN(0x7f80, E2M1_FINITE(e, m)))
#define E2M1_QUARTER(e, m, sign) \
    sign | E2M1_BITS(e, m), sign | E2M1_BITS(e, m + 1), sign | E2M1_BITS(e, m + 2), sign | E2M1_BITS(e, m + 3)
#define E2M1_SCALED(e) \
    {E2M1_QUARTER(e, 0, 0), E2M1_QUARTER(e, 4, 0), E2M1_QUARTER(e, 0, 0x8000), E2M1_QUARTER(e, 4, 0x8000)}
static const uint16_t E2M1_TABLE[256][16] __attribute__((aligned(64), unused)) = {FOR256(E2M1_SCALED)};

// 16 bytes of E2M1 pairs at a and at b -> 32 values each, low nibble first, from a table that is scaled already.
INLINE void e2m1_pair(const uint8_t *a, const uint8_t *b, uint8_t scale_a, uint8_t scale_b, vec out[2][2]) {
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)a)),
                                                  _mm_loadu_si128((const __m128i *)b), 1);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(bytes), _mm256_srli_epi16(bytes, 4), 1);
    // Words 2 i and 2 i + 1: codes i and i + 16. A look-up reads the low bits of an index only.
    const __m512i first = _mm512_setr_epi32(0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39);
    const __m512i index = _mm512_or_si512(first, _mm512_slli_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(8)), 16));
    for (int i = 0; i < 2; i++) {
        const __m512i codes = _mm512_permutexvar_epi8(_mm512_add_epi8(index, _mm512_set1_epi32(i * 0x00100010)), both);
        const __m256i *row = (const __m256i *)E2M1_TABLE[i ? scale_b : scale_a];
        const __m512i words = _mm512_permutexvar_epi16(codes, _mm512_broadcast_i64x4(_mm256_load_si256(row)));
        out[i][0] = (vec)_mm512_slli_epi32(words, 16);
        out[i][1] = (vec)_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000u));
    }
}
