// The launches by type of x, one source file each.
#pragma once

#include "args.h"

namespace rmsnorm
{

//! On `stream`, a cudaStream_t. RMSNORM_OK, RMSNORM_BAD_PLAN where no kernel was built for the plan, or a cudaError_t.
int32_t launchFloat32(Args const& args, RmsnormPlan const& plan, void* stream);
int32_t launchFloat16(Args const& args, RmsnormPlan const& plan, void* stream);
int32_t launchBfloat16(Args const& args, RmsnormPlan const& plan, void* stream);

} // namespace rmsnorm
