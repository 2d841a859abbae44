#include "harness.h"

#include "finder.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace
{

//! With room for what a test logs: noting a line takes no memory, for the line may be that there is none.
std::string gLog = [] {
    std::string log;
    log.reserve(1 << 16);
    return log;
}();

void note(char const* message)
{
    gLog.append(message).append("\n");
}

size_t give(std::string const& text, char* to, size_t size)
{
    std::snprintf(to, size, "%s", text.c_str());
    return text.size();
}

struct Bare : rmsnorm::plugin::BareLogger, rmsnorm::plugin::BareFinder
{
    void log(int32_t, char const* message) noexcept override
    {
        note(message);
    }
    rmsnorm::plugin::BareLogger* findLogger() override
    {
        return this;
    }
};

struct VersionedLogger : rmsnorm::plugin::VersionedLogger
{
    InterfaceInfo getInterfaceInfo() const noexcept override
    {
        return {"ILogger", 1, 0};
    }
    void log(int32_t, char const* message) noexcept override
    {
        note(message);
    }
};

//! Bears the name that TensorRT 11 gives to the class.
struct Versioned : v_1_0::ILoggerFinder
{
    explicit Versioned(rmsnorm::plugin::VersionedLogger* given)
        : logger(given)
    {
    }
    InterfaceInfo getInterfaceInfo() const noexcept override
    {
        return {"ILoggerFinder", 1, 0};
    }
    ILogger* findLogger() override
    {
        return reinterpret_cast<ILogger*>(logger);
    }
    rmsnorm::plugin::VersionedLogger* logger;
};

void neverCalled()
{
    std::fputs("harness: a method of a class without a name was called\n", stderr);
    std::abort();
}

void* finderOf(Finder finder)
{
    static Bare bare;
    static VersionedLogger logger;
    static Versioned versioned(&logger);
    static Versioned silent(nullptr);
    auto* const never = reinterpret_cast<void*>(&neverCalled);
    static void* table[] = {nullptr, nullptr, never, never, never, never, never};
    static void* nameless = &table[2];
    switch (finder)
    {
    case kBARE: return static_cast<rmsnorm::plugin::BareFinder*>(&bare);
    case kVERSIONED: return &versioned;
    case kNAMELESS: return &nameless;
    case kSILENT: return &silent;
    default: return nullptr;
    }
}

//! A dimension that is known, or (negative) one that is not.
class Dimension : public IDimensionExpr, private apiv::VDimensionExpr
{
public:
    explicit Dimension(int64_t value)
        : mValue(value)
    {
        IDimensionExpr::mImpl = this;
    }
    ~Dimension() noexcept override = default;

private:
    bool isConstant() const override
    {
        return mValue >= 0;
    }
    int64_t getConstantValue() const override
    {
        return mValue;
    }
    bool isSizeTensor() const override
    {
        return false;
    }
    int64_t mValue;
};

//! A norm makes no new dimensions: whatever is asked for is none.
class NoExpressions : public IExprBuilder, private apiv::VExprBuilder
{
public:
    NoExpressions()
    {
        IExprBuilder::mImpl = this;
    }
    ~NoExpressions() noexcept override = default;

private:
    IDimensionExpr const* constant(int64_t) override
    {
        return nullptr;
    }
    IDimensionExpr const* operation(DimensionOperation, IDimensionExpr const&, IDimensionExpr const&) override
    {
        return nullptr;
    }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) override
    {
        return nullptr;
    }
};

template <typename T>
T* part(Plugin* plugin, PluginCapabilityType type)
{
    return static_cast<T*>(plugin->getCapabilityInterface(type));
}

IPluginV3OneBuild* build(Plugin* plugin)
{
    return part<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
}

IPluginV3OneRuntime* runtime(Plugin* plugin)
{
    return part<IPluginV3OneRuntime>(plugin, PluginCapabilityType::kRUNTIME);
}

} // namespace

