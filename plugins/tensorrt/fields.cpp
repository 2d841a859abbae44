#include "fields.h"

#include "check.h"
#include "log.h"
#include "reader.h"

#include <cmath>
#include <cstring>

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

namespace rmsnorm::plugin
{
namespace
{

constexpr char const* kPLACEMENTS[] = {"inside", "outside", "clamp"}; // by RmsnormPlacement
constexpr char const* kTYPES[] = {"float32", "float16", "bfloat16", "x"}; // by RmsnormType, and kTYPE_OF_X

// A field is passed on by the parser where its name is declared; its type comes from the node. `gain` may be absent.
PluginField const kNAMES[] = {
    {"axes", nullptr, PluginFieldType::kINT32, 1},
    {"epsilon", nullptr, PluginFieldType::kFLOAT32, 1},
    {"epsilon_placement", nullptr, PluginFieldType::kCHAR, 1},
    {"leading", nullptr, PluginFieldType::kINT32, 1},
    {"has_gain", nullptr, PluginFieldType::kINT32, 1},
    {"gain_offset", nullptr, PluginFieldType::kFLOAT32, 1},
    {"has_bias", nullptr, PluginFieldType::kINT32, 1},
    {"statistic_type", nullptr, PluginFieldType::kCHAR, 1},
    {"factor_type", nullptr, PluginFieldType::kCHAR, 1},
    {"normalized_type", nullptr, PluginFieldType::kCHAR, 1},
    {"gain_type", nullptr, PluginFieldType::kCHAR, 1},
    {"result_type", nullptr, PluginFieldType::kCHAR, 1},
    {"gain", nullptr, PluginFieldType::kFLOAT32, 1},
};
constexpr int32_t kCOUNT = sizeof(kNAMES) / sizeof(kNAMES[0]);
PluginFieldCollection const kCOLLECTION{kCOUNT, kNAMES};

std::vector<int32_t> readAxes(Reader const& reader)
{
    std::vector<int32_t> axes;
    for (int64_t axis : reader.ints("axes"))
    {
        bool const negative = axis < 0 && axis >= -nvinfer1::Dims::MAX_DIMS; // GUARD(true)
        reader.require(negative, "axes",
            "it holds " + std::to_string(axis) + ", and axes are counted from the last: write -1 to -8");
        axes.push_back(static_cast<int32_t>(axis));
    }
    reader.require(!axes.empty(), "axes", "it is empty; name at least one, such as -1");
    bool adjacent = true;
    for (std::size_t i = 1; i < axes.size(); ++i)
    {
        bool const next = axes[i] == axes[i - 1] + 1; // GUARD(true)
        adjacent = adjacent && next;
    }
    bool const trailing = axes.size() == 1 || axes.back() == -1; // GUARD(true)
    reader.require(adjacent && trailing, "axes", "it must be trailing axes in ascending order, or one inner axis");
    return axes;
}

int32_t readType(Reader const& reader, char const* name)
{
    std::string const value = reader.string(name);
    reader.require(value != "float64", name, "it is float64, and TensorRT has no float64 plugins: use the form function");
    return reader.choice(name, kTYPES, 4);
}

int32_t readStatistic(Reader const& reader)
{
    int32_t const type = readType(reader, "statistic_type");
    bool const wide = type == RMSNORM_FLOAT32 || type == kTYPE_OF_X; // GUARD(true)
    reader.require(wide, "statistic_type",
        std::string("it is ") + kTYPES[type] + ", and the statistic is taken in float32: write float32");
    return type;
}

int32_t readLeading(Reader const& reader, std::vector<int32_t> const& axes)
{
    int64_t const leading = reader.integer("leading");
    bool const inRange = leading >= 0 && leading <= INT32_MAX; // GUARD(true)
    reader.require(inRange, "leading",
        "it is " + std::to_string(leading) + ", and it must be a number of elements, or 0 for all of them");
    bool const lastAxis = leading == 0 || (axes.size() == 1 && axes[0] == -1); // GUARD(true)
    reader.require(lastAxis, "leading", "it goes with the last axis alone: write axes [-1], or leading 0");
    return static_cast<int32_t>(leading);
}

void readGain(Reader const& reader, Fields& fields)
{
    PluginField const* const gain = reader.find("gain");
    if (gain == nullptr)
    {
        return;
    }
    reader.require(fields.hasGain, "gain", "it is given, and has_gain is 0: write has_gain 1, or leave it out");
    switch (gain->type)
    {
    case PluginFieldType::kFLOAT32: fields.gainStorage = RMSNORM_FLOAT32; break;
    case PluginFieldType::kFLOAT16: fields.gainStorage = RMSNORM_FLOAT16; break;
    case PluginFieldType::kBF16: fields.gainStorage = RMSNORM_BFLOAT16; break;
    default: reader.refuseType("gain", *gain, "a tensor of float32, float16 or bfloat16");
    }
    bool const filled = gain->length > 0 && gain->data != nullptr; // GUARD(true)
    reader.require(filled, "gain", "it has no elements; give one for each normalised element");
    fields.gainIsField = true;
    auto const* const bytes = static_cast<uint8_t const*>(gain->data);
    fields.gain.assign(bytes, bytes + gain->length * sizeOf(fields.gainStorage));
}

PluginFieldType storedType(int32_t type)
{
    switch (type)
    {
    case RMSNORM_FLOAT16: return PluginFieldType::kFLOAT16;
    case RMSNORM_BFLOAT16: return PluginFieldType::kBF16;
    default: return PluginFieldType::kFLOAT32;
    }
}

} // namespace

int64_t Fields::gainCount() const
{
    return static_cast<int64_t>(gain.size()) / sizeOf(gainStorage);
}

std::string Fields::inputNames() const
{
    return std::string("x") + (hasGain && !gainIsField ? ", gain" : "") + (hasBias ? ", bias" : "");
}

PluginFieldCollection const& fieldNames()
{
    return kCOLLECTION;
}

Fields readFields(PluginFieldCollection const& collection)
{
    Reader const reader(collection, kCOLLECTION);
    Fields fields;
    fields.axes = readAxes(reader);
    fields.epsilon = reader.number("epsilon");
    bool const epsilon = std::isfinite(fields.epsilon) && fields.epsilon >= 0.0F; // GUARD(true)
    reader.require(epsilon, "epsilon",
        "it is " + std::to_string(fields.epsilon) + ", and it must be finite and not negative");
    fields.placement = reader.choice("epsilon_placement", kPLACEMENTS, 3);
    fields.leading = readLeading(reader, fields.axes);
    fields.hasGain = reader.boolean("has_gain");
    fields.gainOffset = reader.number("gain_offset");
    bool const finite = std::isfinite(fields.gainOffset); // GUARD(true)
    reader.require(finite, "gain_offset",
        "it is " + std::to_string(fields.gainOffset) + ", and it must be finite");
    bool const offset = fields.gainOffset == 0.0F || fields.hasGain; // GUARD(true)
    reader.require(offset, "gain_offset", "there is no gain to add it to: write 0, or has_gain 1");
    fields.hasBias = reader.boolean("has_bias");
    fields.statisticType = readStatistic(reader);
    fields.factorType = readType(reader, "factor_type");
    fields.normalizedType = readType(reader, "normalized_type");
    fields.gainType = readType(reader, "gain_type");
    fields.resultType = readType(reader, "result_type");
    readGain(reader, fields);
    return fields;
}

StoredFields::StoredFields(Fields const& fields)
    : mFields(fields)
    , mHasGain(fields.hasGain)
    , mHasBias(fields.hasBias)
{
    mList.reserve(kCOUNT);
    add("axes", PluginFieldType::kINT32, mFields.axes.data(), static_cast<int32_t>(mFields.axes.size()));
    add("epsilon", PluginFieldType::kFLOAT32, &mFields.epsilon, 1);
    addString("epsilon_placement", kPLACEMENTS[mFields.placement]);
    add("leading", PluginFieldType::kINT32, &mFields.leading, 1);
    add("has_gain", PluginFieldType::kINT32, &mHasGain, 1);
    add("gain_offset", PluginFieldType::kFLOAT32, &mFields.gainOffset, 1);
    add("has_bias", PluginFieldType::kINT32, &mHasBias, 1);
    addString("statistic_type", kTYPES[mFields.statisticType]);
    addString("factor_type", kTYPES[mFields.factorType]);
    addString("normalized_type", kTYPES[mFields.normalizedType]);
    addString("gain_type", kTYPES[mFields.gainType]);
    addString("result_type", kTYPES[mFields.resultType]);
    if (mFields.gainIsField)
    {
        auto const count = static_cast<int32_t>(mFields.gainCount());
        add("gain", storedType(mFields.gainStorage), mFields.gain.data(), count);
    }
    mCollection = {static_cast<int32_t>(mList.size()), mList.data()};
}

void StoredFields::add(char const* name, PluginFieldType type, void const* data, int32_t length)
{
    mList.emplace_back(name, data, type, length);
}

void StoredFields::addString(char const* name, char const* value)
{
    add(name, PluginFieldType::kCHAR, value, static_cast<int32_t>(std::strlen(value)) + 1);
}

std::string describe(Fields const& fields)
{
    StoredFields const stored(fields);
    std::string line = "rmsnorm_onnx 1";
    for (int32_t i = 0; i < stored.collection().nbFields; ++i)
    {
        line += std::string(" ") + describeField(stored.collection().fields[i]);
    }
    return line;
}

char const* typeName(int32_t type)
{
    return kTYPES[type];
}

} // namespace rmsnorm::plugin
