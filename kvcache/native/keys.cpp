// Keys of KV blocks: BLAKE2b (RFC 7693) without a key, cut at its 16-byte parameter, over the
// key of the block before and the block's tokens. The same bytes as Python's
// hashlib.blake2b(parent + block, digest_size=16), on every machine.
//
// Plain C interface, loaded with ctypes; nothing is kept between calls. For little-endian
// machines, where a token lies in memory as it is hashed.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

constexpr size_t kKeyBytes = 16;
constexpr size_t kChunkBytes = 128;

// RFC 7693, section 2.6.
constexpr uint64_t kStart[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

// RFC 7693, section 2.7; the last two rounds repeat the first two.
constexpr uint8_t kOrder[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

inline uint64_t little_endian(const uint8_t* bytes) {
  uint64_t word = 0;
  for (int i = 0; i < 8; ++i) word |= uint64_t{bytes[i]} << (8 * i);
  return word;
}

inline uint64_t rotate_right(uint64_t word, int bits) {
  return word >> bits | word << (64 - bits);
}

inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x;
  d = rotate_right(d ^ a, 32);
  c += d;
  b = rotate_right(b ^ c, 24);
  a += b + y;
  d = rotate_right(d ^ a, 16);
  c += d;
  b = rotate_right(b ^ c, 63);
}

// One template per round, so that the order of the words is known when it is compiled.
template <size_t Round>
inline void round(uint64_t v[16], const uint64_t m[16]) {
  constexpr const uint8_t* at = kOrder[Round];
  mix(v[0], v[4], v[8], v[12], m[at[0]], m[at[1]]);
  mix(v[1], v[5], v[9], v[13], m[at[2]], m[at[3]]);
  mix(v[2], v[6], v[10], v[14], m[at[4]], m[at[5]]);
  mix(v[3], v[7], v[11], v[15], m[at[6]], m[at[7]]);
  mix(v[0], v[5], v[10], v[15], m[at[8]], m[at[9]]);
  mix(v[1], v[6], v[11], v[12], m[at[10]], m[at[11]]);
  mix(v[2], v[7], v[8], v[13], m[at[12]], m[at[13]]);
  mix(v[3], v[4], v[9], v[14], m[at[14]], m[at[15]]);
}

template <size_t... Rounds>
inline void rounds(uint64_t v[16], const uint64_t m[16], std::index_sequence<Rounds...>) {
  (round<Rounds>(v, m), ...);
}

// RFC 7693, section 3.2. `done`: bytes of the message up to the end of this chunk.
void compress(uint64_t state[8], const uint8_t* chunk, uint64_t done, bool is_last) {
  uint64_t m[16], v[16];
  for (int i = 0; i < 16; ++i) m[i] = little_endian(chunk + 8 * i);
  for (int i = 0; i < 8; ++i) v[i] = state[i], v[i + 8] = kStart[i];
  v[12] ^= done;
  if (is_last) v[14] = ~v[14];
  rounds(v, m, std::make_index_sequence<12>());
  for (int i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
}

void block_key(const uint8_t* parent, const uint8_t* block, size_t block_bytes, uint8_t* key) {
  uint64_t state[8];
  std::copy(kStart, kStart + 8, state);
  state[0] ^= 0x01010000 ^ kKeyBytes;  // parameter block: no key, depth and fan-out 1
  const size_t total = kKeyBytes + block_bytes;
  uint8_t chunk[kChunkBytes] = {};
  std::memcpy(chunk, parent, kKeyBytes);
  size_t done = std::min(total, kChunkBytes);
  std::memcpy(chunk + kKeyBytes, block, done - kKeyBytes);
  while (done < total) {
    compress(state, chunk, done, false);
    const size_t count = std::min(total - done, kChunkBytes);
    std::memcpy(chunk, block + (done - kKeyBytes), count);
    std::memset(chunk + count, 0, kChunkBytes - count);
    done += count;
  }
  compress(state, chunk, total, true);
  for (size_t i = 0; i < kKeyBytes; ++i) key[i] = uint8_t(state[i / 8] >> (8 * (i % 8)));
}

}  // namespace

extern "C" {

int stoker_keys_version() { return 2; }

// Blocks that follow one another: each is the parent of the next.
void stoker_chain_keys(const uint8_t* parent, const uint8_t* blocks, int64_t num_blocks,
                       int64_t block_bytes, uint8_t* keys) {
  for (int64_t i = 0; i < num_blocks; ++i) {
    block_key(parent, blocks + i * block_bytes, size_t(block_bytes), keys);
    parent = keys;
    keys += kKeyBytes;
  }
}

// Blocks of different sequences, each with a parent of its own: `block_size` tokens of the log
// `tokens` each, from `begins` on.
void stoker_next_keys(const uint8_t* parents, const int32_t* tokens, const int64_t* begins,
                      int64_t num_blocks, int64_t block_size, uint8_t* keys) {
  for (int64_t i = 0; i < num_blocks; ++i) {
    const auto* block = reinterpret_cast<const uint8_t*>(tokens + begins[i]);
    block_key(parents + i * kKeyBytes, block, size_t(block_size) * 4, keys + i * kKeyBytes);
  }
}
}
