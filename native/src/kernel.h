// What one build of the kernel offers to api.cpp.
#pragma once

#include "api.h"

namespace relpos {

struct Kernel {
    int (*forward)(const relpos_problem&);
    int (*backward)(const relpos_problem&);
    int (*mass)(const relpos_problem&);
    int64_t (*slots)(const relpos_problem&);
};

namespace portable { extern const Kernel kernel; }
namespace avx2 { extern const Kernel kernel; }
namespace avx512 { extern const Kernel kernel; }
namespace wide { extern const Kernel kernel; }  // 16 lanes without AVX-512, for tests

}  // namespace relpos
