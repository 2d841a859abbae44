/* RMSNorm on CUDA: the C interface of the kernels. No CUDA header is needed to include it.
 *
 * The formula, where round_T rounds to type T (see also rmsnorm_onnx/spec.py):
 *
 *     m = mean(x * x) over `leading` elements      in float32
 *     f = 1 / sqrt(m + epsilon)      INSIDE        rounded to factorType
 *         1 / (sqrt(m) + epsilon)    OUTSIDE
 *         1 / max(sqrt(m), epsilon)  CLAMP
 *     z = round_normalizedType(x * f)
 *     w = gainOffset + round_gainType(gain)        formed in gainType
 *     p = z * w + bias                             in the wider of normalizedType and gainType
 *     y = round_yType(p)
 *
 * A row of zeros gives zeros (plus the bias), also where epsilon is 0.
 */
#ifndef RMSNORM_ONNX_RMSNORM_H
#define RMSNORM_ONNX_RMSNORM_H

#include <stdint.h>

#if defined(__GNUC__)
#define RMSNORM_API __attribute__((visibility("default")))
#else
#define RMSNORM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a struct below or the meaning of a field changes; compare with rmsnormApiVersion(). */
#define RMSNORM_API_VERSION 1

typedef enum {
    RMSNORM_FLOAT32 = 0,
    RMSNORM_FLOAT16 = 1,
    RMSNORM_BFLOAT16 = 2
} RmsnormType;

typedef enum {
    RMSNORM_INSIDE = 0,
    RMSNORM_OUTSIDE = 1,
    RMSNORM_CLAMP = 2
} RmsnormPlacement;

/* What a call returns. A positive value is a cudaError_t of the launch. */
typedef enum {
    RMSNORM_OK = 0,
    RMSNORM_BAD_TYPE = -1,      /* a type or a placement that this library does not know */
    RMSNORM_BAD_SHAPE = -2,     /* negative, a leading count beyond d, or one with inner > 1 */
    RMSNORM_TOO_LARGE = -3,     /* the number of bytes does not fit in 63 bits */
    RMSNORM_BAD_VALUE = -4,     /* epsilon negative or not finite; an offset not finite, or without a gain and not empty */
    RMSNORM_NULL_POINTER = -5,  /* x or y is null and the tensor is not empty; or an argument is null */
    RMSNORM_MISALIGNED = -6,    /* a pointer is not a multiple of its element's size */
    RMSNORM_OVERLAP = -7,       /* y overlaps an input, other than being x itself in x's type */
    RMSNORM_BAD_PLAN = -8       /* a plan that does not fit the problem, or that no kernel was built for */
} RmsnormStatus;

/* One norm over a dense tensor [outer, d, inner], along d. Trailing axes have inner = 1. Pointers are the device's. */
typedef struct {
    const void* x;
    void* y;          /* of x's shape; may be x where the types agree */
    const void* gain; /* [d], or null */
    const void* bias; /* [d], or null */
    int64_t outer;
    int64_t d;
    int64_t inner;
    int64_t leading; /* the statistic is that of the first `leading` elements of a row; 0 means d; inner = 1 only */
    float epsilon;
    float gainOffset;
    int32_t epsilonPlacement; /* RmsnormPlacement; those below are RmsnormType */
    int32_t xType;
    int32_t yType;          /* the spec's result_type */
    int32_t gainStorage;    /* what gain points to */
    int32_t biasStorage;    /* what bias points to */
    int32_t factorType;     /* 1 / rms is rounded to it */
    int32_t normalizedType; /* x / rms is rounded to it */
    int32_t gainType;       /* offset + gain is formed in it */
} RmsnormProblem;

typedef enum {
    RMSNORM_NOTHING = 0,        /* an empty tensor: no launch */
    RMSNORM_WARP_ROWS = 1,      /* one or more rows per warp, held in registers */
    RMSNORM_BLOCK_ROW = 2,      /* a block of several warps per row, held in registers */
    RMSNORM_RELOAD_ROW = 3,     /* a block per row, which is read twice */
    RMSNORM_COLUMNS = 4,        /* inner > 1: a block per tile of neighbouring columns, held in registers */
    RMSNORM_RELOAD_COLUMNS = 5  /* the same, read twice */
} RmsnormKernel;

/* How a problem is computed. */
typedef struct {
    int32_t kernel;   /* RmsnormKernel */
    int32_t elements; /* per access to x: 16 bytes' worth, or 1 */
    int32_t accesses; /* of one thread to one row (column), all in flight at once */
    int32_t rows;     /* that a thread holds at once */
    int32_t lanes;    /* threads side by side: on one row, or on one tile's width of columns */
    int32_t threads;  /* per block */
    int64_t grid;     /* blocks of a launch; where that is not all of them, further launches follow */
} RmsnormPlan;

/* Chooses a plan. Pure: nothing is launched or read through a pointer; only alignments are looked at. */
RMSNORM_API int32_t rmsnormPlan(const RmsnormProblem* problem, RmsnormPlan* plan);

/* Plans and launches on a stream (a cudaStream_t; null is the default one). Allocates nothing, waits for nothing, needs
 * no workspace: the launch can be captured into a CUDA graph. Errors of the execution surface later, as with any
 * kernel. */
RMSNORM_API int32_t rmsnormLaunch(const RmsnormProblem* problem, void* stream);

/* Launches with a given plan: for tests and for tuning. A plan that does not cover the problem is RMSNORM_BAD_PLAN. */
RMSNORM_API int32_t rmsnormLaunchPlan(const RmsnormProblem* problem, const RmsnormPlan* plan, void* stream);

/* One sentence for a returned value, never null. */
RMSNORM_API const char* rmsnormStatusString(int32_t status);

RMSNORM_API int32_t rmsnormApiVersion(void);

#ifdef __cplusplus
}
#endif

#endif
