// The two functions that a host looks up in the library, and all that it exports. It does not register itself: the
// registry's own layout differs between versions of TensorRT, and calling it would tie the library to one.
#include "creator.h"
#include "log.h"

#define RMSNORM_ENTRY extern "C" __attribute__((visibility("default")))

RMSNORM_ENTRY nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) noexcept
{
    static rmsnorm::plugin::Creator creator;
    static nvinfer1::IPluginCreatorInterface* const list[] = {&creator};
    count = 1;
    return list;
}

RMSNORM_ENTRY void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept
{
    rmsnorm::plugin::setFinder(finder);
}
