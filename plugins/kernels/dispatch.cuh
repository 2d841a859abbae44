// From a plan to the kernel that was compiled for it, for one type of x. The list here is the list of all kernels.
#pragma once

#include "check.h"
#include "columns.cuh"
#include "launch.h"
#include "rows.cuh"

namespace rmsnorm
{

using Kernel = void (*)(Args);

template <typename T>
constexpr int kWIDE = kACCESS_BYTES / static_cast<int>(sizeof(T));

template <typename T>
Kernel rowKernel(RmsnormPlan const& plan)
{
    bool const wide = plan.elements > 1;
    constexpr int N = kWIDE<T>;
    switch (plan.kernel * 100 + plan.accesses * 10 + plan.rows)
    {
    case RMSNORM_WARP_ROWS * 100 + 14: return wide ? warpRows<T, N, 1, 4> : warpRows<T, 1, 1, 4>;
    case RMSNORM_WARP_ROWS * 100 + 22: return wide ? warpRows<T, N, 2, 2> : nullptr;
    case RMSNORM_WARP_ROWS * 100 + 41: return wide ? warpRows<T, N, 4, 1> : nullptr;
    case RMSNORM_WARP_ROWS * 100 + 81: return wide ? warpRows<T, N, 8, 1> : warpRows<T, 1, 8, 1>;
    case RMSNORM_BLOCK_ROW * 100 + 41: return wide ? blockRow<T, N, 4> : nullptr;
    case RMSNORM_BLOCK_ROW * 100 + 81: return wide ? blockRow<T, N, 8> : blockRow<T, 1, 8>;
    case RMSNORM_RELOAD_ROW * 100 + 41: return wide ? reloadRow<T, N, 4> : reloadRow<T, 1, 4>;
    default: return nullptr;
    }
}

template <typename T>
Kernel columnKernel(RmsnormPlan const& plan)
{
    bool const wide = plan.elements > 1;
    constexpr int N = kWIDE<T>;
    switch (plan.kernel * 100 + plan.accesses * 10 + plan.rows)
    {
    case RMSNORM_COLUMNS * 100 + 81: return wide ? columns<T, N, 8, true> : columns<T, 1, 8, true>;
    case RMSNORM_RELOAD_COLUMNS * 100 + 41: return wide ? columns<T, N, 4, false> : columns<T, 1, 4, false>;
    default: return nullptr;
    }
}

//! The most threads that the kernel's __launch_bounds__ allow.
inline int mostThreads(RmsnormPlan const& plan)
{
    switch (plan.kernel)
    {
    case RMSNORM_WARP_ROWS: return kWARP_ROWS_THREADS;
    case RMSNORM_BLOCK_ROW: return plan.accesses > 4 ? 1024 : 512;
    case RMSNORM_RELOAD_ROW: return 1024;
    default: return kCOLUMNS_THREADS;
    }
}

//! Launches on rows or columns of T; a plan that passed checkPlan() may still name a kernel that does not exist.
template <typename T>
int32_t launchOn(Args const& args, RmsnormPlan const& plan, void* stream)
{
    bool const byColumns = plan.kernel == RMSNORM_COLUMNS || plan.kernel == RMSNORM_RELOAD_COLUMNS;
    Kernel const kernel = byColumns ? columnKernel<T>(plan) : rowKernel<T>(plan);
    bool const fits = plan.threads <= mostThreads(plan); // GUARD(true)
    if (kernel == nullptr || !fits)
    {
        return RMSNORM_BAD_PLAN;
    }
    return launchKernel(kernel, plan.grid, plan.threads, stream, args);
}

} // namespace rmsnorm
