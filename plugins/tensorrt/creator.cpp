#include "creator.h"

#include "log.h"
#include "plugin.h"

using namespace nvinfer1;

namespace rmsnorm::plugin
{

IPluginV3* Creator::createPlugin(char const* name, PluginFieldCollection const* fields, TensorRTPhase) noexcept
{
    char const* const where = name == nullptr || *name == '\0' ? "a node without a name" : name;
    return guarded(where, static_cast<IPluginV3*>(nullptr), [&] {
        if (fields == nullptr) // GUARD(false)
        {
            throw Refused("field axes: it is missing, as is the whole list of fields");
        }
        return new Plugin(std::make_shared<Shared>(readFields(*fields)));
    });
}

PluginFieldCollection const* Creator::getFieldNames() noexcept
{
    return &fieldNames();
}

char const* Creator::getPluginName() const noexcept
{
    return kNAME;
}

char const* Creator::getPluginVersion() const noexcept
{
    return kVERSION;
}

char const* Creator::getPluginNamespace() const noexcept
{
    return kNAMESPACE;
}

} // namespace rmsnorm::plugin
