// The kernels for x in float32. A file per type: they compile side by side.
#include "dispatch.cuh"

int32_t rmsnorm::launchFloat32(Args const& args, RmsnormPlan const& plan, void* stream)
{
    return launchOn<float>(args, plan, stream);
}
