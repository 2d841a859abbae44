// Tensors beside the fields: whether TensorRT's types and shapes fit the norm, and the launch that they make.
#pragma once

#include "fields.h"
#include "rmsnorm.h"

#include <NvInferRuntime.h>

namespace rmsnorm::plugin
{

//! \throws Refused where the counts are not those that the fields ask for.
void checkCounts(Fields const& fields, int32_t inputs, int32_t outputs);

//! Whether the type of tensor `pos` (inputs first, then the output) fits those before it.
bool allowsType(Fields const& fields, int32_t pos, nvinfer1::DataType type, nvinfer1::DataType x);

//! \throws Refused where an input's type, or that of a gain that is a field, is none that the plugin computes with.
void checkInputTypes(Fields const& fields, nvinfer1::DataType const* types);

//! y's type.
nvinfer1::DataType resultType(Fields const& fields, nvinfer1::DataType x);

//! \throws Refused where x has fewer axes than the fields speak of.
void checkRank(Fields const& fields, int32_t rank);

//! Dimensions of -1 are not known yet and fit anything.
//!
//! \throws Refused where types, formats or shapes do not fit.
void checkTensors(Fields const& fields, nvinfer1::PluginTensorDesc const* const* in, nvinfer1::PluginTensorDesc const& out);

//! The launch, without its pointers.
//!
//! \throws Refused as checkTensors() does, and where a dimension is not known.
RmsnormProblem problemOf(
    Fields const& fields, nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const& out);

} // namespace rmsnorm::plugin
