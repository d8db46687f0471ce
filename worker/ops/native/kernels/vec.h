// Vectors of floats as wide as the instruction set that this file is compiled for.
//
// Every kernel is written once over these types and compiled once per level (level_*.cpp), in a
// namespace of its own, so nothing here may be seen by two levels under one name. GCC's and
// Clang's vector extensions do the arithmetic; where an instruction has no spelling in them,
// the level's macros choose an intrinsic.

#ifndef STOKER_LEVEL
#error "include this from a level_*.cpp only"
#endif

namespace STOKER_LEVEL {

constexpr int64_t kVectorBytes = STOKER_VECTOR_BYTES;
constexpr int64_t kLanes = kVectorBytes / 4;

typedef float Floats __attribute__((vector_size(STOKER_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(STOKER_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(STOKER_VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(STOKER_VECTOR_BYTES / 2)));
typedef int8_t Bytes __attribute__((vector_size(STOKER_VECTOR_BYTES / 4)));

STOKER_INLINE Floats zeros() { return Floats{}; }

STOKER_INLINE Floats splat(float value) { return value - Floats{}; }

STOKER_INLINE Floats load(const float* from) {
    Floats vector;
    __builtin_memcpy(&vector, from, sizeof vector);
    return vector;
}

STOKER_INLINE void store(float* to, Floats vector) { __builtin_memcpy(to, &vector, sizeof vector); }

// The first `count` lanes (fewer than kLanes); the others are 0.
STOKER_INLINE Floats load_some(const float* from, int64_t count) {
    float lanes[kLanes] = {};
    __builtin_memcpy(lanes, from, size_t(count) * sizeof(float));
    return load(lanes);
}

STOKER_INLINE void store_some(float* to, Floats vector, int64_t count) {
    float lanes[kLanes];
    store(lanes, vector);
    __builtin_memcpy(to, lanes, size_t(count) * sizeof(float));
}

// a * b + c, rounded once where the level has such an instruction.
STOKER_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(STOKER_HAS_AVX512)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(STOKER_HAS_AVX2)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(STOKER_HAS_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

STOKER_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }

// In a fixed order: halves are added to each other until one lane is left.
STOKER_INLINE float sum_lanes(Floats vector) {
    float lanes[kLanes];
    store(lanes, vector);
    for (int64_t half = kLanes / 2; half >= 1; half /= 2)
        for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

STOKER_INLINE float max_lane(Floats vector) {
    float lanes[kLanes];
    store(lanes, vector);
    float most = lanes[0];
    for (int64_t lane = 1; lane < kLanes; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

// A bit for each lane of a mask, in which a lane has all bits or none.
STOKER_INLINE uint32_t bits_of(Ints mask) {
#if defined(STOKER_HAS_AVX512)
    return uint32_t(_mm512_movepi32_mask((__m512i)mask));
#elif defined(STOKER_HAS_AVX2)
    return uint32_t(_mm256_movemask_ps((__m256)mask));
#else
    uint32_t lanes[kLanes], bits = 0;
    __builtin_memcpy(lanes, &mask, sizeof mask);
    for (int64_t lane = 0; lane < kLanes; ++lane) bits |= (lanes[lane] & 1) << lane;
    return bits;
#endif
}

STOKER_INLINE bool any(Ints mask) { return bits_of(mask) != 0; }

// bfloat16 is the upper half of a float32.
STOKER_INLINE Floats load_bfloat16(const uint16_t* from) {
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// Rounded to the nearest, ties to even; NaN stays NaN.
STOKER_INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

STOKER_INLINE float from_bfloat16(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

STOKER_INLINE float from_float16(uint16_t half) {
    // The exponent is moved to float32's by a multiplication, which also normalizes subnormals.
    uint32_t bits = uint32_t(half & 0x7fff) << 13;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
    __builtin_memcpy(&bits, &value, sizeof bits);
    if ((half & 0x7c00) == 0x7c00) bits |= 0x7f800000u;  // infinity, NaN
    bits |= uint32_t(half & 0x8000) << 16;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounded to the nearest, ties to even; too large becomes infinity.
STOKER_INLINE uint16_t to_float16(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7e00;
    if (bits >= 0x477ff000u) return sign | 0x7c00;
    if (bits < 0x38800000u) {  // subnormal in float16: let an addition do the rounding
        float magnitude;
        __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        __builtin_memcpy(&bits, &magnitude, sizeof bits);
        return sign | uint16_t(bits - 0x3f000000u);
    }
    bits += 0xc8000fffu + (bits >> 13 & 1);
    return sign | uint16_t(bits >> 13);
}

STOKER_INLINE Floats load_float16(const uint16_t* from) {
#if defined(STOKER_HAS_F16C) && STOKER_VECTOR_BYTES == 32
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(STOKER_HAS_F16C) && STOKER_VECTOR_BYTES == 64
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
#elif defined(STOKER_HAS_NEON)
    float16x4_t halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    return (Floats)vcvt_f32_f16(halves);
#else  // as from_float16
    Halves halves;
    __builtin_memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words);
    const Words magnitude = (Words)((Floats)((words & 0x7fff) << 13) * splat(0x1p112f));
    const Words is_endless = (Words)((words & 0x7c00) == 0x7c00);
    return (Floats)(magnitude | (is_endless & 0x7f800000) | (words & 0x8000) << 16);
#endif
}

STOKER_INLINE Floats load_int8(const int8_t* from) {
    Bytes bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
}

// e^x to within 2 units in the last place; 0 below -87.3, infinity never (x is at most 88).
//
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by a polynomial of degree 6 (Taylor's, whose error is
// below half a unit there), and 2^n put into the exponent.
STOKER_INLINE Floats exp(Floats x) {
    const Floats low = splat(-87.33654f), high = splat(88.0f);
    const auto is_zero = x < low;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats scaled = x * splat(1.44269504f) + magic;
    const Floats n = scaled - magic;
    Floats r = x - n * splat(0.693145752f);
    r = r - n * splat(1.42860677e-6f);
    Floats sum = splat(1.0f / 720);
    sum = sum * r + splat(1.0f / 120);
    sum = sum * r + splat(1.0f / 24);
    sum = sum * r + splat(1.0f / 6);
    sum = sum * r + splat(0.5f);
    sum = sum * r + splat(1.0f);
    sum = sum * r + splat(1.0f);
    const Ints power = __builtin_convertvector(n, Ints) + 127;
    const Floats result = sum * (Floats)(power << 23);
    return is_zero ? zeros() : result;
}

}  // namespace STOKER_LEVEL
