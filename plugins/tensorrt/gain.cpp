#include "gain.h"

#include "log.h"

#include <cuda_runtime_api.h>
#include <string>

namespace rmsnorm::plugin
{
namespace
{

void require(cudaError_t code, char const* what)
{
    if (code != cudaSuccess) // GUARD(false)
    {
        throw Refused(std::string("field gain: ") + what + " failed: " + cudaGetErrorString(code));
    }
}

//! While it lives, this thread may allocate even if some stream is being captured into a graph.
class Uncaptured
{
public:
    Uncaptured()
    {
        cudaThreadExchangeStreamCaptureMode(&mMode); // GUARD(drop)
    }
    ~Uncaptured()
    {
        cudaThreadExchangeStreamCaptureMode(&mMode); // GUARD(drop)
    }
    Uncaptured(Uncaptured const&) = delete;
    Uncaptured& operator=(Uncaptured const&) = delete;

private:
    cudaStreamCaptureMode mMode = cudaStreamCaptureModeRelaxed;
};

//! Copies on a stream of its own, so that no other stream is waited for.
cudaError_t copyToDevice(void* to, std::vector<uint8_t> const& bytes)
{
    cudaStream_t stream = nullptr;
    cudaError_t code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (code != cudaSuccess)
    {
        return code;
    }
    code = cudaMemcpyAsync(to, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream);
    code = code == cudaSuccess ? cudaStreamSynchronize(stream) : code; // GUARD(drop)
    cudaStreamDestroy(stream);
    return code;
}

} // namespace

DeviceGain::DeviceGain(std::vector<uint8_t> const& bytes)
    : mBytes(bytes)
{
}

DeviceGain::~DeviceGain()
{
    Uncaptured const allowed;
    for (auto const& copy : mCopies)
    {
        cudaFree(copy.second); // GUARD(drop)
    }
}

void const* DeviceGain::onThisDevice()
{
    int device = 0;
    require(cudaGetDevice(&device), "finding the device");
    std::lock_guard<std::mutex> const lock(mMutex);
    void*& copy = mCopies[device]; // first, so that no copy is lost where the host has no memory to note it
    if (copy == nullptr) // GUARD(true)
    {
        copy = upload();
    }
    return copy;
}

void* DeviceGain::upload() const
{
    Uncaptured const allowed;
    void* copy = nullptr;
    require(cudaMalloc(&copy, mBytes.size()), "an allocation on the device");
    cudaError_t const code = copyToDevice(copy, mBytes);
    if (code != cudaSuccess)
    {
        cudaFree(copy); // GUARD(drop)
    }
    require(code, "the copy to the device");
    return copy;
}

} // namespace rmsnorm::plugin
