// The part of CUDA's runtime that the plugin calls, over the CPU's memory. A copy happens when its stream is waited for;
// while a graph is captured, a thread that did not ask for leave may not allocate.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <vector>

namespace
{

struct Copy
{
    void* to;
    void const* from;
    size_t count;
};

std::vector<Copy> gCopies = [] {
    std::vector<Copy> copies;
    copies.reserve(64); // CUDA's runtime throws nothing, whether there is memory or not
    return copies;
}();
int gCalls = 0;
int gLive = 0;
int gDevice = 0;
int gFailAt = 0; // the how manieth call from now on fails; 0 for none
bool gCapturing = false;
cudaStreamCaptureMode gMode = cudaStreamCaptureModeGlobal;

bool fails()
{
    ++gCalls;
    return gFailAt > 0 && --gFailAt == 0;
}

} // namespace

extern "C"
{

int standinAbsentGuard = 0; // which guard is left out, in a library whose guards can be switched

int32_t standinCalls()
{
    return gCalls;
}

int32_t standinLive()
{
    return gLive;
}

void standinDevice(int32_t device)
{
    gDevice = device;
}

void standinFailAt(int32_t call)
{
    gFailAt = call;
}

void standinCapturing(int32_t yes)
{
    gCapturing = yes != 0;
}

void standinWithout(int32_t guard)
{
    standinAbsentGuard = guard;
}

cudaError_t cudaGetDevice(int* device)
{
    *device = gDevice;
    return fails() ? cudaErrorNoDevice : cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t size)
{
    if (fails())
    {
        return cudaErrorMemoryAllocation;
    }
    if (gCapturing && gMode != cudaStreamCaptureModeRelaxed)
    {
        return cudaErrorStreamCaptureUnsupported;
    }
    ++gLive;
    *memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
    std::memset(*memory, 0xff, size);
    return cudaSuccess;
}

cudaError_t cudaFree(void* memory)
{
    if (memory == nullptr)
    {
        return cudaSuccess;
    }
    // A free that fails would be a leak: the standin's never does, other than during a capture.
    if (gCapturing && gMode != cudaStreamCaptureModeRelaxed)
    {
        return cudaErrorStreamCaptureUnsupported;
    }
    --gLive;
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t count, cudaMemcpyKind, cudaStream_t)
{
    if (fails())
    {
        return cudaErrorInvalidValue;
    }
    gCopies.push_back({to, from, count});
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int)
{
    *stream = reinterpret_cast<cudaStream_t>(&gCopies);
    return fails() ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    bool const failed = fails();
    for (Copy const& copy : gCopies)
    {
        std::memcpy(copy.to, copy.from, failed ? 0 : copy.count);
    }
    gCopies.clear();
    return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t)
{
    gCopies.clear();
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode)
{
    cudaStreamCaptureMode const before = gMode;
    gMode = *mode;
    *mode = before;
    return cudaSuccess;
}

char const* cudaGetErrorString(cudaError_t)
{
    return "an error of the stand-in's";
}
}
