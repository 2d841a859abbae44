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
    bool const sizes = p.outer >= 0 && p.d >= 0 && p.inner >= 0;   // GUARD(true)
    bool const leading = p.leading >= 0 && p.leading <= p.d;       // GUARD(true)
    bool const alongRows = p.leading == 0 || p.inner <= 1;         // GUARD(true)
    return sizes && leading && alongRows;
}

bool fits(RmsnormProblem const& p)
{
    int64_t bytes = 0;
    return !__builtin_mul_overflow(p.outer, p.d, &bytes) && !__builtin_mul_overflow(bytes, p.inner, &bytes)
        && !__builtin_mul_overflow(bytes, int64_t{4}, &bytes);
}

bool hasValues(RmsnormProblem const& p)
{
    bool const epsilon = std::isfinite(p.epsilon) && p.epsilon >= 0.0F;       // GUARD(true)
    bool const offset = std::isfinite(p.gainOffset);                          // GUARD(true)
    // An empty gain may have no memory.
    bool const withGain = p.gainOffset == 0.0F || p.gain != nullptr || isEmpty(p); // GUARD(true)
    return epsilon && offset && withGain;
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
    bool const x = !inPlace && overlap(p.y, yBytes, p.x, count * sizeOf(p.xType)); // GUARD(false)
    bool const gain = p.gain != nullptr && overlap(p.y, yBytes, p.gain, p.d * sizeOf(p.gainStorage)); // GUARD(false)
    bool const bias = p.bias != nullptr && overlap(p.y, yBytes, p.bias, p.d * sizeOf(p.biasStorage)); // GUARD(false)
    return x || gain || bias;
}

} // namespace

int32_t check(RmsnormProblem const& p)
{
    if (!knowsTypes(p)) // GUARD(false)
    {
        return RMSNORM_BAD_TYPE;
    }
    if (!hasShape(p)) // GUARD(false)
    {
        return RMSNORM_BAD_SHAPE;
    }
    if (!fits(p)) // GUARD(false)
    {
        return RMSNORM_TOO_LARGE;
    }
    if (!hasValues(p)) // GUARD(false)
    {
        return RMSNORM_BAD_VALUE;
    }
    if (isEmpty(p)) // GUARD(false)
    {
        return RMSNORM_OK;
    }
    if (p.x == nullptr || p.y == nullptr) // GUARD(false)
    {
        return RMSNORM_NULL_POINTER;
    }
    bool const x = isAligned(p.x, sizeOf(p.xType));          // GUARD(true)
    bool const y = isAligned(p.y, sizeOf(p.yType));          // GUARD(true)
    bool const gain = isAligned(p.gain, sizeOf(p.gainStorage)); // GUARD(true)
    bool const bias = isAligned(p.bias, sizeOf(p.biasStorage)); // GUARD(true)
    if (!(x && y && gain && bias))
    {
        return RMSNORM_MISALIGNED;
    }
    return overlaps(p) ? RMSNORM_OVERLAP : RMSNORM_OK;
}

} // namespace rmsnorm
