// Kernels over columns: [outer, d, inner], normalised along d, which is not the innermost axis (channels first).
//
// A tile is WIDTH neighbouring columns, so that each channel of it is one piece of memory. `outer` and `inner` are one
// index, for small images would leave most lanes idle otherwise. A thread owns N columns and every SLICES-th channel.
#pragma once

#include "finish.cuh"

namespace rmsnorm
{

constexpr int kMOST_WIDTH = 64;

//! Where a thread works.
struct Tile
{
    int column;   // the thread's first column, within the tile
    int64_t base; // the index of the thread's first column at channel 0
    int slice;
    int slices;
    bool exists;
};

template <int N>
__device__ inline Tile makeTile(Args const& a, int64_t number)
{
    int const lanes = 1 << a.lanesLog2;
    int const thread = static_cast<int>(threadIdx.x);
    Tile tile;
    tile.column = (thread & (lanes - 1)) * N;
    int64_t const column = number * lanes * N + tile.column;
    // column / inner and the remainder, without the hundred instructions of a 64-bit division. The quotient is right or
    // one too small, for fewer than 2^51 columns, which no memory holds.
    auto outer = static_cast<int64_t>(static_cast<double>(column) * a.inverseInner);
    int64_t within = column - outer * a.inner;
    bool const small = within >= a.inner; // GUARD(false): the quotient is one too small
    outer += small ? 1 : 0;
    within -= small ? a.inner : 0;
    tile.base = outer * a.d * a.inner + within;
    tile.slice = thread >> a.lanesLog2;
    tile.slices = static_cast<int>(blockDim.x) >> a.lanesLog2;
    tile.exists = column < a.rows; // GUARD(true): the last tile
    return tile;
}

template <Read READ, typename T, int N, int C>
__device__ inline void loadColumns(Args const& a, Tile const& tile, int64_t firstChannel, Pack<T, N> (&held)[C])
{
    auto const* x = static_cast<T const*>(a.x) + tile.base;
#pragma unroll
    for (int c = 0; c < C; ++c)
    {
        int64_t const channel = firstChannel + tile.slice + c * tile.slices;
        bool const inside = channel < a.d; // GUARD(true): the last channel of x
        held[c] = Pack<T, N>{};
        if (inside && tile.exists)
        {
            held[c] = load<READ, T, N>(x + channel * a.inner);
        }
    }
}

template <typename T, int N, int C>
__device__ inline void addColumns(Pack<T, N> const (&held)[C], float (&sum)[N])
{
#pragma unroll
    for (int c = 0; c < C; ++c)
    {
        float values[N];
        widen<T, N>(held[c], values);
#pragma unroll
        for (int i = 0; i < N; ++i)
        {
            sum[i] += values[i] * values[i];
        }
    }
}

//! Makes of each thread's N sums the factors of the tile's columns, in `factors`.
//!
//! Two barriers, unlike rows: here every warp holds sums of many columns, and one thread per column adds them up and
//! takes the root once, instead of every warp again.
template <int N>
__device__ inline void columnFactors(Args const& a, Tile const& tile, float (&sum)[N], float* partial, float* factors)
{
    int const lanes = 1 << a.lanesLog2;
    int const width = lanes * N;
    int const thread = static_cast<int>(threadIdx.x);
    int const warps = static_cast<int>(blockDim.x) / 32;
    for (int offset = lanes; offset < 32; offset *= 2)
    {
#pragma unroll
        for (int i = 0; i < N; ++i)
        {
            sum[i] += __shfl_xor_sync(0xffffffffU, sum[i], offset);
        }
    }
    bool const first = thread % 32 < lanes;
    if (first)
    {
#pragma unroll
        for (int i = 0; i < N; ++i)
        {
            partial[thread / 32 * width + tile.column + i] = sum[i];
        }
    }
    __syncthreads(); // GUARD(drop): every warp's sums are there
    bool const sums = thread < width; // GUARD(true): more threads than columns
    if (sums)
    {
        float whole = 0.0F;
        for (int warp = 0; warp < warps; ++warp)
        {
            whole += partial[warp * width + thread];
        }
        factors[thread] = factorOf(whole, a);
    }
    __syncthreads(); // GUARD(drop): the factors are there
}

template <typename T, int N, int C>
__device__ inline void finishColumns(
    Args const& a, Tile const& tile, int64_t firstChannel, Pack<T, N> (&held)[C], float const* factors)
{
    forget(held, a.zero);
#pragma unroll 1
    for (int c = 0; c < C; ++c)
    {
        int64_t const channel = firstChannel + tile.slice + c * tile.slices;
        bool const inside = channel < a.d; // GUARD(true): the last channel of y
        if (inside && tile.exists)
        {
            float values[N];
            widen<T, N>(held[0], values);
            // From shared memory each time: N more registers are not to be had.
            float factor[N];
#pragma unroll
            for (int i = 0; i < N; ++i)
            {
                factor[i] = factors[tile.column + i];
            }
            scaleAny<N>(values, factor, a.protectZeros);
            finishAny<N, true>(a, values, channel, tile.base + channel * a.inner);
        }
        rotate<1>(held);
    }
}

constexpr int kCOLUMNS_THREADS = 512;

//! KEEP: the tile stays in registers; otherwise it is read twice. At most 80 registers a thread, as for 768 threads an
//! SM; within 64, some of these kernels spill.
template <typename T, int N, int C, bool KEEP>
__global__ void __launch_bounds__(kCOLUMNS_THREADS + 256) columns(Args const a)
{
    RMSNORM_SHARED(float, partial, 32 * kMOST_WIDTH);
    RMSNORM_SHARED(float, factors, kMOST_WIDTH);
    Tile const tile = makeTile<N>(a, a.firstBlock + blockIdx.x);
    int64_t const chunk = int64_t{tile.slices} * C;
    Pack<T, N> held[C];
    float sum[N] = {};
    for (int64_t first = 0; first < (KEEP ? 1 : a.d); first += chunk)
    {
        loadColumns<KEEP ? Read::kONCE : Read::kAGAIN, T, N, C>(a, tile, first, held);
        addColumns<T, N, C>(held, sum);
    }
    columnFactors<N>(a, tile, sum, partial, factors);
    for (int64_t first = 0; first < (KEEP ? 1 : a.d); first += chunk)
    {
        if (!KEEP)
        {
            loadColumns<Read::kONCE, T, N, C>(a, tile, first, held);
        }
        finishColumns<T, N, C>(a, tile, first, held, factors);
    }
}

} // namespace rmsnorm
