// A host without memory: loaded before all else, it makes `new` fail from some allocation on.
#include <cstdint>
#include <cstdlib>
#include <new>

namespace
{

int64_t gLeft = -1; // allocations until none succeeds; negative: there is memory
int64_t gFailed = 0;

} // namespace

extern "C"
{

//! Lets `count` allocations succeed and none after them; -1 gives the memory back.
void memoryFor(int64_t count)
{
    gLeft = count;
    gFailed = 0;
}

//! How many allocations failed since then.
int64_t memoryFailed()
{
    return gFailed;
}
}

void* operator new(std::size_t size)
{
    void* const memory = gLeft == 0 ? nullptr : std::malloc(size);
    gLeft -= gLeft > 0 ? 1 : 0;
    if (memory == nullptr)
    {
        ++gFailed;
        throw std::bad_alloc();
    }
    return memory;
}

void* operator new[](std::size_t size)
{
    return operator new(size);
}

void operator delete(void* memory) noexcept
{
    std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept
{
    std::free(memory);
}

void operator delete[](void* memory) noexcept
{
    std::free(memory);
}

void operator delete[](void* memory, std::size_t) noexcept
{
    std::free(memory);
}
