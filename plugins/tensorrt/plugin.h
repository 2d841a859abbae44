// The plugin itself: TensorRT's three interfaces around the fields, the tensors' checks and the kernels' launch.
#pragma once

#include "fields.h"
#include "gain.h"

#include <NvInferRuntime.h>

#include <memory>
#include <string>

namespace rmsnorm::plugin
{

constexpr char const* kNAME = "RMSNorm";
constexpr char const* kVERSION = "1";
constexpr char const* kNAMESPACE = "rmsnorm_onnx";

//! What all clones of a plugin share; it does not change.
struct Shared
{
    explicit Shared(Fields given)
        : fields(std::move(given))
        , stored(fields)
        , description(describe(fields))
        , gain(fields.gain)
    {
    }

    Fields const fields;
    StoredFields const stored;
    std::string const description;
    DeviceGain gain;
};

class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime
{
public:
    explicit Plugin(std::shared_ptr<Shared> shared)
        : mShared(std::move(shared))
    {
    }

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    char const* getPluginName() const noexcept override;
    char const* getPluginVersion() const noexcept override;
    char const* getPluginNamespace() const noexcept override;

    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t nbInputs,
        nvinfer1::DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* outputTypes, int32_t nbOutputs,
        nvinfer1::DataType const* inputTypes, int32_t nbInputs) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t nbInputs,
        nvinfer1::DimsExprs const* shapeInputs, int32_t nbShapeInputs, nvinfer1::DimsExprs* outputs,
        int32_t nbOutputs, nvinfer1::IExprBuilder& exprBuilder) noexcept override;
    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* inOut, int32_t nbInputs,
        int32_t nbOutputs) noexcept override;
    int32_t getNbOutputs() const noexcept override;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
        nvinfer1::DynamicPluginTensorDesc const* outputs, int32_t nbOutputs) const noexcept override;
    char const* getTimingCacheID() noexcept override;
    char const* getMetadataString() noexcept override;

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t nbInputs,
        nvinfer1::PluginTensorDesc const* out, int32_t nbOutputs) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* inputDesc, nvinfer1::PluginTensorDesc const* outputDesc,
        void const* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

private:
    Fields const& fields() const
    {
        return mShared->fields;
    }

    //! Puts a gain that is a field on the current device. enqueue() allocates nothing.
    void prepareGain();

    std::shared_ptr<Shared> mShared;
    void const* mGain = nullptr; // the field, on the device
};

} // namespace rmsnorm::plugin
