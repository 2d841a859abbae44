// The kernels for x in float16. A file per type: they compile side by side.
#include "dispatch.cuh"

int32_t rmsnorm::launchFloat16(Args const& args, RmsnormPlan const& plan, void* stream)
{
    return launchOn<__half>(args, plan, stream);
}
