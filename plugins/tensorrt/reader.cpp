#include "reader.h"

#include "log.h"

#include <cstdio>
#include <cstring>

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

namespace rmsnorm::plugin
{
namespace
{

constexpr char const* kKINDS[] = {"FLOAT16", "FLOAT32", "FLOAT64", "INT8", "INT16", "INT32", "CHAR", "DIMS", "UNKNOWN",
    "BF16", "INT64", "FP8", "INT4", "FP4"}; // by PluginFieldType
constexpr int32_t kKIND_COUNT = sizeof(kKINDS) / sizeof(kKINDS[0]);

bool isInteger(PluginField const& field)
{
    return field.type == PluginFieldType::kINT32 || field.type == PluginFieldType::kINT64;
}

int64_t valueAt(PluginField const& field, int32_t i)
{
    return field.type == PluginFieldType::kINT32 ? static_cast<int32_t const*>(field.data)[i]
                                                 : static_cast<int64_t const*>(field.data)[i];
}

std::string kindOf(PluginField const& field)
{
    auto const kind = static_cast<int32_t>(field.type);
    std::string const name = kind >= 0 && kind < kKIND_COUNT ? kKINDS[kind] : std::to_string(kind);
    return name + "[" + std::to_string(field.length) + "]";
}

std::string hexadecimal(float value)
{
    char text[32];
    std::snprintf(text, sizeof(text), "%a", static_cast<double>(value));
    return text;
}

//! FNV-1a.
std::string digest(uint8_t const* bytes, std::size_t count)
{
    uint64_t hash = 14695981039346656037ULL;
    for (std::size_t i = 0; i < count; ++i)
    {
        hash = (hash ^ bytes[i]) * 1099511628211ULL;
    }
    char text[17];
    std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

} // namespace

Reader::Reader(PluginFieldCollection const& given, PluginFieldCollection const& known)
    : mGiven(given)
{
    bool const list = given.nbFields == 0 || given.fields != nullptr; // GUARD(true)
    require(list, "axes", "it is missing, as is the whole list of fields");
    std::string names;
    for (int32_t i = 0; i < known.nbFields; ++i)
    {
        names += (i == 0 ? "" : ", ") + std::string(known.fields[i].name);
    }
    for (int32_t i = 0; i < given.nbFields; ++i)
    {
        std::string const name = given.fields[i].name == nullptr ? "" : given.fields[i].name;
        bool isKnown = false;
        for (int32_t k = 0; k < known.nbFields; ++k)
        {
            isKnown = isKnown || name == known.fields[k].name;
        }
        require(isKnown, name.c_str(), "it is unknown; the fields are " + names);
        require(find(name.c_str()) == &given.fields[i], name.c_str(), "it is given twice; give it once");
    }
}

PluginField const* Reader::find(char const* name) const
{
    for (int32_t i = 0; i < mGiven.nbFields; ++i)
    {
        if (mGiven.fields[i].name != nullptr && std::strcmp(mGiven.fields[i].name, name) == 0)
        {
            return &mGiven.fields[i];
        }
    }
    return nullptr;
}

PluginField const& Reader::get(char const* name, char const* wanted) const
{
    PluginField const* const field = find(name);
    require(field != nullptr, name, std::string("it is missing; write it as ") + wanted);
    bool const filled = field->length == 0 || field->data != nullptr; // GUARD(true)
    require(filled, name, std::string("it has no data; write it as ") + wanted);
    return *field;
}

std::vector<int64_t> Reader::ints(char const* name) const
{
    constexpr char const* kWANTED = "a list of integers (INT32 or INT64)";
    PluginField const& field = get(name, kWANTED);
    if (!isInteger(field) || field.length < 0) // GUARD(false)
    {
        refuseType(name, field, kWANTED);
    }
    std::vector<int64_t> values;
    for (int32_t i = 0; i < field.length; ++i)
    {
        values.push_back(valueAt(field, i));
    }
    return values;
}

int64_t Reader::integer(char const* name) const
{
    constexpr char const* kWANTED = "one integer (INT32 or INT64)";
    PluginField const& field = get(name, kWANTED);
    if (!isInteger(field) || field.length != 1) // GUARD(false)
    {
        refuseType(name, field, kWANTED);
    }
    return valueAt(field, 0);
}

bool Reader::boolean(char const* name) const
{
    int64_t const value = integer(name);
    bool const known = value == 0 || value == 1; // GUARD(true)
    require(known, name, "it is " + std::to_string(value) + ", and it must be 0 or 1");
    return value == 1;
}

float Reader::number(char const* name) const
{
    constexpr char const* kWANTED = "one float (FLOAT32), such as 1.0 and not 1";
    PluginField const& field = get(name, kWANTED);
    if (field.type != PluginFieldType::kFLOAT32 || field.length != 1) // GUARD(false)
    {
        refuseType(name, field, kWANTED);
    }
    return *static_cast<float const*>(field.data);
}

std::string Reader::string(char const* name) const
{
    constexpr char const* kWANTED = "a string (CHAR)";
    PluginField const& field = get(name, kWANTED);
    if (field.type != PluginFieldType::kCHAR || field.length < 1) // GUARD(false)
    {
        refuseType(name, field, kWANTED);
    }
    std::string value(static_cast<char const*>(field.data), static_cast<std::size_t>(field.length));
    if (value.back() == '\0') // the ONNX parser's strings have it, others' need not
    {
        value.pop_back();
    }
    return value;
}

int32_t Reader::choice(char const* name, char const* const* choices, int32_t count) const
{
    std::string const value = string(name);
    std::string all;
    for (int32_t i = 0; i < count; ++i)
    {
        if (value == choices[i])
        {
            return i;
        }
        all += (i == 0 ? "" : i + 1 == count ? " or " : ", ") + std::string(choices[i]);
    }
    require(false, name, "it is \"" + std::string(value.c_str()) + "\", and it must be " + all);
    return -1;
}

void Reader::require(bool holds, char const* name, std::string const& sentence) const
{
    if (!holds)
    {
        throw Refused(std::string("field ") + name + ": " + sentence);
    }
}

void Reader::refuseType(char const* name, PluginField const& field, char const* wanted) const
{
    throw Refused(std::string("field ") + name + ": it is " + kindOf(field) + "; write it as " + wanted);
}

std::string describeField(PluginField const& field)
{
    std::string text = std::string(field.name) + "=";
    switch (field.type)
    {
    case PluginFieldType::kCHAR: return text + static_cast<char const*>(field.data);
    case PluginFieldType::kINT32:
        for (int32_t i = 0; i < field.length; ++i)
        {
            text += (i == 0 ? "" : ",") + std::to_string(valueAt(field, i));
        }
        return text;
    default: break;
    }
    if (field.type == PluginFieldType::kFLOAT32 && field.length == 1 && std::strcmp(field.name, "gain") != 0)
    {
        return text + hexadecimal(*static_cast<float const*>(field.data));
    }
    auto const bytes = static_cast<std::size_t>(field.length) * (field.type == PluginFieldType::kFLOAT32 ? 4 : 2);
    return text + kindOf(field) + ":" + digest(static_cast<uint8_t const*>(field.data), bytes);
}

} // namespace rmsnorm::plugin
