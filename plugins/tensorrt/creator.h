// Makes plugins of fields, for the parser and for the deserialisation of engines alike.
#pragma once

#include <NvInferRuntime.h>

namespace rmsnorm::plugin
{

class Creator final : public nvinfer1::IPluginCreatorV3One
{
public:
    //! Null, and one line in the log, where the fields make no norm.
    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
        nvinfer1::TensorRTPhase phase) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override;
    char const* getPluginName() const noexcept override;
    char const* getPluginVersion() const noexcept override;
    char const* getPluginNamespace() const noexcept override;
};

} // namespace rmsnorm::plugin
