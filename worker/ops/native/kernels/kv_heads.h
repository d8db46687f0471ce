// How K/V hold one head of one token: its values, and in int8 the float32 they are to be
// multiplied with, behind them.

namespace STOKER_LEVEL {

// As many values of a head as are read at once: what one transposition takes.
#if defined(STOKER_HAS_AVX2)
constexpr int64_t kStrip = 8;
#else
constexpr int64_t kStrip = 4;
#endif

typedef float Strip __attribute__((vector_size(kStrip * 4)));
typedef int32_t StripInts __attribute__((vector_size(kStrip * 4)));
typedef uint32_t StripWords __attribute__((vector_size(kStrip * 4)));
typedef uint16_t StripHalves __attribute__((vector_size(kStrip * 2)));
typedef int8_t StripBytes __attribute__((vector_size(kStrip)));

template <int32_t kFormat>
STOKER_INLINE Strip widened(const char* from) {
    if constexpr (kFormat == stoker::kFloat32) {
        Strip values;
        __builtin_memcpy(&values, from, sizeof values);
        return values;
#if defined(STOKER_HAS_AVX2)  // compilers make more of the conversions below than one instruction
    } else if constexpr (kFormat == stoker::kInt8) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        return (Strip)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    } else if constexpr (kFormat == stoker::kBFloat16) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return (Strip)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
    } else if constexpr (kFormat == stoker::kInt8) {
        StripBytes bytes;
        __builtin_memcpy(&bytes, from, sizeof bytes);
        return __builtin_convertvector(__builtin_convertvector(bytes, StripInts), Strip);
    } else if constexpr (kFormat == stoker::kBFloat16) {
        StripHalves halves;
        __builtin_memcpy(&halves, from, sizeof halves);
        return (Strip)(__builtin_convertvector(halves, StripWords) << 16);
#endif
    } else {
#if defined(STOKER_HAS_F16C)
        return (Strip)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
        uint16_t halves[kStrip];
        __builtin_memcpy(halves, from, sizeof halves);
        Strip values;
        for (int64_t lane = 0; lane < kStrip; ++lane) values[lane] = from_float16(halves[lane]);
        return values;
#endif
    }
}

constexpr int64_t bytes_of(int32_t format) {
    return format == stoker::kFloat32 ? 4 : format == stoker::kInt8 ? 1 : 2;
}

// What int8 values of a head are multiplied with.
template <int32_t kFormat>
STOKER_INLINE float head_scale(const char* head, int64_t width) {
    float scale = 1.0f;
    if constexpr (kFormat == stoker::kInt8) __builtin_memcpy(&scale, head + width, sizeof scale);
    return scale;
}

// Values [at, at + kStrip) of a head of `width`; with `kIsTail`, zeros past its end.
template <int32_t kFormat, bool kIsTail>
STOKER_INLINE Strip read_strip(const char* head, int64_t at, int64_t width, float scale) {
    constexpr int64_t bytes = bytes_of(kFormat);
    Strip values;
    if constexpr (kIsTail) {
        char part[kStrip * bytes] = {};
        for (int64_t i = at; i < width; ++i) {
            __builtin_memcpy(part + (i - at) * bytes, head + i * bytes, bytes);
        }
        values = widened<kFormat>(part);
    } else {
        values = widened<kFormat>(head + at * bytes);
    }
    if constexpr (kFormat == stoker::kInt8) values = values * scale;
    return values;
}

// Rounded to the nearest, ties to even; NaN stays NaN.
STOKER_INLINE Halves to_bfloat16(Floats values) {
    const Words bits = (Words)values;
    const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    const Words kept = bits >> 16 | 0x40;
    return __builtin_convertvector(values == values ? rounded : kept, Halves);
}

STOKER_INLINE Halves to_float16(Floats values) {
#if defined(STOKER_HAS_F16C) && STOKER_VECTOR_BYTES == 32
    return (Halves)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT);
#elif defined(STOKER_HAS_F16C) && STOKER_VECTOR_BYTES == 64
    return (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)values, _MM_FROUND_TO_NEAREST_INT);
#else
    Halves halves;
    for (int64_t lane = 0; lane < kLanes; ++lane) halves[lane] = to_float16(values[lane]);
    return halves;
#endif
}

// Call `work(index, values, count)` for vectors of a head; the last may have fewer than kLanes.
template <typename Work>
STOKER_INLINE void for_vectors(const float* head, int64_t width, Work work) {
    int64_t at = 0;
    for (; at + kLanes <= width; at += kLanes) work(at, load(head + at), kLanes);
    if (at < width) work(at, load_some(head + at, width - at), width - at);
}

template <typename Narrow>
STOKER_INLINE void store_narrow(char* to, Narrow values, int64_t count) {
    if (count == kLanes) {
        __builtin_memcpy(to, &values, sizeof values);
    } else {
        __builtin_memcpy(to, &values, size_t(count) * (sizeof values / size_t(kLanes)));
    }
}

// The largest magnitude becomes 127; the others are rounded to the nearest, ties to even.
STOKER_INLINE void write_head_int8(const float* head, char* to, int64_t width) {
    Floats highest = zeros();
    for_vectors(head, width, [&](int64_t, Floats values, int64_t) {
        highest = max(highest, max(values, -values));
    });
    const float most = max_lane(highest);
    const float scale = most / 127.0f, inverse = most > 0.0f ? 127.0f / most : 0.0f;
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    for_vectors(head, width, [&](int64_t at, Floats values, int64_t count) {
        const Floats rounded = values * inverse + magic;
        const Ints whole = (Ints)rounded - (Ints)magic;
        store_narrow(to + at, __builtin_convertvector(whole, Bytes), count);
    });
    __builtin_memcpy(to + width, &scale, sizeof scale);
}

// A head's values as K/V hold them.
STOKER_INLINE void write_head(const float* head, char* to, int64_t width, int32_t format) {
    if (format == stoker::kFloat32) {
        __builtin_memcpy(to, head, size_t(width) * sizeof(float));
    } else if (format == stoker::kInt8) {
        write_head_int8(head, to, width);
    } else if (format == stoker::kBFloat16) {
        for_vectors(head, width, [&](int64_t at, Floats values, int64_t count) {
            store_narrow(to + at * 2, to_bfloat16(values), count);
        });
    } else {
        for_vectors(head, width, [&](int64_t at, Floats values, int64_t count) {
            store_narrow(to + at * 2, to_float16(values), count);
        });
    }
}

}  // namespace STOKER_LEVEL
