// What a kernel is told: a problem and its plan, with everything that is the same for all rows worked out on the host.
#pragma once

#include "rmsnorm.h"

namespace rmsnorm
{

struct Args
{
    void const* x;
    void* y;
    void const* gain;
    void const* bias;
    int64_t rows;       // or columns: the number of statistics
    int64_t firstBlock; // the number of the launch's first block, where more are needed than a grid may have
    int64_t d;
    int64_t inner;
    int64_t leading;
    double inverseInner; // 1 / inner
    float inverseCount;  // 1 / leading
    float epsilon;
    float gainOffset; // -0 where there is none, the one number that changes no gain when added, zeros included
    int32_t yType;
    int32_t gainStorage;
    int32_t biasStorage;
    int32_t placement;
    int32_t factorType;
    int32_t normalizedType;
    int32_t gainType;
    int32_t productType;
    int32_t lanesLog2;
    uint32_t zero;     // see forget()
    bool hasOffset;
    bool protectZeros; // 1 / rms of a row of zeros is infinite
    bool plain;        // see finishPlain
};

Args makeArgs(RmsnormProblem const& problem, RmsnormPlan const& plan);

} // namespace rmsnorm
