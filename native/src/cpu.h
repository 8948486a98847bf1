// What the CPU can do, as far as the builds of the kernel ask.
#pragma once

#include <stdint.h>

#if defined(_MSC_VER) && !defined(RELPOS_CPUID)
#define RELPOS_CPUID  // the table behind __builtin_cpu_supports is in clang's own library, which link.exe does not read
#endif
#ifdef RELPOS_CPUID
#include <cpuid.h>
#endif

namespace relpos {

#ifdef RELPOS_CPUID

// The bits of Intel's manual, volume 2, "CPUID" and "XGETBV".
namespace cpu {
struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};
inline Registers ask(unsigned leaf) {
    Registers r;
    __get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d);  // leaves zeros where the CPU has no such leaf
    return r;
}
inline bool all(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }
// Whether the system saves these registers of a process: 6 for 256 bits, e6 for 512.
inline bool saved(unsigned wanted) {
    const unsigned xsave = 1u << 27;
    if (!all(ask(1).c, xsave)) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return all(low, wanted);
}
}  // namespace cpu

inline bool has_avx2() {
    const unsigned fma_avx = 1u << 12 | 1u << 28, avx2 = 1u << 5;
    return cpu::saved(0x6) && cpu::all(cpu::ask(1).c, fma_avx) && cpu::all(cpu::ask(7).b, avx2);
}
inline bool has_avx512() {
    const unsigned f_dq_bw_vl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    return has_avx2() && cpu::saved(0xe6) && cpu::all(cpu::ask(7).b, f_dq_bw_vl);
}

#else

inline bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
inline bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}

#endif

}  // namespace relpos
