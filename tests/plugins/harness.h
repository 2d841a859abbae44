/* Drives a TensorRT plugin library as TensorRT would, through its two entry points and the plugin's own methods, without
 * TensorRT: from C, or from Python by ctypes. The structs that it takes are those of NvInferRuntime.h. It calls nothing
 * of CUDA's: pointers and streams go through as they are, so they may be a GPU's, or the CPU's beside the shim.
 */
#pragma once

#include <NvInferRuntime.h>

#include <cstddef>
#include <cstdint>

#define HARNESS extern "C" __attribute__((visibility("default")))

using Creator = nvinfer1::IPluginCreatorV3One;
using Plugin = nvinfer1::IPluginV3;

//! How the host lays out the interfaces of its logger.
enum Finder : int32_t
{
    kNO_FINDER = 0,
    kBARE = 1,      // TensorRT 10
    kVERSIONED = 2, // TensorRT 11
    kNAMELESS = 3,  // built without names of classes, and any call of it ends the process
    kSILENT = 4     // TensorRT 11, without a logger
};

//! The only creator of a library, or null with a sentence in `problem`.
HARNESS Creator* harnessOpen(char const* path, Finder finder, char* problem, size_t size);

//! The lines that were logged since the last call, each with its newline; returns the length, without the end.
HARNESS size_t harnessLog(char* text, size_t size);

//! Name, version, namespace and interface, with spaces between.
HARNESS size_t harnessIdentity(Creator* creator, Plugin* plugin, char* text, size_t size);

HARNESS nvinfer1::PluginFieldCollection const* harnessFieldNames(Creator* creator);
HARNESS Plugin* harnessCreate(
    Creator* creator, char const* name, nvinfer1::PluginFieldCollection const* fields, int32_t phase);
HARNESS void harnessDestroy(Plugin* plugin);
HARNESS Plugin* harnessClone(Plugin* plugin);
HARNESS Plugin* harnessAttach(Plugin* plugin);
HARNESS nvinfer1::PluginFieldCollection const* harnessFields(Plugin* plugin);
HARNESS char const* harnessTimingId(Plugin* plugin);
HARNESS char const* harnessMetadata(Plugin* plugin);
HARNESS int32_t harnessOutputs(Plugin* plugin);
HARNESS int32_t harnessOutputTypes(
    Plugin* plugin, nvinfer1::DataType const* in, int32_t inputs, nvinfer1::DataType* out, int32_t outputs);

//! `shape` gets, for each axis of y, the input's number times 100 plus the axis that it was taken from; -1 for another.
HARNESS int32_t harnessOutputShape(
    Plugin* plugin, nvinfer1::Dims const* in, int32_t inputs, int32_t outputs, nvinfer1::Dims* shape);

//! `tensors` are the inputs, then the outputs.
HARNESS int32_t harnessSupports(Plugin* plugin, int32_t pos, nvinfer1::DynamicPluginTensorDesc const* tensors,
    int32_t inputs, int32_t outputs);
HARNESS int32_t harnessConfigure(
    Plugin* plugin, nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t outputs);
HARNESS size_t harnessWorkspace(
    Plugin* plugin, nvinfer1::DynamicPluginTensorDesc const* tensors, int32_t inputs, int32_t outputs);
HARNESS int32_t harnessShapeChange(
    Plugin* plugin, nvinfer1::PluginTensorDesc const* tensors, int32_t inputs, int32_t outputs);
HARNESS int32_t harnessEnqueue(Plugin* plugin, nvinfer1::PluginTensorDesc const* in,
    nvinfer1::PluginTensorDesc const* out, void const* const* inputs, void* const* outputs, void* stream);
