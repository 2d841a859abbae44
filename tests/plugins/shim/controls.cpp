// What a test may tell the shim.
#include "cuda_shim.h"

extern "C"
{

//! Runs the warps of a block from the last to the first.
void shimDescending(int32_t yes)
{
    shim::descending = yes != 0;
}

//! Makes the next launch return an error.
void shimFailNext(int32_t code)
{
    shim::failNext = code;
}
}
