// Runs CUDA kernels on the CPU, from the source that nvcc compiles: every thread of a block is a fiber.
//
// Blocks run one after another. Within one, a warp runs until all of its lanes wait at a barrier or have ended, then
// the next; warps in ascending or descending order. What a device would leave undefined ends the process with a
// message: barriers or shuffles that not every thread reaches, at different places, or with lanes that have ended;
// addresses that are not aligned to what is read. Shared memory starts out as NaN. It finds no races beyond those that
// the two orders of warps show, and measures no time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

using std::max;
using std::min;

namespace shim
{

struct Index
{
    unsigned x = 0;
};

enum class State
{
    kREADY,
    kBARRIER,
    kSHUFFLE,
    kDONE
};

constexpr std::size_t kSTACK = 128 * 1024;

struct Fiber
{
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(kSTACK);
    State state = State::kREADY;
    int line = 0;
    int offset = 0;
    float value = 0.0F;
    Index thread;
};

struct Machine
{
    ucontext_t scheduler;
    std::vector<std::unique_ptr<Fiber>> fibers;
    Fiber* current = nullptr;
    std::function<void()> body;
    std::map<int, std::vector<char>> shared;
    Index block;
    Index blockSize;
};

inline Machine machine;
inline bool descending = false; // the order of the warps
inline int failNext = 0;        // what the next launch returns instead of running
inline int absentGuard = 0;     // the guard that a library with switched guards does without

[[noreturn]] inline void fail(char const* what, int line)
{
    std::fprintf(stderr, "shim: %s (line %d, block %u, thread %u)\n", what, line, machine.block.x,
        machine.current == nullptr ? 0U : machine.current->thread.x);
    std::abort();
}

//! Gives control back until the scheduler finds that everyone has arrived.
inline void wait(State state, int line)
{
    Fiber* const self = machine.current;
    self->state = state;
    self->line = line;
    swapcontext(&self->context, &machine.scheduler);
}

inline float shuffleXor(unsigned mask, float value, int offset, int line)
{
    if (mask != 0xffffffffU)
    {
        fail("a shuffle whose mask leaves lanes out", line);
    }
    Fiber* const self = machine.current;
    self->value = value;
    self->offset = offset;
    wait(State::kSHUFFLE, line);
    return self->value;
}

template <typename T>
T* shared(int line, int count)
{
    std::vector<char>& memory = machine.shared[line];
    if (memory.empty())
    {
        memory.assign(sizeof(T) * static_cast<std::size_t>(count), static_cast<char>(0xff));
    }
    return reinterpret_cast<T*>(memory.data());
}

template <typename P>
P* aligned(P* address)
{
    if (reinterpret_cast<std::uintptr_t>(address) % alignof(P) != 0)
    {
        fail("an access to an address that is not aligned to its size", 0);
    }
    return address;
}

inline void enter()
{
    machine.body();
    machine.current->state = State::kDONE;
    swapcontext(&machine.current->context, &machine.scheduler);
}

inline void start(Fiber& fiber)
{
    fiber.state = State::kREADY;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
}

inline Fiber& laneOf(unsigned warp, unsigned lane)
{
    return *machine.fibers[warp * 32 + lane];
}

//! Completes a shuffle that all 32 lanes have reached.
inline void exchange(unsigned warp)
{
    float values[32];
    Fiber const& first = laneOf(warp, 0);
    for (unsigned lane = 0; lane < 32; ++lane)
    {
        Fiber& fiber = laneOf(warp, lane);
        machine.current = &fiber;
        if (fiber.state != State::kSHUFFLE || fiber.line != first.line || fiber.offset != first.offset)
        {
            fail("a shuffle that not every lane of the warp takes part in", fiber.line);
        }
        values[lane] = fiber.value;
    }
    int const offset = first.offset;
    for (unsigned lane = 0; lane < 32; ++lane)
    {
        laneOf(warp, lane).value = values[lane ^ static_cast<unsigned>(offset)];
        laneOf(warp, lane).state = State::kREADY;
    }
}

//! Runs a warp until all of its lanes wait at a barrier or have ended.
inline void runWarp(unsigned warp)
{
    for (bool shuffles = true; shuffles;)
    {
        shuffles = false;
        for (unsigned lane = 0; lane < 32; ++lane)
        {
            Fiber& fiber = laneOf(warp, lane);
            if (fiber.state == State::kREADY)
            {
                machine.current = &fiber;
                swapcontext(&machine.scheduler, &fiber.context);
            }
            shuffles = shuffles || fiber.state == State::kSHUFFLE;
        }
        if (shuffles)
        {
            exchange(warp);
        }
    }
}

inline void runBlock(unsigned threads)
{
    machine.shared.clear();
    for (unsigned thread = 0; thread < threads; ++thread)
    {
        start(*machine.fibers[thread]);
    }
    unsigned const warps = threads / 32;
    for (bool going = true; going;)
    {
        for (unsigned i = 0; i < warps; ++i)
        {
            runWarp(descending ? warps - 1 - i : i);
        }
        Fiber const& first = *machine.fibers[0];
        going = first.state != State::kDONE;
        for (unsigned thread = 0; thread < threads; ++thread)
        {
            Fiber& fiber = *machine.fibers[thread];
            machine.current = &fiber;
            bool const together = fiber.state == (going ? State::kBARRIER : State::kDONE);
            if (!together || (going && fiber.line != first.line))
            {
                fail("a barrier that not every thread of the block reaches", fiber.line);
            }
        }
        for (unsigned thread = 0; thread < threads && going; ++thread)
        {
            machine.fibers[thread]->state = State::kREADY;
        }
    }
}

template <typename Args>
int32_t launch(void (*kernel)(Args), int64_t grid, int32_t threads, Args const& args)
{
    if (failNext != 0)
    {
        return std::exchange(failNext, 0);
    }
    if (grid < 1 || grid > INT32_MAX || threads < 32 || threads > 1024 || threads % 32 != 0)
    {
        fail("a launch with a grid or a block that no device takes, or with a broken warp", 0);
    }
    while (machine.fibers.size() < static_cast<std::size_t>(threads))
    {
        machine.fibers.push_back(std::make_unique<Fiber>());
        machine.fibers.back()->thread.x = static_cast<unsigned>(machine.fibers.size()) - 1;
    }
    machine.body = [&] { kernel(args); };
    machine.blockSize.x = static_cast<unsigned>(threads);
    for (machine.block.x = 0; machine.block.x < static_cast<unsigned>(grid); ++machine.block.x)
    {
        runBlock(static_cast<unsigned>(threads));
    }
    return 0;
}

} // namespace shim

#define __launch_bounds__(...)
#define cudaGetErrorString(code) "an error of the shim's"
#define threadIdx (shim::machine.current->thread)
#define blockIdx (shim::machine.block)
#define blockDim (shim::machine.blockSize)
#define __syncthreads() shim::wait(shim::State::kBARRIER, __LINE__)
#define __shfl_xor_sync(mask, value, offset) shim::shuffleXor(mask, value, offset, __LINE__)
#define RMSNORM_SHARED(type, name, count) type* const name = shim::shared<type>(__LINE__, count)

template <typename P>
P __ldcs(P const* address)
{
    return *shim::aligned(address);
}

template <typename P>
P __ldg(P const* address)
{
    return *shim::aligned(address);
}

namespace rmsnorm
{

template <typename P>
P loadPlain(P const* address)
{
    return *shim::aligned(address);
}

template <typename P>
void storePlain(P* address, P const& value)
{
    *shim::aligned(address) = value;
}

template <typename Args>
int32_t launchKernel(void (*kernel)(Args), int64_t grid, int32_t threads, void*, Args const& args)
{
    return shim::launch(kernel, grid, threads, args);
}

} // namespace rmsnorm
