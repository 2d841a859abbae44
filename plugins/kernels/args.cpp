#include "args.h"

#include "check.h"

#include <cmath>

namespace rmsnorm
{
namespace
{

//! The least number that rounds to infinity in a type; float32's own infinity for float32.
float overflowOf(int32_t type)
{
    switch (type)
    {
    case RMSNORM_FLOAT16: return 65520.0F;
    case RMSNORM_BFLOAT16: return 0x1.FFp127F;
    default: return HUGE_VALF;
    }
}

//! The narrowest type that holds both; the half types meet in float32.
int32_t wider(int32_t a, int32_t b)
{
    return a == b ? a : RMSNORM_FLOAT32;
}

//! Whether 1 / rms of a row of zeros is infinite, so that 0 / rms would be NaN.
bool zerosOverflow(RmsnormProblem const& p)
{
    float const root = p.epsilonPlacement == RMSNORM_INSIDE ? std::sqrt(p.epsilon) : p.epsilon;
    return 1.0F / root >= overflowOf(p.factorType);
}

//! Whether nothing is rounded between x * f and y but the normalised value, to x's type; what most models are.
bool isPlain(RmsnormProblem const& p, Args const& a)
{
    bool const shape = p.gain != nullptr && p.bias == nullptr;
    bool const y = p.yType == p.xType;                                                             // GUARD(true)
    bool const normalized = p.normalizedType == RMSNORM_FLOAT32 || p.normalizedType == p.xType;    // GUARD(true)
    bool const stored = p.gainStorage == RMSNORM_FLOAT32 || p.gainStorage == p.xType;              // GUARD(true)
    bool const gain = p.gainType == RMSNORM_FLOAT32 || (p.gainType == p.gainStorage && !a.hasOffset); // GUARD(true)
    // A product in y's own type is rounded by the rounding of y.
    bool const product = a.productType == RMSNORM_FLOAT32 || a.productType == p.yType;
    bool const zeros = !a.protectZeros; // GUARD(true)
    return shape && y && normalized && stored && gain && product && zeros;
}

int32_t log2Of(int32_t power)
{
    int32_t log = 0;
    while ((1 << log) < power)
    {
        ++log;
    }
    return log;
}

} // namespace

Args makeArgs(RmsnormProblem const& p, RmsnormPlan const& plan)
{
    Args a{};
    a.x = p.x;
    a.y = p.y;
    a.gain = p.gain;
    a.bias = p.bias;
    a.rows = p.outer * p.inner;
    a.d = p.d;
    a.inner = p.inner;
    a.leading = p.leading == 0 ? p.d : p.leading;
    a.inverseInner = 1.0 / static_cast<double>(p.inner);
    a.inverseCount = static_cast<float>(1.0 / static_cast<double>(a.leading));
    a.epsilon = p.epsilon;
    a.hasOffset = p.gainOffset != 0.0F;
    a.gainOffset = a.hasOffset ? p.gainOffset : -0.0F;
    a.yType = p.yType;
    a.gainStorage = p.gainStorage;
    a.biasStorage = p.biasStorage;
    a.placement = p.epsilonPlacement;
    a.factorType = p.factorType;
    a.normalizedType = p.normalizedType;
    a.gainType = p.gainType;
    a.productType = p.gain == nullptr ? p.normalizedType : wider(p.normalizedType, p.gainType);
    a.lanesLog2 = log2Of(plan.lanes);
    a.protectZeros = zerosOverflow(p);
    a.plain = isPlain(p, a);
    return a;
}

} // namespace rmsnorm
