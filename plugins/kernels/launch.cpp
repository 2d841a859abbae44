// The C interface: check, plan, launch.
#include "launch.h"

#include "check.h"

#include <algorithm>
#include <cuda_runtime_api.h>

namespace
{

int32_t launchOnce(int32_t xType, rmsnorm::Args const& args, RmsnormPlan const& plan, void* stream)
{
    switch (xType)
    {
    case RMSNORM_FLOAT32: return rmsnorm::launchFloat32(args, plan, stream);
    case RMSNORM_FLOAT16: return rmsnorm::launchFloat16(args, plan, stream);
    default: return rmsnorm::launchBfloat16(args, plan, stream);
    }
}

} // namespace

int32_t rmsnormLaunchPlan(RmsnormProblem const* problem, RmsnormPlan const* plan, void* stream)
{
    using namespace rmsnorm;
    if (problem == nullptr || plan == nullptr)
    {
        return RMSNORM_NULL_POINTER;
    }
    int32_t status = check(*problem);
    if (status != RMSNORM_OK || isEmpty(*problem))
    {
        return status;
    }
    status = checkPlan(*problem, *plan);
    if (status != RMSNORM_OK)
    {
        return status;
    }
    Args args = makeArgs(*problem, *plan);
    RmsnormPlan piece = *plan;
    int64_t const blocks = blocksOf(*problem, *plan);
    for (; status == RMSNORM_OK && args.firstBlock < blocks; args.firstBlock += plan->grid)
    {
        piece.grid = std::min(plan->grid, blocks - args.firstBlock);
        status = launchOnce(problem->xType, args, piece, stream);
    }
    return status;
}

int32_t rmsnormLaunch(RmsnormProblem const* problem, void* stream)
{
    RmsnormPlan plan;
    int32_t const status = rmsnormPlan(problem, &plan);
    return status == RMSNORM_OK ? rmsnormLaunchPlan(problem, &plan, stream) : status;
}

char const* rmsnormStatusString(int32_t status)
{
    switch (status)
    {
    case RMSNORM_OK: return "done";
    case RMSNORM_BAD_TYPE: return "a type or an epsilon placement is unknown; use RmsnormType and RmsnormPlacement";
    case RMSNORM_BAD_SHAPE:
        return "a dimension is negative, or the leading count is beyond d or given for an inner axis";
    case RMSNORM_TOO_LARGE: return "the tensor has too many bytes for a 64-bit index";
    case RMSNORM_BAD_VALUE:
        return "epsilon must be finite and not negative, the gain offset finite, and 0 without a gain";
    case RMSNORM_NULL_POINTER: return "a pointer is null where memory is needed";
    case RMSNORM_MISALIGNED: return "a pointer is not aligned to the size of its elements";
    case RMSNORM_OVERLAP: return "y overlaps an input; only y = x in x's own type is allowed";
    case RMSNORM_BAD_PLAN: return "the plan does not cover the problem, or no kernel was built for it";
    default: break;
    }
    return status > 0 ? cudaGetErrorString(static_cast<cudaError_t>(status)) : "an unknown status";
}

int32_t rmsnormApiVersion(void)
{
    return RMSNORM_API_VERSION;
}
