// The two ways to compile these sources: nvcc, for a device; or g++ with the tests' shim, which runs the same kernels on
// the CPU. Nothing else here knows of the second.
#pragma once

#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define RMSNORM_SHARED(type, name, count) __shared__ type name[count]

namespace rmsnorm
{

template <typename Args>
int32_t launchKernel(void (*kernel)(Args), int64_t grid, int32_t threads, void* stream, Args const& args)
{
    void* list[] = {const_cast<Args*>(&args)};
    return cudaLaunchKernel(reinterpret_cast<void const*>(kernel), dim3(static_cast<unsigned>(grid)),
        dim3(static_cast<unsigned>(threads)), list, 0, static_cast<cudaStream_t>(stream));
}

} // namespace rmsnorm

#else

#include "cuda_shim.h"

#endif
