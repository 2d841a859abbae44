// The kernels on the CPU, in one file with the shim: a few problems of each kernel against a sum in double.
#include "cuda_shim.h"

#include "args.cpp"
#include "bfloat16.cu"
#include "check.cpp"
#include "float16.cu"
#include "float32.cu"
#include "launch.cpp"
#include "plan.cpp"

namespace
{

float widen(float value)
{
    return value;
}

template <typename T>
float widen(T value)
{
    return rmsnorm::widenOne(value);
}

//! Whether y = gain * x / rms holds within a share of each value; the share covers the roundings of the type.
template <typename T>
bool holds(RmsnormType type, int64_t outer, int64_t d, int64_t inner, double share)
{
    auto const count = static_cast<std::size_t>(outer * d * inner);
    std::vector<T> x(count + 8);
    std::vector<T> y(count + 8);
    std::vector<T> gain(static_cast<std::size_t>(d) + 8);
    unsigned state = 1;
    auto const draw = [&] {
        state = state * 1664525U + 1013904223U;
        return static_cast<float>(state >> 8) / 8388608.0F - 1.0F;
    };
    std::generate(x.begin(), x.end(), [&] { return T(draw()); });
    std::generate(gain.begin(), gain.end(), [&] { return T(draw() + 2.0F); });

    RmsnormProblem p{};
    p.x = x.data();
    p.y = y.data();
    p.gain = gain.data();
    p.outer = outer;
    p.d = d;
    p.inner = inner;
    p.epsilon = 1e-6F;
    p.xType = p.yType = p.gainStorage = p.normalizedType = p.gainType = type;
    int32_t const status = rmsnormLaunch(&p, nullptr);
    bool good = status == RMSNORM_OK;
    for (int64_t o = 0; o < outer && good; ++o)
    {
        for (int64_t i = 0; i < inner && good; ++i)
        {
            auto const at = [&](int64_t k) { return static_cast<std::size_t>((o * d + k) * inner + i); };
            double sum = 0;
            for (int64_t k = 0; k < d; ++k)
            {
                sum += static_cast<double>(widen(x[at(k)])) * widen(x[at(k)]);
            }
            double const root = std::sqrt(sum / static_cast<double>(d) + 1e-6);
            for (int64_t k = 0; k < d && good; ++k)
            {
                double const want = widen(gain[static_cast<std::size_t>(k)]) * (widen(x[at(k)]) / root);
                good = std::abs(widen(y[at(k)]) - want) <= share * std::abs(want) + 1e-6;
            }
        }
    }
    RmsnormPlan plan{};
    rmsnormPlan(&p, &plan);
    std::printf("%-4s type %d, [%lld, %lld, %lld], kernel %d, %d elements, %d accesses, %d threads, grid %lld\n",
        good ? "ok" : "BAD", type, static_cast<long long>(outer), static_cast<long long>(d),
        static_cast<long long>(inner), plan.kernel, plan.elements, plan.accesses, plan.threads,
        static_cast<long long>(plan.grid));
    return good;
}

template <typename T>
bool all(RmsnormType type, double share)
{
    bool good = true;
    for (int64_t d : {1, 7, 64, 128, 500, 1000, 2000, 4096, 10001, 20000, 70000})
    {
        good = holds<T>(type, 2, d, 1, share) && good;
    }
    for (int64_t d : {3, 96, 1024, 1100})
    {
        good = holds<T>(type, 2, d, 8, share) && good;
        good = holds<T>(type, 2, d, 5, share) && good;
    }
    return good;
}

} // namespace

int main()
{
    // Two roundings of half a unit each, and for float32 the sum's.
    bool const wide = all<float>(RMSNORM_FLOAT32, 1e-5);
    bool const half = all<__half>(RMSNORM_FLOAT16, 2.0 / 2048);
    bool const brain = all<__nv_bfloat16>(RMSNORM_BFLOAT16, 2.0 / 256);
    return wide && half && brain ? 0 : 1;
}
