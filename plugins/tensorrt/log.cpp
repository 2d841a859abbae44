#include "log.h"

#include "finder.h"

#include <atomic>
#include <cstdio>
#include <string>

namespace rmsnorm::plugin
{
namespace
{

constexpr int32_t kERROR = static_cast<int32_t>(nvinfer1::ILogger::Severity::kERROR);

std::atomic<void*> gBareFinder{nullptr};
std::atomic<void*> gVersionedFinder{nullptr};

//! Whether an object's table says what its class is: a host may be built without that.
bool namesItsClass(void* object)
{
    auto const* const* table = *static_cast<void const* const* const*>(object);
    return table[-1] != nullptr;
}

bool tell(char const* message)
{
    if (void* finder = gVersionedFinder.load())
    {
        VersionedLogger* logger = static_cast<VersionedFinder*>(finder)->findLogger();
        if (logger != nullptr)
        {
            logger->log(kERROR, message);
        }
        return logger != nullptr;
    }
    if (void* finder = gBareFinder.load())
    {
        BareLogger* logger = static_cast<BareFinder*>(finder)->findLogger();
        if (logger != nullptr)
        {
            logger->log(kERROR, message);
        }
        return logger != nullptr;
    }
    return false;
}

//! To the host's logger, or to stderr where it lends none or fails to.
void say(char const* message) noexcept
{
    try
    {
        if (tell(message))
        {
            return;
        }
    }
    catch (...)
    {
    }
    std::fprintf(stderr, "%s\n", message);
}

constexpr char const* kLINE = "rmsnorm_onnx RMSNorm: ";

} // namespace

void setFinder(void* finder) noexcept
{
    if (finder == nullptr || !namesItsClass(finder)) // GUARD(false)
    {
        return;
    }
    auto* const asked = static_cast<nvinfer1::IVersionedInterface*>(finder);
    bool const versioned = dynamic_cast<nvinfer1::v_1_0::ILoggerFinder*>(asked) != nullptr; // GUARD(true)
    gVersionedFinder = versioned ? finder : nullptr;
    gBareFinder = versioned ? nullptr : finder;
}

void logError(char const* where, char const* what) noexcept
{
    std::string message;
    try
    {
        message = std::string(kLINE) + where + ": " + what;
    }
    catch (...)
    {
        char brief[400]; // both, cut
        std::snprintf(brief, sizeof(brief), "%s%.120s: %.200s", kLINE, where, what);
        say(brief);
        return;
    }
    say(message.c_str());
}

} // namespace rmsnorm::plugin
