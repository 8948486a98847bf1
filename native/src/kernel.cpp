// Compiled once for each instruction set: forward and backward for each form.
#include "kernel.h"

#include "backward.h"
#include "few.h"
#include "forward.h"

namespace relpos {
namespace RELPOS_ISA {

using ToeplitzAndRankOne = Sum<Toeplitz, RankOne>;

template <class Form>
static int forward(const relpos_problem& p) {
    return FewRows<Form>::takes(p) ? FewRows<Form>(p).run() : Forward<Form>(p).run();
}

static int forward(const relpos_problem& p) {
    switch (p.form) {
        case RELPOS_TOEPLITZ: return forward<Toeplitz>(p);
        case RELPOS_RANK_ONE: return forward<RankOne>(p);
        case RELPOS_SUM: return forward<ToeplitzAndRankOne>(p);
        case RELPOS_SCALED: return forward<Scaled>(p);
        default: return forward<NoBias>(p);
    }
}

template <class Form>
static int backward(const relpos_problem& p) {
    const bool fold = p.grad_table || p.grad_total || p.grad_scaled_sums;
    return fold ? Backward<Form, typename Form::Fold>(p).run() : Backward<Form, NoFold>(p).run();
}

static int backward(const relpos_problem& p) {
    switch (p.form) {
        case RELPOS_TOEPLITZ: return backward<Toeplitz>(p);
        case RELPOS_RANK_ONE: return backward<RankOne>(p);
        case RELPOS_SUM: return backward<ToeplitzAndRankOne>(p);
        case RELPOS_SCALED: return backward<Scaled>(p);
        default: return Backward<NoBias, NoFold>(p).run();
    }
}

static int64_t slots(const relpos_problem& p) { return backward_slots(p); }

const Kernel kernel = {forward, backward, slots};

}  // namespace RELPOS_ISA
}  // namespace relpos
