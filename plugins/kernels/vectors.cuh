// Some neighbouring elements of one thread: how they are read, widened, rounded, narrowed and written.
//
// A row is held as it was read, in its own type: a float16 row in registers then takes half of what its float32 values
// would, which is what lets an SM hold enough rows. Widening twice costs less than those registers.
#pragma once

#include "platform.cuh"
#include "rmsnorm.h"

#include <cstring>

namespace rmsnorm
{

template <int BYTES>
struct Word;
template <>
struct Word<2>
{
    using Type = unsigned short;
};
template <>
struct Word<4>
{
    using Type = unsigned int;
};
template <>
struct Word<8>
{
    using Type = uint2;
};
template <>
struct Word<16>
{
    using Type = uint4;
};

template <typename T, int N>
struct Pack
{
    static constexpr int kBYTES = N * static_cast<int>(sizeof(T));
    static constexpr int kPIECES = kBYTES > 16 ? kBYTES / 16 : 1;
    using Piece = typename Word<kBYTES / kPIECES>::Type;
    Piece piece[kPIECES];
};

__device__ inline void flip(unsigned short& word, unsigned int bits)
{
    word ^= static_cast<unsigned short>(bits);
}

__device__ inline void flip(unsigned int& word, unsigned int bits)
{
    word ^= bits;
}

__device__ inline void flip(uint4& words, unsigned int bits)
{
    words.x ^= bits;
    words.y ^= bits;
    words.z ^= bits;
    words.w ^= bits;
}

//! Makes the compilers forget what they know of these words, by a zero that they cannot know. They would otherwise
//! widen a row once, for the squares, and keep some of the float32 values for the result; with 64 registers a thread,
//! some of the kernels then spill.
template <typename T, int N, int COUNT>
__device__ inline void forget(Pack<T, N> (&packs)[COUNT], unsigned int zero)
{
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
    {
#pragma unroll
        for (int j = 0; j < Pack<T, N>::kPIECES; ++j)
        {
            flip(packs[i].piece[j], zero);
        }
    }
}

enum class Read
{
    kONCE,      // x: streamed, so that it pushes neither the gain out of the L1 nor other tensors out of the L2
    kAGAIN,     // x where it will be read a second time: no hint
    kPARAMETER, // gain and bias, which every row reads: the read-only path, kept in the L1
};

template <Read READ, typename T, int N>
__device__ inline Pack<T, N> load(T const* from)
{
    using Piece = typename Pack<T, N>::Piece;
    auto const* pieces = reinterpret_cast<Piece const*>(from);
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < Pack<T, N>::kPIECES; ++i)
    {
        if constexpr (READ == Read::kONCE)
        {
            pack.piece[i] = __ldcs(pieces + i);
        }
        else if constexpr (READ == Read::kAGAIN)
        {
            pack.piece[i] = loadPlain(pieces + i);
        }
        else
        {
            pack.piece[i] = __ldg(pieces + i);
        }
    }
    return pack;
}

//! y has no hint and stays in the L2, because the next operator reads it.
template <typename T, int N>
__device__ inline void store(T* to, Pack<T, N> const& pack)
{
    auto* pieces = reinterpret_cast<typename Pack<T, N>::Piece*>(to);
#pragma unroll
    for (int i = 0; i < Pack<T, N>::kPIECES; ++i)
    {
        storePlain(pieces + i, pack.piece[i]);
    }
}

__device__ inline float widenOne(float value)
{
    return value;
}

__device__ inline float widenOne(__half value)
{
    return __half2float(value);
}

__device__ inline float widenOne(__nv_bfloat16 value)
{
    return __bfloat162float(value);
}

template <typename T, int N>
__device__ inline void widen(Pack<T, N> const& pack, float (&values)[N])
{
    T elements[N];
    memcpy(static_cast<void*>(elements), pack.piece, sizeof(elements));
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        values[i] = widenOne(elements[i]);
    }
}

__device__ inline void narrowOne(float value, float& out)
{
    out = value;
}

__device__ inline void narrowOne(float value, __half& out)
{
    out = __float2half_rn(value);
}

__device__ inline void narrowOne(float value, __nv_bfloat16& out)
{
    out = __float2bfloat16_rn(value);
}

__device__ inline void narrowTwo(float a, float b, float* out)
{
    out[0] = a;
    out[1] = b;
}

// Two at a time is one instruction.
__device__ inline void narrowTwo(float a, float b, __half* out)
{
    __half2 const both = __floats2half2_rn(a, b);
    memcpy(static_cast<void*>(out), &both, sizeof(both));
}

__device__ inline void narrowTwo(float a, float b, __nv_bfloat16* out)
{
    __nv_bfloat162 const both = __floats2bfloat162_rn(a, b);
    memcpy(static_cast<void*>(out), &both, sizeof(both));
}

//! Rounds to nearest, ties to even; what is too large becomes infinity.
template <typename T, int N>
__device__ inline Pack<T, N> narrow(float const (&values)[N])
{
    T elements[N];
    if constexpr (N == 1)
    {
        narrowOne(values[0], elements[0]);
    }
    else
    {
#pragma unroll
        for (int i = 0; i < N; i += 2)
        {
            narrowTwo(values[i], values[i + 1], elements + i);
        }
    }
    Pack<T, N> pack;
    memcpy(pack.piece, elements, sizeof(elements));
    return pack;
}

template <typename T, int N>
__device__ inline void roundTo(float (&values)[N])
{
    widen<T, N>(narrow<T, N>(values), values);
}

//! Rounds to a type that all threads agree on; float32 leaves the values as they are.
template <int N>
__device__ inline void roundTo(int type, float (&values)[N])
{
    if (type == RMSNORM_FLOAT16)
    {
        roundTo<__half, N>(values);
    }
    else if (type == RMSNORM_BFLOAT16)
    {
        roundTo<__nv_bfloat16, N>(values);
    }
}

} // namespace rmsnorm
