// Chooses a build of the kernel for the CPU it runs on.
#include "api.h"

#include <pthread.h>
#include <string.h>

#include "kernel.h"

namespace relpos {

bool forked = false;

namespace {

struct Build {
    const char* isa;
    const Kernel* kernel;
    bool (*runs_here)();
};

#ifdef RELPOS_X86
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
#endif

// Best first.
const Build builds[] = {
#ifdef RELPOS_X86
    {"avx512", &avx512::kernel, has_avx512},
    {"avx2", &avx2::kernel, has_avx2},
#endif
    {"portable", &portable::kernel, [] { return true; }},
#ifdef RELPOS_WIDE
    {"wide", &wide::kernel, has_avx2},
#endif
};

const Build* best() {
#ifdef RELPOS_X86
    __builtin_cpu_init();
#endif
    for (const Build& build : builds)
        if (build.runs_here()) return &build;
    return nullptr;  // not reached: the portable build runs everywhere
}

const Build* find(const char* isa) {
    for (const Build& build : builds)
        if (!strcmp(build.isa, isa)) return &build;
    return nullptr;
}

const Build* chosen = nullptr;

__attribute__((constructor)) void start() {
    chosen = best();
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

}  // namespace
}  // namespace relpos

using namespace relpos;

extern "C" {

int relpos_forward(const relpos_problem* p) { return chosen->kernel->forward(*p); }
int relpos_backward(const relpos_problem* p) { return chosen->kernel->backward(*p); }
int64_t relpos_slots(const relpos_problem* p) { return chosen->kernel->slots(*p); }

int relpos_has(const char* isa) {
    const Build* build = find(isa);
    return build ? build->runs_here() : -1;
}
int relpos_use(const char* isa) {
    const int here = relpos_has(isa);
    if (here == 1) __atomic_store_n(&chosen, find(isa), __ATOMIC_RELEASE);
    return here;
}
const char* relpos_isa(void) { return __atomic_load_n(&chosen, __ATOMIC_ACQUIRE)->isa; }
const char* relpos_isas(void) {
    static char names[64];
    if (!*names)
        for (const Build& build : builds) strcat(strcat(names, *names ? "," : ""), build.isa);
    return names;
}
int64_t relpos_interface(void) { return RELPOS_INTERFACE; }
}
