// The two ways to compile these sources: nvcc, for a device; or g++ with the tests' shim, which runs the same kernels
// on the CPU. Nothing else here knows of the second.
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

// Loads and stores without a hint. In assembly, because an assignment of 16 bytes may become four of 4, and __ldca and
// __stwb become accesses that are ordered for other threads of the SM.

__device__ inline uint4 loadPlain(uint4 const* from)
{
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

template <typename P>
__device__ inline P loadPlain(P const* from)
{
    return *from;
}

__device__ inline void storePlain(uint4* to, uint4 const& v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ inline void storePlain(uint2* to, uint2 const& v)
{
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(to), "r"(v.x), "r"(v.y) : "memory");
}

template <typename P>
__device__ inline void storePlain(P* to, P const& v)
{
    *to = v;
}

} // namespace rmsnorm

#else

#include "cuda_shim.h"

#endif
