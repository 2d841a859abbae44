// What the host side of the kernels shares: sizes of types, and whether a problem makes sense.
#pragma once

#include "rmsnorm.h"

namespace rmsnorm
{

constexpr int kACCESS_BYTES = 16; // the widest load of one thread
constexpr int kWARP = 32;

inline bool isType(int32_t type)
{
    return type == RMSNORM_FLOAT32 || type == RMSNORM_FLOAT16 || type == RMSNORM_BFLOAT16;
}

inline int64_t sizeOf(int32_t type)
{
    return type == RMSNORM_FLOAT32 ? 4 : 2;
}

inline bool isEmpty(RmsnormProblem const& p)
{
    return p.outer == 0 || p.d == 0 || p.inner == 0;
}

//! RMSNORM_OK, or the first thing that is wrong with a problem.
int32_t check(RmsnormProblem const& problem);

//! How many blocks a plan takes, all launches together.
int64_t blocksOf(RmsnormProblem const& problem, RmsnormPlan const& plan);

//! RMSNORM_OK where a plan covers a problem that passed check(), RMSNORM_BAD_PLAN otherwise.
int32_t checkPlan(RmsnormProblem const& problem, RmsnormPlan const& plan);

} // namespace rmsnorm
