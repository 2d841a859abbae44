#include "plugin.h"

#include "check.h"
#include "log.h"
#include "tensors.h"

using namespace nvinfer1;

namespace rmsnorm::plugin
{
namespace
{

constexpr int32_t kDONE = 0;
constexpr int32_t kFAILED = -1; // whatever is not 0 ends TensorRT's call with an error

//! The descriptions of tensors inside those with bounds.
struct List
{
    PluginTensorDesc const* descs[3];
};

List listOf(DynamicPluginTensorDesc const* tensors, int32_t count)
{
    List list{};
    for (int32_t i = 0; i < count; ++i)
    {
        list.descs[i] = &tensors[i].desc;
    }
    return list;
}

} // namespace

IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept
{
    switch (type)
    {
    case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* Plugin::clone() noexcept
{
    return guarded("clone", static_cast<IPluginV3*>(nullptr), [&] { return new Plugin(*this); });
}

char const* Plugin::getPluginName() const noexcept
{
    return kNAME;
}

char const* Plugin::getPluginVersion() const noexcept
{
    return kVERSION;
}

char const* Plugin::getPluginNamespace() const noexcept
{
    return kNAMESPACE;
}

int32_t Plugin::configurePlugin(
    DynamicPluginTensorDesc const* in, int32_t nbInputs, DynamicPluginTensorDesc const* out, int32_t nbOutputs) noexcept
{
    return guarded("configurePlugin", kFAILED, [&] {
        checkCounts(fields(), nbInputs, nbOutputs);
        checkTensors(fields(), listOf(in, nbInputs).descs, out[0].desc);
        return kDONE;
    });
}

int32_t Plugin::getOutputDataTypes(
    DataType* outputTypes, int32_t nbOutputs, DataType const* inputTypes, int32_t nbInputs) const noexcept
{
    return guarded("getOutputDataTypes", kFAILED, [&] {
        checkCounts(fields(), nbInputs, nbOutputs);
        checkInputTypes(fields(), inputTypes);
        outputTypes[0] = resultType(fields(), inputTypes[0]);
        return kDONE;
    });
}

int32_t Plugin::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t,
    DimsExprs* outputs, int32_t nbOutputs, IExprBuilder&) noexcept
{
    return guarded("getOutputShapes", kFAILED, [&] {
        checkCounts(fields(), nbInputs, nbOutputs);
        checkRank(fields(), inputs[0].nbDims);
        outputs[0] = inputs[0];
        return kDONE;
    });
}

bool Plugin::supportsFormatCombination(
    int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t nbInputs, int32_t nbOutputs) noexcept
{
    return guarded("supportsFormatCombination", false, [&] {
        checkCounts(fields(), nbInputs, nbOutputs);
        PluginTensorDesc const& tensor = inOut[pos].desc;
        bool const linear = tensor.format == TensorFormat::kLINEAR; // GUARD(true)
        return linear && allowsType(fields(), pos, tensor.type, inOut[0].desc.type);
    });
}

int32_t Plugin::getNbOutputs() const noexcept
{
    return 1;
}

size_t Plugin::getWorkspaceSize(
    DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*, int32_t) const noexcept
{
    return 0;
}

char const* Plugin::getTimingCacheID() noexcept
{
    return mShared->description.c_str();
}

char const* Plugin::getMetadataString() noexcept
{
    return mShared->description.c_str();
}

int32_t Plugin::onShapeChange(
    PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* out, int32_t nbOutputs) noexcept
{
    return guarded("onShapeChange", kFAILED, [&] {
        checkCounts(fields(), nbInputs, nbOutputs);
        problemOf(fields(), in, out[0]);
        if (mGain == nullptr) // TensorRT times plugins that it attached to no context
        {
            prepareGain();
        }
        return kDONE;
    });
}

int32_t Plugin::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc,
    void const* const* inputs, void* const* outputs, void*, cudaStream_t stream) noexcept
{
    return guarded("enqueue", kFAILED, [&] {
        bool const descs = inputDesc != nullptr && outputDesc != nullptr;
        bool const given = descs && inputs != nullptr && outputs != nullptr; // GUARD(true)
        if (!given)
        {
            throw Refused("a list of tensors is null");
        }
        RmsnormProblem p = problemOf(fields(), inputDesc, outputDesc[0]);
        if (isEmpty(p)) // GUARD(false): no memory has to be there
        {
            return kDONE;
        }
        p.x = inputs[0];
        p.y = outputs[0];
        p.gain = fields().gainIsField ? mGain : fields().hasGain ? inputs[1] : nullptr;
        p.bias = fields().hasBias ? inputs[fields().inputs() - 1] : nullptr;
        bool const gain = p.gain != nullptr || !fields().hasGain;  // GUARD(true)
        bool const bias = p.bias != nullptr || !fields().hasBias;  // GUARD(true)
        if (!gain || !bias)
        {
            throw Refused(std::string(gain ? "bias" : "gain") + " is not on the device");
        }
        int32_t const status = rmsnormLaunch(&p, stream);
        if (status != RMSNORM_OK) // GUARD(false)
        {
            throw Refused(std::string("the launch failed: ") + rmsnormStatusString(status));
        }
        return kDONE;
    });
}

IPluginV3* Plugin::attachToContext(IPluginResourceContext*) noexcept
{
    return guarded("attachToContext", static_cast<IPluginV3*>(nullptr), [&] {
        auto attached = std::make_unique<Plugin>(*this);
        attached->prepareGain(); // GUARD(drop)
        return attached.release();
    });
}

PluginFieldCollection const* Plugin::getFieldsToSerialize() noexcept
{
    return &mShared->stored.collection();
}

void Plugin::prepareGain()
{
    if (fields().gainIsField)
    {
        mGain = mShared->gain.onThisDevice();
    }
}

} // namespace rmsnorm::plugin
