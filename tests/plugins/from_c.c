/* The library as a C program sees it, on a machine that need not have a GPU. */
#include "rmsnorm.h"

#include <stdio.h>
#include <stdlib.h>

static int failed = 0;

static void expect(int holds, char const* what)
{
    if (!holds)
    {
        fprintf(stderr, "not so: %s\n", what);
        failed = 1;
    }
}

int main(void)
{
    RmsnormProblem problem = {0};
    RmsnormPlan plan = {0};
    int32_t status;
    void* memory = aligned_alloc(16, 2 * 4096 * sizeof(float));
    problem.x = memory;
    problem.y = memory;
    problem.outer = 2;
    problem.d = 4096;
    problem.inner = 1;
    problem.epsilon = 1e-6F;

    expect(rmsnormApiVersion() == RMSNORM_API_VERSION, "the library has the header's version");
    expect(rmsnormPlan(&problem, &plan) == RMSNORM_OK, "a good problem has a plan");
    expect(plan.kernel == RMSNORM_BLOCK_ROW && plan.threads == 256 && plan.grid == 2, "4096 floats: 256 threads a row");

    problem.xType = 7;
    expect(rmsnormLaunch(&problem, NULL) == RMSNORM_BAD_TYPE, "an unknown type is refused before a launch");
    problem.xType = RMSNORM_FLOAT32;
    problem.outer = 0;
    expect(rmsnormLaunch(&problem, NULL) == RMSNORM_OK, "an empty tensor needs no device");

    /* The environment hides every device: what a launch then says is CUDA's own error. */
    problem.outer = 2;
    status = rmsnormLaunch(&problem, NULL);
    printf("a launch without a device: %d, %s\n", (int) status, rmsnormStatusString(status));
    expect(status > 0, "a launch without a device is an error of CUDA's");
    free(memory);
    return failed;
}
