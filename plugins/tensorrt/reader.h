// Typed access to the fields that a host passes. Each refusal names the field, what it is, and what it must be.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace rmsnorm::plugin
{

class Reader
{
public:
    //! \throws Refused where a field is none of `known`, or stands twice.
    Reader(nvinfer1::PluginFieldCollection const& given, nvinfer1::PluginFieldCollection const& known);

    //! Null where the field is absent.
    nvinfer1::PluginField const* find(char const* name) const;

    // Each throws Refused where the field is missing or of another type.
    std::vector<int64_t> ints(char const* name) const;
    int64_t integer(char const* name) const;
    bool boolean(char const* name) const;
    float number(char const* name) const;
    std::string string(char const* name) const;

    //! The place of a string in a list.
    int32_t choice(char const* name, char const* const* choices, int32_t count) const;

    //! Throws Refused where `holds` is false.
    void require(bool holds, char const* name, std::string const& sentence) const;

    [[noreturn]] void refuseType(char const* name, nvinfer1::PluginField const& field, char const* wanted) const;

private:
    nvinfer1::PluginField const& get(char const* name, char const* wanted) const;

    nvinfer1::PluginFieldCollection mGiven;
};

//! "epsilon=1e-06": the name and the values, exactly; of long ones a digest.
std::string describeField(nvinfer1::PluginField const& field);

} // namespace rmsnorm::plugin
