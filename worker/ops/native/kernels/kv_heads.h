// How K/V hold one head of one token.

namespace STOKER_LEVEL {

// A head's values as K/V hold them; int8: the largest magnitude becomes 127.
STOKER_INLINE void write_head(const float* head, char* to, int64_t width, int32_t format) {
    if (format == stoker::kFloat32) {
        __builtin_memcpy(to, head, size_t(width) * sizeof(float));
    } else if (format == stoker::kInt8) {
        float most = 0.0f;
        for (int64_t i = 0; i < width; ++i) {
            const float magnitude = __builtin_fabsf(head[i]);
            most = magnitude > most ? magnitude : most;
        }
        const float scale = most / 127.0f, inverse = most > 0.0f ? 127.0f / most : 0.0f;
        for (int64_t i = 0; i < width; ++i) to[i] = char(__builtin_rintf(head[i] * inverse));
        __builtin_memcpy(to + width, &scale, sizeof scale);
    } else {
        auto* halves = reinterpret_cast<uint16_t*>(to);
        for (int64_t i = 0; i < width; ++i) {
            halves[i] = format == stoker::kBFloat16 ? to_bfloat16(head[i]) : to_float16(head[i]);
        }
    }
}

}  // namespace STOKER_LEVEL
