// From x and 1 / rms to y: the rounding points, the gain, the bias, the result.
#pragma once

#include "statistic.cuh"

namespace rmsnorm
{

//! A part of a row that one block works on: elements from `start` on, `count` of them, so that an index within fits an
//! int. A thread's accesses are the packs `first`, `first` + `stride`, ... of it.
struct Span
{
    int64_t start;
    int count;
    int first;
    int stride;

    template <int N>
    __device__ int element(int access) const
    {
        return (first + access * stride) * N;
    }
};

//! The rows that a thread holds: `first`, `first` + `step`, ...
struct Rows
{
    int64_t first;
    int64_t step;

    __device__ int64_t at(int r) const
    {
        return first + r * step;
    }
};

//! Moves every item BY places to the front, the first ones to the end: registers have no index, so where a loop over
//! them is to stay a loop, they move past it.
template <int BY, typename Item, int COUNT>
__device__ inline void rotate(Item (&items)[COUNT])
{
    Item moved[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
    {
        moved[i] = items[(i + BY) % COUNT];
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
    {
        items[i] = moved[i];
    }
}

template <typename T, int N>
__device__ inline void loadWide(void const* from, int64_t element, float (&values)[N])
{
    widen<T, N>(load<Read::kPARAMETER, T, N>(static_cast<T const*>(from) + element), values);
}

//! N values of a gain or bias of any type: neighbours, or for columns (ACROSS) N times the same one.
template <int N, bool ACROSS>
__device__ inline void loadParameter(void const* from, int type, int64_t element, float (&values)[N])
{
    constexpr int kREAD = ACROSS ? 1 : N;
    float read[kREAD];
    if (type == RMSNORM_FLOAT32)
    {
        loadWide<float, kREAD>(from, element, read);
    }
    else if (type == RMSNORM_FLOAT16)
    {
        loadWide<__half, kREAD>(from, element, read);
    }
    else
    {
        loadWide<__nv_bfloat16, kREAD>(from, element, read);
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        values[i] = read[i % kREAD];
    }
}

template <int N>
__device__ inline void storeAs(void* to, int type, int64_t element, float const (&values)[N])
{
    if (type == RMSNORM_FLOAT32)
    {
        store<float, N>(static_cast<float*>(to) + element, narrow<float, N>(values));
    }
    else if (type == RMSNORM_FLOAT16)
    {
        store<__half, N>(static_cast<__half*>(to) + element, narrow<__half, N>(values));
    }
    else
    {
        store<__nv_bfloat16, N>(static_cast<__nv_bfloat16*>(to) + element, narrow<__nv_bfloat16, N>(values));
    }
}

//! The gain and the bias of a few values, with their rounding points.
template <int N, bool ACROSS>
__device__ inline void applyParameters(Args const& a, float (&values)[N], int64_t parameter)
{
    float read[N];
    if (a.gain != nullptr)
    {
        loadParameter<N, ACROSS>(a.gain, a.gainStorage, parameter, read);
        roundTo<N>(a.gainType, read); // GUARD(drop): a rounding point
        if (a.hasOffset)
        {
#pragma unroll
            for (int i = 0; i < N; ++i)
            {
                read[i] += a.gainOffset;
            }
            roundTo<N>(a.gainType, read); // GUARD(drop): a rounding point
        }
#pragma unroll
        for (int i = 0; i < N; ++i)
        {
            values[i] *= read[i];
        }
        roundTo<N>(a.productType, values); // GUARD(drop): a rounding point
    }
    if (a.bias != nullptr)
    {
        loadParameter<N, ACROSS>(a.bias, a.biasStorage, parameter, read);
        roundTo<N>(a.productType, read); // GUARD(drop): a rounding point
#pragma unroll
        for (int i = 0; i < N; ++i)
        {
            values[i] += read[i];
        }
        roundTo<N>(a.productType, values); // GUARD(drop): a rounding point
    }
}

//! Every rounding point, chosen at run time by branches that all threads take alike.
//!
//! A sum of numbers of a half type, and a product of two of them, rounds to that type by way of float32 as it would at
//! once. A gain offset that is no number of gainType is the exception: it may round twice.
template <int N, bool ACROSS>
__device__ inline void finishAny(Args const& a, float (&values)[N], int64_t parameter, int64_t out)
{
    roundTo<N>(a.normalizedType, values); // GUARD(drop): a rounding point
    // Four at a time: eight of the gain beside eight values and 32 registers of x would not fit.
    constexpr int kPART = N > 4 ? 4 : N;
#pragma unroll
    for (int first = 0; first < N; first += kPART)
    {
        float part[kPART];
#pragma unroll
        for (int i = 0; i < kPART; ++i)
        {
            part[i] = values[first + i];
        }
        applyParameters<kPART, ACROSS>(a, part, ACROSS ? parameter : parameter + first);
#pragma unroll
        for (int i = 0; i < kPART; ++i)
        {
            values[first + i] = part[i];
        }
    }
    storeAs<N>(a.y, a.yType, out, values);
}

//! The specs of most models (see isPlain in args.cpp), without branches around memory accesses: the reads of the gain,
//! of type G, are issued together, in batches of 16 registers, or 8 where x takes 32 (one read for compute capability
//! 10.0, whose code needs a few registers more), and serve all rows that the thread holds. Batches stay a loop:
//! unrolled, all reads would be issued first, into registers that are not there.
template <typename T, typename G, int N, int C, int R>
__device__ inline void finishPlain(
    Args const& a, Pack<T, N> (&held)[C * R], float const (&factor)[R], Rows const& rows, Span const& span)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1000
    constexpr int kFIT = C > 4 ? 1 : 64 / Pack<G, N>::kBYTES;
#else
    constexpr int kFIT = (C > 4 ? 32 : 64) / Pack<G, N>::kBYTES;
#endif
    constexpr int kBATCH = C < kFIT ? C : kFIT;
    auto const* gain = static_cast<G const*>(a.gain) + span.start;
#pragma unroll 1
    for (int c0 = 0; c0 < C; c0 += kBATCH)
    {
        Pack<G, N> read[kBATCH];
#pragma unroll
        for (int b = 0; b < kBATCH; ++b)
        {
            int const element = span.element<N>(c0 + b);
            bool const inside = element < span.count; // GUARD(true): the end of the gain
            // Always set: what is written under a condition only would stay alive around the loop.
            read[b] = Pack<G, N>{};
            if (inside)
            {
                read[b] = load<Read::kPARAMETER, G, N>(gain + element);
            }
        }
#pragma unroll
        for (int b = 0; b < kBATCH; ++b)
        {
            int const element = span.element<N>(c0 + b);
            float weight[N];
            widen<G, N>(read[b], weight);
#pragma unroll
            for (int r = 0; r < R; ++r)
            {
                float values[N];
                widen<T, N>(held[b * R + r], values);
                scale<N>(values, factor[r]);
                if (a.normalizedType != RMSNORM_FLOAT32) // GUARD(false): a rounding point
                {
                    roundTo<T, N>(values);
                }
#pragma unroll
                for (int i = 0; i < N; ++i)
                {
                    values[i] *= weight[i] + a.gainOffset;
                }
                bool const inside = element < span.count; // GUARD(true): the end of a row of y
                bool const exists = rows.at(r) < a.rows;  // GUARD(true): the last row
                if (inside && exists)
                {
                    int64_t const out = rows.at(r) * a.d + span.start + element;
                    store<T, N>(static_cast<T*>(a.y) + out, narrow<T, N>(values));
                }
            }
        }
        rotate<kBATCH * R % (C * R)>(held);
    }
}

//! Every rounding point. The loop stays a loop, or the many branches would be compiled once per pack, which takes
//! minutes and spills; and because registers have no index, the packs move up by one each time.
template <typename T, int N, int C, int R>
__device__ inline void finishRows(
    Args const& a, Pack<T, N> (&held)[C * R], float (&factor)[R], Rows const& rows, Span const& span)
{
#pragma unroll 1
    for (int k = 0; k < C * R; ++k)
    {
        int const r = k % R;
        int const element = span.element<N>(k / R);
        bool const inside = element < span.count; // GUARD(true): the end of a row of y
        bool const exists = rows.at(r) < a.rows;  // GUARD(true): the last row
        if (inside && exists)
        {
            float values[N];
            widen<T, N>(held[0], values);
            float same[N];
#pragma unroll
            for (int i = 0; i < N; ++i)
            {
                same[i] = factor[0];
            }
            scaleAny<N>(values, same, a.protectZeros);
            int64_t const parameter = span.start + element;
            finishAny<N, false>(a, values, parameter, rows.at(r) * a.d + parameter);
        }
        rotate<1>(held);
        rotate<1>(factor);
    }
}

//! Writes what a thread holds of its rows.
template <typename T, int N, int C, int R>
__device__ inline void finish(
    Args const& a, Pack<T, N> (&held)[C * R], float (&factor)[R], Rows const& rows, Span const& span)
{
    forget(held, a.zero);
    if (!a.plain)
    {
        finishRows<T, N, C, R>(a, held, factor, rows, span);
        return;
    }
    if constexpr (sizeof(T) == 2)
    {
        if (a.gainStorage != RMSNORM_FLOAT32)
        {
            finishPlain<T, T, N, C, R>(a, held, factor, rows, span);
            return;
        }
    }
    finishPlain<T, float, N, C, R>(a, held, factor, rows, span);
}

} // namespace rmsnorm
