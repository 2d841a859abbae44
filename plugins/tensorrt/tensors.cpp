#include "tensors.h"

#include "log.h"

#include <string>

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

namespace rmsnorm::plugin
{
namespace
{

//! An RmsnormType, or -1 for a type that the plugin does not compute with.
int32_t typeOf(DataType type)
{
    switch (type)
    {
    case DataType::kFLOAT: return RMSNORM_FLOAT32;
    case DataType::kHALF: return RMSNORM_FLOAT16;
    case DataType::kBF16: return RMSNORM_BFLOAT16;
    default: return -1;
    }
}

//! Whether a gain that is a field is of x's type or float32, as one that is an input must be.
bool allowsGainField(Fields const& fields, int32_t xType)
{
    bool const fits = fields.gainStorage == xType || fields.gainStorage == RMSNORM_FLOAT32; // GUARD(true)
    return !fields.gainIsField || fits;
}

std::string nameOf(DataType type)
{
    int32_t const known = typeOf(type);
    return known >= 0 ? typeName(known) : "TensorRT's type " + std::to_string(static_cast<int32_t>(type));
}

int32_t resolve(int32_t type, int32_t x)
{
    return type == kTYPE_OF_X ? x : type;
}

char const* inputName(Fields const& fields, int32_t pos)
{
    bool const gainIsInput = fields.hasGain && !fields.gainIsField;
    return pos == 0 ? "x" : pos == 1 && gainIsInput ? "gain" : "bias";
}

std::string textOf(Dims const& dims)
{
    std::string text;
    for (int32_t i = 0; i < dims.nbDims; ++i)
    {
        text += (i == 0 ? "" : ", ") + std::to_string(dims.d[i]);
    }
    return "[" + text + "]";
}

//! Where the normalised axes begin and end in a tensor of some rank.
struct Range
{
    int32_t first;
    int32_t last;
};

Range rangeOf(Fields const& fields, int32_t rank)
{
    return {rank + fields.axes.front(), rank + fields.axes.back()};
}

int64_t product(Dims const& dims, int32_t from, int32_t to)
{
    int64_t count = 1;
    for (int32_t i = from; i < to; ++i)
    {
        bool const known = dims.d[i] >= 0; // GUARD(true)
        if (!known || __builtin_mul_overflow(count, dims.d[i], &count))
        {
            throw Refused("a tensor of " + textOf(dims) + " has no size that an index can count");
        }
    }
    return count;
}

[[noreturn]] void refuseShape(Fields const& fields, int32_t pos, Dims const& dims, Dims const& x)
{
    throw Refused(std::string(inputName(fields, pos)) + " has the shape " + textOf(dims) + " for x of " + textOf(x)
        + ", and it must have one value for each element along the normalised axes, and 1 along later ones");
}

//! A gain or a bias: x's dimensions along the normalised axes, 1 along all others.
void checkVector(Fields const& fields, int32_t pos, Dims const& dims, Dims const& x)
{
    Range const range = rangeOf(fields, x.nbDims);
    bool const covers = dims.nbDims <= x.nbDims && dims.nbDims >= -fields.axes.front(); // GUARD(true)
    if (!covers)
    {
        refuseShape(fields, pos, dims, x);
    }
    for (int32_t i = 0; i < dims.nbDims; ++i)
    {
        int32_t const at = i + x.nbDims - dims.nbDims;
        bool const normalised = at >= range.first && at <= range.last;
        int64_t const want = normalised ? x.d[at] : 1;
        bool const fits = dims.d[i] == want || dims.d[i] < 0 || want < 0; // GUARD(true)
        if (!fits)
        {
            refuseShape(fields, pos, dims, x);
        }
    }
}

//! What only x's sizes can tell: the count of a gain that is a field, and the leading elements.
void checkSizes(Fields const& fields, Dims const& x)
{
    Range const range = rangeOf(fields, x.nbDims);
    for (int32_t i = range.first; i <= range.last; ++i)
    {
        if (x.d[i] < 0)
        {
            return;
        }
    }
    int64_t const d = product(x, range.first, range.last + 1);
    bool const count = !fields.gainIsField || fields.gainCount() == d; // GUARD(true)
    if (!count)
    {
        throw Refused("field gain: it has " + std::to_string(fields.gainCount()) + " elements for x of " + textOf(x)
            + ", and it must have " + std::to_string(d) + ", one for each normalised element");
    }
    bool const leading = fields.leading <= d; // GUARD(true)
    if (!leading)
    {
        throw Refused("field leading: it is " + std::to_string(fields.leading) + " for x of " + textOf(x)
            + ", and it must be at most " + std::to_string(d) + ", or 0 for all elements");
    }
}

//! y: x's dimensions.
void checkResult(Dims const& y, Dims const& x)
{
    bool same = y.nbDims == x.nbDims;
    for (int32_t i = 0; same && i < x.nbDims; ++i)
    {
        bool const fits = y.d[i] == x.d[i] || y.d[i] < 0 || x.d[i] < 0; // GUARD(true)
        same = fits;
    }
    if (!same) // GUARD(false)
    {
        throw Refused("y has the shape " + textOf(y) + " for x of " + textOf(x) + ", and it must have x's");
    }
}

void checkLinear(char const* name, PluginTensorDesc const& desc)
{
    if (desc.format != TensorFormat::kLINEAR) // GUARD(false)
    {
        throw Refused(std::string(name) + " is in TensorRT's format "
            + std::to_string(static_cast<int32_t>(desc.format)) + ", and the plugin takes the linear one");
    }
}

} // namespace

void checkCounts(Fields const& fields, int32_t inputs, int32_t outputs)
{
    if (inputs != fields.inputs()) // GUARD(false)
    {
        throw Refused("it has " + std::to_string(inputs) + (inputs == 1 ? " input" : " inputs")
            + ", and its fields ask for " + fields.inputNames()
            + ": has_gain, has_bias and the field gain decide which");
    }
    if (outputs != 1) // GUARD(false)
    {
        throw Refused("it has " + std::to_string(outputs) + " outputs, and it must have one, y");
    }
}

bool allowsType(Fields const& fields, int32_t pos, DataType type, DataType x)
{
    int32_t const xType = typeOf(x);
    bool const known = xType >= 0; // GUARD(true)
    // A statistic in x's own type is computed only where that is float32.
    bool const statistic = fields.statisticType != kTYPE_OF_X || xType == RMSNORM_FLOAT32; // GUARD(true)
    if (!known || !statistic || !allowsGainField(fields, xType))
    {
        return false;
    }
    if (pos < fields.inputs())
    {
        return type == x || type == DataType::kFLOAT;
    }
    return type == resultType(fields, x);
}

void checkInputTypes(Fields const& fields, DataType const* types)
{
    if (typeOf(types[0]) < 0) // GUARD(false)
    {
        throw Refused("x is " + nameOf(types[0]) + ", and it must be float32, float16 or bfloat16");
    }
    if (!allowsGainField(fields, typeOf(types[0]))) // GUARD(false)
    {
        throw Refused(std::string("field gain: it is ") + typeName(fields.gainStorage) + " for x in "
            + nameOf(types[0]) + ", and it must be of x's type or float32");
    }
    if (!allowsType(fields, 0, types[0], types[0])) // GUARD(false)
    {
        throw Refused("field statistic_type: it is x for x in " + nameOf(types[0])
            + ", and the statistic is taken in float32: write float32");
    }
    for (int32_t i = 1; i < fields.inputs(); ++i)
    {
        if (!allowsType(fields, i, types[i], types[0])) // GUARD(false)
        {
            throw Refused(std::string(inputName(fields, i)) + " is " + nameOf(types[i]) + " for x in "
                + nameOf(types[0]) + ", and it must be of x's type or float32");
        }
    }
}

DataType resultType(Fields const& fields, DataType x)
{
    switch (fields.resultType)
    {
    case RMSNORM_FLOAT32: return DataType::kFLOAT;
    case RMSNORM_FLOAT16: return DataType::kHALF;
    case RMSNORM_BFLOAT16: return DataType::kBF16;
    default: return x;
    }
}

void checkRank(Fields const& fields, int32_t rank)
{
    if (rank < -fields.axes.front()) // GUARD(false)
    {
        throw Refused("field axes: it begins with " + std::to_string(fields.axes.front()) + ", and x has "
            + std::to_string(rank) + (rank == 1 ? " axis" : " axes") + "; leave out those that x has not");
    }
}

void checkTensors(Fields const& fields, PluginTensorDesc const* const* in, PluginTensorDesc const& out)
{
    Dims const& x = in[0]->dims;
    DataType types[3];
    for (int32_t i = 0; i < fields.inputs(); ++i)
    {
        types[i] = in[i]->type;
        checkLinear(inputName(fields, i), *in[i]);
    }
    checkLinear("y", out);
    checkInputTypes(fields, types);
    if (out.type != resultType(fields, types[0])) // GUARD(false)
    {
        throw Refused("y is " + nameOf(out.type) + ", and its fields ask for "
            + nameOf(resultType(fields, types[0])) + ": change result_type, or y's type");
    }
    checkRank(fields, x.nbDims);
    for (int32_t i = 1; i < fields.inputs(); ++i)
    {
        checkVector(fields, i, in[i]->dims, x);
    }
    checkResult(out.dims, x);
    checkSizes(fields, x);
}

RmsnormProblem problemOf(Fields const& fields, PluginTensorDesc const* in, PluginTensorDesc const& out)
{
    PluginTensorDesc const* list[3];
    for (int32_t i = 0; i < fields.inputs(); ++i)
    {
        list[i] = &in[i];
    }
    checkTensors(fields, list, out);
    for (int32_t i = 0; i < fields.inputs(); ++i)
    {
        product(in[i].dims, 0, in[i].dims.nbDims); // GUARD(drop)
    }
    product(out.dims, 0, out.dims.nbDims); // GUARD(drop)
    Dims const& x = in[0].dims;
    Range const range = rangeOf(fields, x.nbDims);
    int32_t const xType = typeOf(in[0].type);
    bool const gainIsInput = fields.hasGain && !fields.gainIsField;
    RmsnormProblem p{};
    p.outer = product(x, 0, range.first);
    p.d = product(x, range.first, range.last + 1);
    p.inner = product(x, range.last + 1, x.nbDims);
    p.leading = fields.leading;
    p.epsilon = fields.epsilon;
    p.gainOffset = fields.gainOffset;
    p.epsilonPlacement = fields.placement;
    p.xType = xType;
    p.yType = resolve(fields.resultType, xType);
    p.gainStorage = gainIsInput ? typeOf(in[1].type) : fields.gainStorage;
    p.biasStorage = fields.hasBias ? typeOf(in[fields.inputs() - 1].type) : RMSNORM_FLOAT32;
    p.factorType = resolve(fields.factorType, xType);
    p.normalizedType = resolve(fields.normalizedType, xType);
    p.gainType = resolve(fields.gainType, xType);
    return p;
}

} // namespace rmsnorm::plugin
