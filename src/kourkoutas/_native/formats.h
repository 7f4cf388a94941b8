/* Formats of floating-point numbers: 16-bit ones are widened to float, and rounded to nearest or with noise. */

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

static const int KIND_BYTES[] = {4, 8, 2, 2};

INLINE float bits_float(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t float_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }

INLINE float from_bf16(uint16_t h) { return bits_float((uint32_t)h << 16); }
INLINE uint16_t to_bf16(float f) {
    uint32_t u = float_bits(f);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16; /* to nearest, ties to even */
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
}

INLINE float from_f16(uint16_t h) {
    uint32_t u = (uint32_t)(h & 0x7fff) << 13;
    float scaled = bits_float(u) * 0x1p112f; /* moves the exponent's bias from 15 to 127, subnormals included */
    uint32_t out = u >= 0x0f800000 ? u | 0x7f800000 : float_bits(scaled);
    return bits_float(out | (uint32_t)(h & 0x8000) << 16);
}
INLINE uint16_t to_f16(float f) {
    uint32_t u = float_bits(f), sign = (u >> 16) & 0x8000;
    u &= 0x7fffffff;
    uint32_t normal = (u - 0x38000000 + 0xfff + ((u >> 13) & 1)) >> 13;
    uint32_t subnormal = float_bits(bits_float(u) + 0.5f) - 0x3f000000; /* 0.5 has an ulp of 2^-24, F16's smallest */
    uint32_t out = u < 0x38800000 ? subnormal : normal;
    out = u >= 0x477ff000 ? 0x7c00 : out;
    out = u > 0x7f800000 ? 0x7e00 : out;
    return (uint16_t)(out | sign);
}

CLONES static void widen(float *restrict out, const void *in, Kind kind, long n) {
    const uint16_t *restrict h = in;
    if (kind == BF16)
        for (long i = 0; i < n; i++) out[i] = from_bf16(h[i]);
    else
        for (long i = 0; i < n; i++) out[i] = from_f16(h[i]);
}

CLONES static void narrow(void *out, const float *restrict in, Kind kind, long n) {
    uint16_t *restrict h = out;
    if (kind == BF16)
        for (long i = 0; i < n; i++) h[i] = to_bf16(in[i]);
    else
        for (long i = 0; i < n; i++) h[i] = to_f16(in[i]);
}

/* The noise of stochastic rounding: 16 bits for each element of θ, m, v and v_max. A float is rounded up with the
   probability of the 16 bits that are cut off: they are added to the noise, and the carry is what counts.

     seed    = mixed(mixed(t) + number)       t: the parameter's steps, this one included; number: its own, in its group
     hash(i) = mixed(i·0x1e3779b1 + seed)     i: the element's number in the memory of the whole parameter
     m       : hash(i) & 0xffff
     v, v_max: hash(i) >> 16
     θ       : mixed(hash(i) ^ 0x9e3779b9) & 0xffff

   in numbers of 32 bits that wrap. Every route gives these bits: see kourkoutas/torch/rounding.py. */

INLINE uint32_t mixed(uint32_t h) {
    h ^= h >> 16;
    h *= 0x45d9f3b5u;
    h ^= h >> 13;
    h *= 0x3c6ef373u;
    return h ^ h >> 16;
}

INLINE uint32_t noise_seed(double t, int number) { return mixed(mixed((uint32_t)(int64_t)t) + (uint32_t)number); }

/* hash(i) of `n` elements, from number `first` on. */
CLONES static void make_hashes(uint32_t *restrict hash, uint32_t seed, uint32_t first, long n) {
    for (long i = 0; i < n; i++) hash[i] = mixed((first + (uint32_t)i) * 0x1e3779b1u + seed);
}

typedef enum { OF_THETA, OF_M, OF_V } NoiseOf; /* OF_V: of v_max, too */

INLINE uint32_t noise_of(NoiseOf which, uint32_t hash) {
    if (which == OF_M) return hash & 0xffff;
    if (which == OF_V) return hash >> 16;
    return mixed(hash ^ 0x9e3779b9u) & 0xffff;
}

INLINE uint16_t to_bf16_noisy(float f, uint32_t noise) {
    uint32_t u = float_bits(f);
    return (u & 0x7f800000) == 0x7f800000 ? to_bf16(f) : (uint16_t)((u + noise) >> 16);
}

CLONES static void narrow_noisy(void *out, const float *restrict in, NoiseOf which, const uint32_t *restrict hash, long n) {
    uint16_t *restrict h = out;
    if (which == OF_THETA)
        for (long i = 0; i < n; i++) h[i] = to_bf16_noisy(in[i], noise_of(OF_THETA, hash[i]));
    else if (which == OF_M)
        for (long i = 0; i < n; i++) h[i] = to_bf16_noisy(in[i], noise_of(OF_M, hash[i]));
    else
        for (long i = 0; i < n; i++) h[i] = to_bf16_noisy(in[i], noise_of(OF_V, hash[i]));
}
