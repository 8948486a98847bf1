// Chooses a build of the kernel for the CPU it runs on.
#include "api.h"

#ifndef _WIN32
#include <pthread.h>
#endif
#include <stddef.h>
#include <string.h>

#include "kernel.h"
#ifdef RELPOS_X86
#include "cpu.h"
#endif

namespace relpos {

bool forked = false;

namespace {

struct Build {
    const char* isa;
    const Kernel* kernel;
    bool (*runs_here)();
};

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
    for (const Build& build : builds)
        if (build.runs_here()) return &build;
    return nullptr;  // not reached: the portable build runs everywhere
}

const Build* find(const char* isa) {
    for (const Build& build : builds)
        if (!strcmp(build.isa, isa)) return &build;
    return nullptr;
}

// Another thread may choose while calls run: read through `current`.
const Build* chosen = nullptr;

const Build& current() { return *__atomic_load_n(&chosen, __ATOMIC_ACQUIRE); }

char names[64];  // of all builds

__attribute__((constructor)) void start() {
    __atomic_store_n(&chosen, best(), __ATOMIC_RELEASE);
    for (const Build& build : builds) strcat(strcat(names, *names ? "," : ""), build.isa);
#ifndef _WIN32  // which has no fork
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
}

const relpos_entry description[] = {
#define CONSTANT(name, value) {"constant", #name, value},
    RELPOS_CONSTANTS(CONSTANT)
#undef CONSTANT
    {"size", "relpos_problem", sizeof(relpos_problem)},
    {"size", "relpos_array", sizeof(relpos_array)},
    {"size", "relpos_totals", sizeof(relpos_totals)},
#define FIELD(type, name) {#type, #name, offsetof(relpos_problem, name)},
#include "problem.inc"
#undef FIELD
    {nullptr, nullptr, 0},
};

}  // namespace
}  // namespace relpos

using namespace relpos;

extern "C" {

int relpos_forward(const relpos_problem* p) { return current().kernel->forward(*p); }
int relpos_backward(const relpos_problem* p) { return current().kernel->backward(*p); }
int relpos_mass(const relpos_problem* p) { return current().kernel->mass(*p); }
int64_t relpos_slots(const relpos_problem* p) { return current().kernel->slots(*p); }

int relpos_has(const char* isa) {
    const Build* build = find(isa);
    return build ? build->runs_here() : -1;
}
int relpos_use(const char* isa) {
    const int here = relpos_has(isa);
    if (here == 1) __atomic_store_n(&chosen, find(isa), __ATOMIC_RELEASE);
    return here;
}
const char* relpos_isa(void) { return current().isa; }
const char* relpos_isas(void) { return names; }
const relpos_entry* relpos_describe(void) { return description; }
}
