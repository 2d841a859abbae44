// The interfaces through which a host lends its logger, as TensorRT 10 and TensorRT 11 lay them out.
//
// From 11 on both are versioned interfaces, so that the methods stand at other places of the table. The headers that this
// library was built with say nothing of the host that loads it, so both layouts are written out here, and the host's own
// name for its class decides.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>

#if NV_TENSORRT_MAJOR < 11
namespace nvinfer1::v_1_0
{

//! The name of the class in TensorRT 11.
class ILoggerFinder : public IVersionedInterface
{
public:
    virtual ILogger* findLogger() = 0;

protected:
    ~ILoggerFinder() override = default;
};

} // namespace nvinfer1::v_1_0
#endif

namespace rmsnorm::plugin
{

//! TensorRT 10.
class BareLogger
{
public:
    virtual void log(int32_t severity, char const* message) noexcept = 0;
    virtual ~BareLogger() = default;
};

class BareFinder
{
public:
    virtual BareLogger* findLogger() = 0;

protected:
    virtual ~BareFinder() = default;
};

//! TensorRT 11.
class VersionedLogger : public nvinfer1::IVersionedInterface
{
public:
    virtual void log(int32_t severity, char const* message) noexcept = 0;
};

class VersionedFinder : public nvinfer1::IVersionedInterface
{
public:
    virtual VersionedLogger* findLogger() = 0;
};

} // namespace rmsnorm::plugin