Creator* harnessOpen(char const* path, Finder finder, char* problem, size_t size)
{
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
    {
        give(dlerror(), problem, size);
        return nullptr;
    }
    auto const creators = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
    auto const setFinder = reinterpret_cast<void (*)(void*)>(dlsym(library, "setLoggerFinder"));
    if (creators == nullptr || setFinder == nullptr)
    {
        give("it has not both entry points", problem, size);
        return nullptr;
    }
    setFinder(finderOf(finder));
    int32_t count = 0;
    IPluginCreatorInterface* const* const list = creators(count);
    if (count != 1 || std::strcmp(list[0]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") != 0)
    {
        give("it has not one creator of the kind V3ONE", problem, size);
        return nullptr;
    }
    return static_cast<Creator*>(list[0]);
}

size_t harnessLog(char* text, size_t size)
{
    size_t const length = give(gLog, text, size);
    gLog.clear();
    return length;
}

size_t harnessIdentity(Creator* creator, Plugin* plugin, char* text, size_t size)
{
    auto* const core = part<IPluginV3OneCore>(plugin, PluginCapabilityType::kCORE);
    std::string all = std::string(creator->getPluginName()) + " " + creator->getPluginVersion() + " "
        + creator->getPluginNamespace() + " " + core->getPluginName() + " " + core->getPluginVersion() + " "
        + core->getPluginNamespace() + " " + core->getInterfaceInfo().kind + " "
        + build(plugin)->getInterfaceInfo().kind + " " + runtime(plugin)->getInterfaceInfo().kind;
    return give(all, text, size);
}

PluginFieldCollection const* harnessFieldNames(Creator* creator)
{
    return creator->getFieldNames();
}

Plugin* harnessCreate(Creator* creator, char const* name, PluginFieldCollection const* fields, int32_t phase)
{
    return creator->createPlugin(name, fields, static_cast<TensorRTPhase>(phase));
}

void harnessDestroy(Plugin* plugin)
{
    delete plugin;
}

Plugin* harnessClone(Plugin* plugin)
{
    return plugin->clone();
}

Plugin* harnessAttach(Plugin* plugin)
{
    return runtime(plugin)->attachToContext(nullptr);
}

PluginFieldCollection const* harnessFields(Plugin* plugin)
{
    return runtime(plugin)->getFieldsToSerialize();
}

char const* harnessTimingId(Plugin* plugin)
{
    return build(plugin)->getTimingCacheID();
}

char const* harnessMetadata(Plugin* plugin)
{
    return build(plugin)->getMetadataString();
}

int32_t harnessOutputs(Plugin* plugin)
{
    return build(plugin)->getNbOutputs();
}

int32_t harnessOutputTypes(Plugin* plugin, DataType const* in, int32_t inputs, DataType* out, int32_t outputs)
{
    return build(plugin)->getOutputDataTypes(out, outputs, in, inputs);
}

int32_t harnessOutputShape(Plugin* plugin, Dims const* in, int32_t inputs, int32_t outputs, Dims* shape)
{
    std::vector<std::deque<Dimension>> dims(static_cast<size_t>(inputs));
    std::vector<DimsExprs> exprs(static_cast<size_t>(inputs));
    for (int32_t i = 0; i < inputs; ++i)
    {
        auto& mine = dims[static_cast<size_t>(i)];
        exprs[static_cast<size_t>(i)].nbDims = in[i].nbDims;
        for (int32_t axis = 0; axis < in[i].nbDims; ++axis)
        {
            mine.emplace_back(in[i].d[axis]);
            exprs[static_cast<size_t>(i)].d[axis] = &mine.back();
        }
    }
    std::vector<DimsExprs> out(static_cast<size_t>(std::max(outputs, 1)));
    NoExpressions none;
    int32_t const status
        = build(plugin)->getOutputShapes(exprs.data(), inputs, nullptr, 0, out.data(), outputs, none);
    shape->nbDims = status == 0 ? out[0].nbDims : 0;
    for (int32_t at = 0; at < shape->nbDims; ++at)
    {
        shape->d[at] = -1;
        for (int32_t i = 0; i < inputs; ++i)
        {
            for (int32_t axis = 0; axis < in[i].nbDims; ++axis)
            {
                if (out[0].d[at] == exprs[static_cast<size_t>(i)].d[axis])
                {
                    shape->d[at] = i * 100 + axis;
                }
            }
        }
    }
    return status;
}

int32_t harnessSupports(
    Plugin* plugin, int32_t pos, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t outputs)
{
    return build(plugin)->supportsFormatCombination(pos, tensors, inputs, outputs) ? 1 : 0;
}

int32_t harnessConfigure(Plugin* plugin, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t outputs)
{
    return build(plugin)->configurePlugin(tensors, inputs, tensors + inputs, outputs);
}

size_t harnessWorkspace(Plugin* plugin, DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t outputs)
{
    return build(plugin)->getWorkspaceSize(tensors, inputs, tensors + inputs, outputs);
}

int32_t harnessShapeChange(Plugin* plugin, PluginTensorDesc const* tensors, int32_t inputs, int32_t outputs)
{
    return runtime(plugin)->onShapeChange(tensors, inputs, tensors + inputs, outputs);
}

int32_t harnessEnqueue(Plugin* plugin, PluginTensorDesc const* in, PluginTensorDesc const* out,
    void const* const* inputs, void* const* outputs, void* stream)
{
    return runtime(plugin)->enqueue(in, out, inputs, outputs, nullptr, static_cast<cudaStream_t>(stream));
}
