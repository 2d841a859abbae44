// Kernels over rows: [rows, d], normalised along d.
#pragma once

#include "finish.cuh"

#include <climits>

namespace rmsnorm
{

constexpr int kWARP_ROWS_THREADS = 128;

//! Issues all of a thread's reads before anything is computed from them: they are what is in flight.
//!
//! Access c of row r is held[c * R + r].
template <Read READ, typename T, int N, int C, int R>
__device__ inline void loadRows(Args const& a, Rows const& rows, Span const& span, Pack<T, N> (&held)[C * R])
{
#pragma unroll
    for (int r = 0; r < R; ++r)
    {
        auto const* x = static_cast<T const*>(a.x) + rows.at(r) * a.d + span.start;
        bool const exists = rows.at(r) < a.rows; // GUARD(true): the last row
#pragma unroll
        for (int c = 0; c < C; ++c)
        {
            int const element = span.element<N>(c);
            bool const inside = element < span.count; // GUARD(true): the end of a row of x
            held[c * R + r] = Pack<T, N>{};
            if (inside && exists)
            {
                held[c * R + r] = load<READ, T, N>(x + element);
            }
        }
    }
}

//! Adds the squares of row r to `sum`: those of the elements below `leading`. (Beyond the row, held is 0.)
template <typename T, int N, int C, int R>
__device__ inline void addRow(Pack<T, N> const (&held)[C * R], int r, Span const& span, Args const& a, float (&sum)[4])
{
    int const leading = static_cast<int>(min(max(a.leading - span.start, int64_t{0}), int64_t{INT_MAX}));
#pragma unroll
    for (int c = 0; c < C; ++c)
    {
        addSquares<T, N>(held[c * R + r], leading - span.element<N>(c), sum);
    }
}

__device__ inline float total(float const (&sum)[4])
{
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

//! R rows per group of lanes, 32 / lanes groups per warp. Warps share nothing, so there is no barrier. Lanes whose row
//! does not exist go along: every lane reaches every shuffle.
//!
//! At most 72 registers a thread, 80 where it holds 32 of x: so 896 or 768 threads fit an SM, with 56 or 96 KiB of x.
template <typename T, int N, int C, int R>
__global__ void __launch_bounds__(kWARP_ROWS_THREADS, C > 4 ? 6 : 7) warpRows(Args const a)
{
    int const lanes = 1 << a.lanesLog2;
    int const lane = static_cast<int>(threadIdx.x) % 32;
    int const groups = 32 >> a.lanesLog2;
    int64_t const warp = (a.firstBlock + blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    Span const span{0, static_cast<int>(a.d), lane & (lanes - 1), lanes};
    Rows const rows{warp * groups * R + (lane >> a.lanesLog2), groups};
    Pack<T, N> held[C * R];
    loadRows<Read::kONCE, T, N, C, R>(a, rows, span, held);
    float factor[R];
#pragma unroll
    for (int r = 0; r < R; ++r)
    {
        float sum[4] = {};
        addRow<T, N, C, R>(held, r, span, a, sum);
        factor[r] = total(sum);
    }
    warpSums<R>(factor, lanes);
#pragma unroll
    for (int r = 0; r < R; ++r)
    {
        factor[r] = factorOf(factor[r], a);
    }
    finish<T, N, C, R>(a, held, factor, rows, span);
}

//! A row per block, held in registers. At most 64 registers a thread: two blocks of 512 threads fit an SM.
template <typename T, int N, int C>
__global__ void __launch_bounds__(C > 4 ? 1024 : 512, C > 4 ? 1 : 2) blockRow(Args const a)
{
    RMSNORM_SHARED(float, partial, 32);
    Rows const rows{a.firstBlock + blockIdx.x, 0};
    Span const span{0, static_cast<int>(a.d), static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
    Pack<T, N> held[C];
    loadRows<Read::kONCE, T, N, C, 1>(a, rows, span, held);
    float sum[4] = {};
    addRow<T, N, C, 1>(held, 0, span, a, sum);
    float factor[1] = {factorOf(blockSum(total(sum), partial), a)};
    finish<T, N, C, 1>(a, held, factor, rows, span);
}

//! A row per block that is too long for its registers: read for the statistic, then again, from the L2 if it is there.
//! The second pass goes backwards, because the end of the row is what was read last.
template <typename T, int N, int C>
__global__ void __launch_bounds__(1024, 1) reloadRow(Args const a)
{
    RMSNORM_SHARED(float, partial, 32);
    Rows const rows{a.firstBlock + blockIdx.x, 0};
    int const chunk = static_cast<int>(blockDim.x) * N * C;
    int64_t const chunks = (a.d + chunk - 1) / chunk;
    Span span{0, chunk, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
    Pack<T, N> held[C];
    float sum[4] = {};
    for (int64_t i = 0; i < chunks; ++i)
    {
        span.start = i * chunk;
        span.count = static_cast<int>(min(int64_t{chunk}, a.d - span.start));
        loadRows<Read::kAGAIN, T, N, C, 1>(a, rows, span, held);
        addRow<T, N, C, 1>(held, 0, span, a, sum);
    }
    float factor[1] = {factorOf(blockSum(total(sum), partial), a)};
    for (int64_t i = chunks; i-- > 0;)
    {
        span.start = i * chunk;
        span.count = static_cast<int>(min(int64_t{chunk}, a.d - span.start));
        loadRows<Read::kONCE, T, N, C, 1>(a, rows, span, held);
        finish<T, N, C, 1>(a, held, factor, rows, span);
    }
}

} // namespace rmsnorm
