#include "check.h"

#include <cmath>
#include <cstdint>

namespace rmsnorm
{
namespace
{

bool knowsTypes(RmsnormProblem const& p)
{
    return isType(p.xType) && isType(p.yType) && isType(p.gainStorage) && isType(p.biasStorage) && isType(p.factorType)
        && isType(p.normalizedType) && isType(p.gainType)
        && (p.epsilonPlacement == RMSNORM_INSIDE || p.epsilonPlacement == RMSNORM_OUTSIDE
            || p.epsilonPlacement == RMSNORM_CLAMP);
}

bool hasShape(RmsnormProblem const& p)
{
    if (p.outer < 0 || p.d < 0 || p.inner < 0 || p.leading < 0 || p.leading > p.d)
    {
        return false;
    }
    return p.leading == 0 || p.inner <= 1;
}

bool fits(RmsnormProblem const& p)
{
    int64_t bytes = 0;
    return !__builtin_mul_overflow(p.outer, p.d, &bytes) && !__builtin_mul_overflow(bytes, p.inner, &bytes)
        && !__builtin_mul_overflow(bytes, int64_t{4}, &bytes);
}

bool hasValues(RmsnormProblem const& p)
{
    bool const offset = std::isfinite(p.gainOffset) && (p.gainOffset == 0.0F || p.gain != nullptr);
    return std::isfinite(p.epsilon) && p.epsilon >= 0.0F && offset;
}

bool isAligned(void const* pointer, int64_t bytes)
{
    return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

bool overlap(void const* a, int64_t aBytes, void const* b, int64_t bBytes)
{
    auto const aFirst = reinterpret_cast<uintptr_t>(a);
    auto const bFirst = reinterpret_cast<uintptr_t>(b);
    return aFirst < bFirst + static_cast<uintptr_t>(bBytes) && bFirst < aFirst + static_cast<uintptr_t>(aBytes);
}

bool overlaps(RmsnormProblem const& p)
{
    int64_t const count = p.outer * p.d * p.inner;
    int64_t const yBytes = count * sizeOf(p.yType);
    // In place is safe: every element is read for the last time by the thread that writes it.
    bool const inPlace = p.x == p.y && p.xType == p.yType;
    return (!inPlace && overlap(p.y, yBytes, p.x, count * sizeOf(p.xType)))
        || (p.gain != nullptr && overlap(p.y, yBytes, p.gain, p.d * sizeOf(p.gainStorage)))
        || (p.bias != nullptr && overlap(p.y, yBytes, p.bias, p.d * sizeOf(p.biasStorage)));
}

} // namespace

int32_t check(RmsnormProblem const& p)
{
    if (!knowsTypes(p))
    {
        return RMSNORM_BAD_TYPE;
    }
    if (!hasShape(p))
    {
        return RMSNORM_BAD_SHAPE;
    }
    if (!fits(p))
    {
        return RMSNORM_TOO_LARGE;
    }
    if (!hasValues(p))
    {
        return RMSNORM_BAD_VALUE;
    }
    if (isEmpty(p))
    {
        return RMSNORM_OK;
    }
    if (p.x == nullptr || p.y == nullptr)
    {
        return RMSNORM_NULL_POINTER;
    }
    if (!isAligned(p.x, sizeOf(p.xType)) || !isAligned(p.y, sizeOf(p.yType))
        || !isAligned(p.gain, sizeOf(p.gainStorage)) || !isAligned(p.bias, sizeOf(p.biasStorage)))
    {
        return RMSNORM_MISALIGNED;
    }
    return overlaps(p) ? RMSNORM_OVERLAP : RMSNORM_OK;
}

} // namespace rmsnorm
