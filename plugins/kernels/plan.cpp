// Which kernel, and how the work is split: one pure function, so that a test can print and pin the whole table.
//
// The figures are for an H200: 132 SMs, about 4.3 TB/s of reads and writes together, so 16 bytes read and 16 written
// per SM and nanosecond. With a latency near 1 us under load, an SM has to keep 16 KiB of reads in flight, and more to
// cover the time in which a row is reduced and written. The plans of 16-byte accesses that hold their rows have 64 to
// 128 KiB of x in an SM's registers.
#include "check.h"

#include <algorithm>

namespace rmsnorm
{
namespace
{

constexpr int64_t kMAX_GRID = 2147483647; // of a grid's x
constexpr int kWARP_THREADS = 128;        // of a block whose warps work alone
constexpr int64_t kFEW_WARPS = 1024;      // fewer do not fill the device: one-warp blocks spread them over the SMs
constexpr int kRELOAD_THREADS = 1024;     // one row per SM at a time, so that all rows being read again stay in the L2

constexpr int kCOLUMN_LANES = 8;          // times 16 bytes: one line of 128 bytes per channel

int64_t ceilDiv(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

//! The least power of two that is not below a number; at most 1,024, a block's threads.
int powerOfTwo(int64_t atLeast)
{
    int power = 1;
    while (power < atLeast && power < 1024)
    {
        power *= 2;
    }
    return power;
}

bool on16Bytes(void const* pointer)
{
    return reinterpret_cast<uintptr_t>(pointer) % kACCESS_BYTES == 0;
}

//! Elements per access: 16 bytes' worth where every address allows it, else 1.
int elementsPerAccess(RmsnormProblem const& p)
{
    int const wide = static_cast<int>(kACCESS_BYTES / sizeOf(p.xType));
    int64_t const contiguous = p.inner == 1 ? p.d : p.inner;
    bool const whole = contiguous % wide == 0; // GUARD(true)
    bool const x = on16Bytes(p.x); // GUARD(true)
    bool const y = on16Bytes(p.y); // GUARD(true)
    // Along columns the gain and the bias are read one value at a time.
    bool const gain = on16Bytes(p.gain) || p.inner != 1; // GUARD(true)
    bool const bias = on16Bytes(p.bias) || p.inner != 1; // GUARD(true)
    return whole && x && y && gain && bias ? wide : 1;
}

struct Split
{
    int64_t upTo; // accesses of a whole row
    RmsnormKernel kernel;
    int accesses;
    int rows;
};

// Short rows: one access a row leaves a thread with too little in flight, so it takes several rows at once, which also
// share one read of the gain. A warp per row needs no barrier at all; beyond 8 accesses a thread would hold more than
// 32 registers of x. Blocks hold 4 accesses a thread while 512 threads suffice, 8 beyond: larger blocks would leave an
// SM with one row at a time, and nothing to read while that one is reduced and written.
constexpr Split kWIDE_ROWS[] = {
    {32, RMSNORM_WARP_ROWS, 1, 4},
    {64, RMSNORM_WARP_ROWS, 2, 2},
    {128, RMSNORM_WARP_ROWS, 4, 1},
    {256, RMSNORM_WARP_ROWS, 8, 1},
    {2048, RMSNORM_BLOCK_ROW, 4, 1},
    {8192, RMSNORM_BLOCK_ROW, 8, 1},
};

// One element an access: not meant to be fast, only right, so there are few kernels of it.
constexpr Split kSINGLE_ROWS[] = {
    {32, RMSNORM_WARP_ROWS, 1, 4},
    {256, RMSNORM_WARP_ROWS, 8, 1},
    {8192, RMSNORM_BLOCK_ROW, 8, 1},
};

template <int COUNT>
Split const* choose(Split const (&table)[COUNT], int64_t accesses)
{
    auto const* found = std::find_if(table, table + COUNT, [&](Split const& s) { return accesses <= s.upTo; });
    return found == table + COUNT ? nullptr : found;
}

void planRows(RmsnormProblem const& p, RmsnormPlan& plan)
{
    int64_t const total = ceilDiv(p.d, plan.elements);
    Split const* split = plan.elements == 1 ? choose(kSINGLE_ROWS, total) : choose(kWIDE_ROWS, total);
    if (split == nullptr)
    {
        plan.kernel = RMSNORM_RELOAD_ROW;
        plan.accesses = 4;
        plan.lanes = plan.threads = kRELOAD_THREADS;
        return;
    }
    plan.kernel = split->kernel;
    plan.accesses = split->accesses;
    plan.rows = split->rows;
    if (split->kernel == RMSNORM_BLOCK_ROW)
    {
        plan.lanes = plan.threads = static_cast<int>(ceilDiv(total, kWARP * split->accesses)) * kWARP;
        return;
    }
    plan.lanes = std::min(powerOfTwo(total), kWARP);
    int64_t const rowsOfWarp = kWARP / plan.lanes * plan.rows;
    int64_t const warps = ceilDiv(p.outer, rowsOfWarp);
    plan.threads = warps <= kFEW_WARPS ? kWARP : kWARP_THREADS;
}

// Neighbouring threads take neighbouring columns, so that a warp reads whole lines, and the d elements of a column are
// dealt to slices of the block. A thread takes 8 accesses: the smaller the block, the more of them share an SM, and the
// others read while one takes its statistic.
void planColumns(RmsnormProblem const& p, RmsnormPlan& plan)
{
    plan.lanes = plan.elements > 1 ? kCOLUMN_LANES : kWARP;
    int const fewest = 128 / plan.lanes;
    int const most = 512 / plan.lanes;
    plan.kernel = RMSNORM_COLUMNS;
    plan.accesses = 8;
    int const slices = std::min(std::max(powerOfTwo(ceilDiv(p.d, plan.accesses)), fewest), most);
    if (p.d > int64_t{slices} * plan.accesses)
    {
        plan.kernel = RMSNORM_RELOAD_COLUMNS;
        plan.accesses = 4;
    }
    plan.threads = slices * plan.lanes;
}

} // namespace

int64_t blocksOf(RmsnormProblem const& p, RmsnormPlan const& plan)
{
    switch (plan.kernel)
    {
    case RMSNORM_WARP_ROWS:
        return ceilDiv(p.outer, int64_t{plan.threads / kWARP} * (kWARP / plan.lanes) * plan.rows);
    case RMSNORM_BLOCK_ROW:
    case RMSNORM_RELOAD_ROW: return p.outer;
    default: return ceilDiv(p.outer * p.inner, int64_t{plan.lanes} * plan.elements);
    }
}

int32_t checkPlan(RmsnormProblem const& p, RmsnormPlan const& plan)
{
    bool const byColumns = plan.kernel == RMSNORM_COLUMNS || plan.kernel == RMSNORM_RELOAD_COLUMNS;
    bool const inWarp = plan.kernel == RMSNORM_WARP_ROWS;
    bool const kept = plan.kernel != RMSNORM_RELOAD_ROW && plan.kernel != RMSNORM_RELOAD_COLUMNS;
    int const columnLanes = plan.elements > 1 ? kCOLUMN_LANES : kWARP;
    bool const warpLanes = plan.lanes >= 1 && plan.lanes <= kWARP && plan.lanes == powerOfTwo(plan.lanes);
    bool const elements = plan.elements == 1 || plan.elements == elementsPerAccess(p);                  // GUARD(true)
    bool const axis = byColumns == (p.inner > 1);                                                       // GUARD(true)
    bool const grid = plan.grid >= 1 && plan.grid <= kMAX_GRID;                                         // GUARD(true)
    bool const threads = plan.threads >= kWARP && plan.threads <= 1024 && plan.threads % kWARP == 0;    // GUARD(true)
    bool const lanes = inWarp ? warpLanes : plan.lanes == (byColumns ? columnLanes : plan.threads);     // GUARD(true)
    bool const accesses = plan.accesses >= 1 && plan.accesses <= 8;
    if (!(elements && axis && grid && threads && lanes && accesses))
    {
        return RMSNORM_BAD_PLAN;
    }
    int64_t const together = byColumns ? plan.threads / plan.lanes : int64_t{plan.lanes} * plan.elements;
    bool const covers = !kept || together * plan.accesses >= p.d; // GUARD(true)
    return covers ? RMSNORM_OK : RMSNORM_BAD_PLAN;
}

} // namespace rmsnorm

int32_t rmsnormPlan(RmsnormProblem const* problem, RmsnormPlan* plan)
{
    using namespace rmsnorm;
    if (problem == nullptr || plan == nullptr)
    {
        return RMSNORM_NULL_POINTER;
    }
    *plan = RmsnormPlan{};
    int32_t const status = check(*problem);
    if (status != RMSNORM_OK || isEmpty(*problem))
    {
        return status;
    }
    plan->elements = elementsPerAccess(*problem);
    plan->rows = 1;
    problem->inner == 1 ? planRows(*problem, *plan) : planColumns(*problem, *plan);
    plan->grid = std::min(blocksOf(*problem, *plan), kMAX_GRID);
    return RMSNORM_OK;
}
