// Threads, their scratch memory and their floating-point mode.
#pragma once

#include <stdlib.h>

#include "vector.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef _WIN32
#include <malloc.h>
extern "C" __declspec(dllimport) int __stdcall SwitchToThread(void);  // all that we need of windows.h
#else
#include <sched.h>
#endif
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace relpos {

// True in a process that was forked after this library was loaded: OpenMP's threads do not exist there, and waiting for
// them would never end. Defined in api.cpp.
extern bool forked;

namespace RELPOS_ISA {

// Treats denormal numbers as 0 during its lifetime: the tails of a decaying bias are full of them, and each costs about
// a hundred cycles. The destructor restores the caller's mode.
class FlushDenormals {
public:
#if defined(__SSE__)
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before_); }

private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" ::"r"(before_ | (uint64_t(1) << 24)));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

private:
    uint64_t before_;
#else
    FlushDenormals() {}
    ~FlushDenormals() {}
#endif
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;
};

// Calls work(thread, threads) once per thread.
template <class Work>
static void parallel([[maybe_unused]] int threads, const Work& work) {
#ifdef _OPENMP
    if (threads > 1 && !forked) {
#pragma omp parallel num_threads(threads)
        {
            const FlushDenormals mode;
            work(omp_get_thread_num(), omp_get_num_threads());
        }
        return;
    }
#endif
    const FlushDenormals mode;
    work(0, 1);
}

// Calls work(index) for 0 ≤ index < count; each free thread takes the next index.
template <class Work>
static void parallel_for(int threads, int64_t count, const Work& work) {
    int64_t next = 0;
    parallel(int(least(int64_t(threads), count)), [&](int thread, int) {
        for (;;) {
            const int64_t index = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (index >= count) return;
            work(index, thread);
        }
    });
}

// Memory that starts on a cache line, or nullptr.
static inline void* allocate(size_t bytes) {
#ifdef _WIN32
    return _aligned_malloc(bytes, 64);
#else
    return aligned_alloc(64, bytes);
#endif
}
static inline void release(void* memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    free(memory);
#endif
}

// Equal pieces of memory, one per user, each on its own cache lines. `ok` is false if the allocation failed.
template <class T>
class Shared {
public:
    Shared(int64_t users, int64_t each)
        : each_((each * int64_t(sizeof(T)) + 63) / 64 * 64 / int64_t(sizeof(T))),
          data_(users * each_ > 0 ? static_cast<T*>(allocate(size_t(users * each_) * sizeof(T))) : nullptr),
          ok(data_ || users * each_ == 0) {}
    ~Shared() { release(data_); }
    Shared(const Shared&) = delete;
    Shared& operator=(const Shared&) = delete;
    T* of(int64_t user) const { return data_ ? data_ + user * each_ : nullptr; }

private:
    int64_t each_;
    T* data_;

public:
    const bool ok;
};

// Divides a buffer into pieces, each on its own cache lines.
class Carve {
public:
    explicit Carve(float* at) : at_(at) {}
    float* take(int64_t floats) {
        float* piece = at_;
        at_ += padded(floats);
        return piece;
    }
    static constexpr int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

private:
    float* at_;
};

RELPOS_INLINE void pause_briefly() {
#if defined(__SSE__)
    _mm_pause();
#endif
}

RELPOS_INLINE void let_others_run() {
#ifdef _WIN32
    SwitchToThread();
#else
    sched_yield();
#endif
}

}  // namespace RELPOS_ISA
}  // namespace relpos
