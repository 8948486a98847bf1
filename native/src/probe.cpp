// What the kernel needs of a compiler, to know before the build whether this one has it: C++20, GCC's vector extensions.
#include <stdint.h>

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t VecInt __attribute__((vector_size(16)));
typedef uint16_t VecHalf __attribute__((vector_size(8)));

template <class T>
concept Small = sizeof(T) <= 16;

template <Small T>
static T larger(T a, T b) { return a > b ? a : b; }

int main(int count, char**) {
    const Vec x = float(count) - Vec{};
    const Vec y = larger(x, __builtin_shufflevector(x, x, 3, 2, 1, 0));
    const VecHalf half = __builtin_convertvector((VecInt)y, VecHalf);
    return half[0] == 1 && y[1] > 0.0f;
}
