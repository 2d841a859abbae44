// A gain that is a field, on the device: one copy per device, shared by all clones of a plugin, freed with the last.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace rmsnorm::plugin
{

class DeviceGain
{
public:
    //! \param bytes The numbers, which must outlive this.
    explicit DeviceGain(std::vector<uint8_t> const& bytes);
    ~DeviceGain();
    DeviceGain(DeviceGain const&) = delete;
    DeviceGain& operator=(DeviceGain const&) = delete;

    //! The numbers in the current device's memory, put there by the first call. It disturbs no stream, nor any capture
    //! of one into a graph.
    //!
    //! \throws Refused with CUDA's error.
    void const* onThisDevice();

private:
    void* upload() const;

    std::vector<uint8_t> const& mBytes;
    std::mutex mMutex;
    std::map<int, void*> mCopies; // by device
};

} // namespace rmsnorm::plugin
