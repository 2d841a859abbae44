// The plugin's fields: what a norm is, as one node of a model says it. The names are those of rmsnorm_onnx/spec.py.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace rmsnorm::plugin
{

//! Beside the values of RmsnormType: x's own type, whatever it is.
constexpr int32_t kTYPE_OF_X = 3;

//! One norm. The types are RmsnormType or kTYPE_OF_X.
struct Fields
{
    std::vector<int32_t> axes; // negative, ascending: trailing axes, or one inner axis
    float epsilon;
    int32_t placement; // RmsnormPlacement
    int32_t leading;   // 0: all elements
    bool hasGain;
    float gainOffset;
    bool hasBias;
    int32_t statisticType; // float32, or x's own where that is float32
    int32_t factorType;
    int32_t normalizedType;
    int32_t gainType;
    int32_t resultType;
    bool gainIsField = false;
    int32_t gainStorage = 0;     // RmsnormType of the bytes below
    std::vector<uint8_t> gain;   // where it is a field

    //! x, and the gain and the bias where they are inputs.
    int32_t inputs() const
    {
        return 1 + (hasGain && !gainIsField ? 1 : 0) + (hasBias ? 1 : 0);
    }

    int64_t gainCount() const;

    //! The inputs by name: "x, gain, bias".
    std::string inputNames() const;
};

//! All fields by name, with the type that each is declared with.
nvinfer1::PluginFieldCollection const& fieldNames();

//! Reads the fields of a node, or those of fieldsOf().
//!
//! \throws Refused where a field is missing, of another type or out of its range, unknown, or given twice.
Fields readFields(nvinfer1::PluginFieldCollection const& collection);

//! Fields in the form in which TensorRT stores them; readFields() of it gives the same fields.
class StoredFields
{
public:
    explicit StoredFields(Fields const& fields);
    StoredFields(StoredFields const&) = delete;
    StoredFields& operator=(StoredFields const&) = delete;

    nvinfer1::PluginFieldCollection const& collection() const
    {
        return mCollection;
    }

private:
    void add(char const* name, nvinfer1::PluginFieldType type, void const* data, int32_t length);
    void addString(char const* name, char const* value);

    Fields mFields;
    int32_t mHasGain;
    int32_t mHasBias;
    std::vector<nvinfer1::PluginField> mList;
    nvinfer1::PluginFieldCollection mCollection;
};

//! A line that is the same for equal fields and for no others; a gain's numbers stand in it as a digest.
std::string describe(Fields const& fields);

//! "float32", "x" and so on; `type` as in Fields.
char const* typeName(int32_t type);

} // namespace rmsnorm::plugin
