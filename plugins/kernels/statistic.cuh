// The sum of squares of a row, and 1 / rms.
#pragma once

#include "args.h"
#include "vectors.cuh"

namespace rmsnorm
{

//! Adds the squares of one pack to `sum`, of its first `count` elements (all, if there are fewer; none, if negative).
//!
//! Four running sums: the additions of one do not wait for each other, and the rounding error grows with a quarter of
//! the number of terms.
template <typename T, int N>
__device__ inline void addSquares(Pack<T, N> const& pack, int count, float (&sum)[4])
{
    float values[N];
    widen<T, N>(pack, values);
    bool const whole = count >= N; // GUARD(true): the elements beyond `leading`
    if (!whole)
    {
#pragma unroll
        for (int i = 0; i < N; ++i)
        {
            values[i] = i < count ? values[i] : 0.0F;
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        sum[i % 4] += values[i] * values[i];
    }
}

//! Sums over groups of `lanes` neighbouring lanes, a power of two, in every lane. All 32 lanes must take part. Several
//! sums go side by side, so that none waits for the shuffles of another.
template <int R>
__device__ inline void warpSums(float (&value)[R], int lanes)
{
    for (int offset = lanes / 2; offset > 0; offset /= 2)
    {
#pragma unroll
        for (int r = 0; r < R; ++r)
        {
            value[r] += __shfl_xor_sync(0xffffffffU, value[r], offset);
        }
    }
}

//! The sum over a block, in every thread, at the price of one barrier: each warp leaves its sum, and then every warp
//! adds up all of them for itself.
//! `partial` has 32 places, and may not be written again: there is no second barrier.
__device__ inline float blockSum(float value, float* partial)
{
    int const lane = static_cast<int>(threadIdx.x) % 32;
    int const warp = static_cast<int>(threadIdx.x) / 32;
    int const warps = static_cast<int>(blockDim.x) / 32;
    float sum[1] = {value};
    warpSums<1>(sum, 32);
    bool const first = lane == 0;
    if (first)
    {
        partial[warp] = sum[0];
    }
    __syncthreads(); // GUARD(drop): every warp's sum is there
    bool const written = lane < warps; // GUARD(true): places of warps that do not exist
    sum[0] = written ? partial[lane] : 0.0F;
    warpSums<1>(sum, 32);
    return sum[0];
}

//! 1 / rms from the sum of squares. IEEE's root and quotient: they are taken once a row, and rsqrtf is off by two ulp.
__device__ inline float factorOf(float sum, Args const& a)
{
    float const mean = sum * a.inverseCount;
    float root;
    if (a.placement == RMSNORM_INSIDE)
    {
        root = sqrtf(mean + a.epsilon);
    }
    else
    {
        root = sqrtf(mean);
        // Not fmaxf, which drops NaN.
        root = a.placement == RMSNORM_OUTSIDE ? root + a.epsilon : (root < a.epsilon ? a.epsilon : root);
    }
    float factor[1] = {1.0F / root};
    roundTo<1>(a.factorType, factor); // GUARD(drop): a rounding point
    return factor[0];
}

template <int N>
__device__ inline void scale(float (&values)[N], float factor)
{
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        values[i] *= factor;
    }
}

//! x * f for factors of their own; where 1 / rms of a row of zeros is infinite, a zero stays zero.
template <int N>
__device__ inline void scaleAny(float (&values)[N], float const (&factor)[N], bool protectZeros)
{
#pragma unroll
    for (int i = 0; i < N; ++i)
    {
        bool const zero = protectZeros && values[i] == 0.0F; // GUARD(false): 0 times infinity
        values[i] = zero ? values[i] : values[i] * factor[i];
    }
}

} // namespace rmsnorm
