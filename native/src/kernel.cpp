// Compiled once for each instruction set: what the kernel does, for each form.
#include "kernel.h"

#include "backward.h"
#include "few.h"
#include "forward.h"
#include "mass.h"

namespace relpos {
namespace RELPOS_ISA {

// Whether a call can have these numbers, whatever its form.
static bool possible(const relpos_problem& p) {
    const bool known = p.dtype == RELPOS_FLOAT32 || p.dtype == RELPOS_BFLOAT16 || p.dtype == RELPOS_FLOAT16;
    const bool sized = p.head_dim >= 1 && p.head_dim <= RELPOS_MAX_DIM && p.value_dim >= 1 && p.value_dim <= RELPOS_MAX_DIM;
    const bool placed = p.start >= 0 && p.start + p.queries + RELPOS_TILE <= INT32_MAX && p.keys + RELPOS_TILE <= INT32_MAX;
    return known && sized && placed && p.threads >= 1 && 2 * p.pairs <= p.head_dim;
}

// Calls work<Form>() with the problem's form, and returns what that returns.
template <class Work>
static int with_form(const relpos_problem& p, const Work& work) {
    if (!possible(p)) return RELPOS_INVALID;
    const auto run = [&]<class Form>() { return Form::fits(p) ? work.template operator()<Form>() : RELPOS_INVALID; };
    switch (p.form) {
        case RELPOS_NONE: return run.template operator()<NoBias>();
        case RELPOS_TOEPLITZ: return run.template operator()<Toeplitz>();
        case RELPOS_RANK_ONE: return run.template operator()<RankOne>();
        case RELPOS_SUM: return run.template operator()<Sum<Toeplitz, RankOne>>();
        case RELPOS_SCALED: return run.template operator()<Scaled>();
        default: return RELPOS_INVALID;
    }
}

static int forward(const relpos_problem& p) {
    return with_form(p, [&]<class Form>() -> int {
        return FewRows<Form>::takes(p) ? FewRows<Form>(p).run() : Forward<Form>(p).run();
    });
}

static int backward(const relpos_problem& p) {
    return with_form(p, [&]<class Form>() -> int {
        if constexpr (__is_same(typename Form::Fold, NoFold)) return Backward<Form, NoFold>(p).run();
        else return Form::Fold::wanted(p) ? Backward<Form, typename Form::Fold>(p).run() : Backward<Form, NoFold>(p).run();
    });
}

static int mass(const relpos_problem& p) {
    return with_form(p, [&]<class Form>() -> int { return Mass<Form>(p).run(); });
}

static int64_t slots(const relpos_problem& p) { return backward_slots(p); }

const Kernel kernel = {forward, backward, mass, slots};

}  // namespace RELPOS_ISA
}  // namespace relpos
