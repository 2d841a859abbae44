// The plugin's library as CMake built it, on a machine that need not have a GPU: it loads, makes plugins and refuses.
#include "harness.h"

#include <cstdio>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace
{

int gFailed = 0;

void expect(bool holds, char const* what)
{
    if (!holds)
    {
        std::fprintf(stderr, "not so: %s\n", what);
        gFailed = 1;
    }
}

std::string log()
{
    char text[4000];
    harnessLog(text, sizeof(text));
    std::printf("%s", text);
    return text;
}

} // namespace

int main(int, char** arguments)
{
    char problem[1000] = "";
    Creator* const creator = harnessOpen(arguments[1], kVERSIONED, problem, sizeof(problem));
    if (creator == nullptr)
    {
        std::fprintf(stderr, "%s\n", problem);
        return 1;
    }
    int32_t const axis = -1;
    int32_t const zero = 0;
    int32_t const one = 1;
    float const epsilon = 1e-6F;
    float const none = 0.0F;
    std::vector<PluginField> fields{{"axes", &axis, PluginFieldType::kINT32, 1},
        {"epsilon_placement", "inside", PluginFieldType::kCHAR, 7}, {"leading", &zero, PluginFieldType::kINT32, 1},
        {"has_gain", &one, PluginFieldType::kINT32, 1}, {"gain_offset", &none, PluginFieldType::kFLOAT32, 1},
        {"has_bias", &zero, PluginFieldType::kINT32, 1}, {"statistic_type", "float32", PluginFieldType::kCHAR, 8},
        {"factor_type", "float32", PluginFieldType::kCHAR, 8}, {"normalized_type", "x", PluginFieldType::kCHAR, 2},
        {"gain_type", "x", PluginFieldType::kCHAR, 2}, {"result_type", "x", PluginFieldType::kCHAR, 2}};
    PluginFieldCollection list{static_cast<int32_t>(fields.size()), fields.data()};
    expect(harnessCreate(creator, "norm", &list, 0) == nullptr, "fields without epsilon make no plugin");
    expect(log().find("field epsilon: it is missing") != std::string::npos, "the line names epsilon");

    fields.push_back({"epsilon", &epsilon, PluginFieldType::kFLOAT32, 1});
    list = {static_cast<int32_t>(fields.size()), fields.data()};
    Plugin* const made = harnessCreate(creator, "norm", &list, 0);
    expect(made != nullptr, "good fields make a plugin");
    Plugin* const stored = harnessCreate(creator, "norm", harnessFields(made), 1);
    expect(std::string(harnessTimingId(stored)) == harnessTimingId(made), "what it stores makes the same plugin");
    Plugin* const attached = harnessAttach(stored);
    expect(attached != nullptr, "a gain that is an input needs no device");

    PluginTensorDesc const x{{2, {2, 8}}, DataType::kFLOAT, TensorFormat::kLINEAR, -1.0F};
    PluginTensorDesc const tensors[] = {x, {{1, {8}}, DataType::kFLOAT, TensorFormat::kLINEAR, -1.0F}, x};
    expect(harnessShapeChange(attached, tensors, 2, 1) == 0, "tensors that fit are taken");
    alignas(16) static float memory[64];
    void const* const inputs[] = {memory, memory + 16};
    void* const outputs[] = {memory + 32};
    // The environment hides every device: what a launch then says is CUDA's own error.
    expect(harnessEnqueue(attached, tensors, tensors + 2, inputs, outputs, nullptr) != 0, "no launch without a device");
    expect(log().find("enqueue: the launch failed: ") != std::string::npos, "the line says that the launch failed");
    for (Plugin* plugin : {attached, stored, made})
    {
        harnessDestroy(plugin);
    }
    return gFailed;
}
