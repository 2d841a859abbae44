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

//! Which guard is left out, in a library whose guards can be switched; 0 for none.
void shimAbsentGuard(int32_t number)
{
    shim::absentGuard = number;
}
}
