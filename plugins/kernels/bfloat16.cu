// The kernels for x in bfloat16. A file per type: they compile side by side.
#include "dispatch.cuh"

int32_t rmsnorm::launchBfloat16(Args const& args, RmsnormPlan const& plan, void* stream)
{
    return launchOn<__nv_bfloat16>(args, plan, stream);
}
