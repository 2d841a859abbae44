// Errors: one line each, to the logger of whoever loaded the library, else to stderr. Nothing leaves a noexcept method.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

namespace rmsnorm::plugin
{

//! What a method of the plugin refuses: one sentence that names the thing and the mend.
class Refused : public std::runtime_error
{
public:
    using std::runtime_error::runtime_error;
};

//! Takes the host's finder of loggers, whichever TensorRT it comes from. Null, or one whose class has no name, changes nothing.
void setFinder(void* finder) noexcept;

//! Logs one error. `where` is the method or the layer. Where there is no memory for the line, both are cut.
void logError(char const* where, char const* what) noexcept;

//! The result of `body`, or `otherwise` with a line in the log where it throws.
template <typename T, typename F>
T guarded(char const* where, T otherwise, F&& body) noexcept
{
    try
    {
        return std::forward<F>(body)();
    }
    catch (std::bad_alloc const&)
    {
        logError(where, "the host is out of memory");
    }
    catch (std::exception const& problem)
    {
        logError(where, problem.what());
    }
    catch (...)
    {
        logError(where, "an exception of an unknown type");
    }
    return otherwise;
}

} // namespace rmsnorm::plugin
