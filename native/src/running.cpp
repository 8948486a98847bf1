// Running totals that grow with every decoded token: one short loop, for which many tensor operations would take longer.
#include <math.h>

#include "api.h"

extern "C" int relpos_append(const relpos_running* r, const float* step, const float* weight, int64_t head_stride,
                             int64_t token_stride, int64_t first, int64_t tokens) {
    const float largest = 0x1p100f;  // far from overflow in the kernel
    bool fits = true;
    for (int64_t head = 0; head < r->heads; ++head) {
        float* high = r->rows + head * r->row_stride + first;
        float *low = high + r->plane_stride, *factor = low + r->plane_stride;
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t at = head * head_stride + t * token_stride;
            const double total = r->sum[head] += step[at] * r->units[head];
            high[t] = float(total);
            low[t] = float(total - high[t]);
            factor[t] = float((weight ? weight[at] : 1.0) * r->weigh[head]);
            // Not numbers compare as false.
            fits &= fabsf(high[t]) < largest && fabsf(factor[t]) < largest;
        }
    }
    return fits ? RELPOS_OK : RELPOS_INVALID;
}
