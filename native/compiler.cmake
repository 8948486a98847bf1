# What the compiler can do, and the options it takes.
include(CheckLanguage)

# Enables C++. Sets `result` to a sentence that says why the kernel cannot be built here, or to nothing. A macro, since a
# language cannot be enabled inside a function.
macro(try_compiler result)
  set(${result} "")
  if(NOT CMAKE_CXX_COMPILER)
    unset(CMAKE_CXX_COMPILER CACHE)  # what an earlier build in this folder did not find may be installed now
  endif()
  check_language(CXX)
  if(NOT CMAKE_CXX_COMPILER)
    set(${result} "no working C++ compiler was found when relpos was installed.")
  else()
    enable_language(CXX)
    try_compile(can_build ${CMAKE_CURRENT_BINARY_DIR}/probe ${CMAKE_CURRENT_SOURCE_DIR}/src/probe.cpp
                CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON)
    if(NOT can_build)
      string(CONCAT ${result} "the compiler ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION} cannot build it, "
             "which takes C++20 and GCC's vector extensions (GCC 12, clang 14, or clang-cl on Windows).")
    endif()
  endif()
endmacro()

# Sets `common_options` for every source file, `full_width` for AVX-512, and the optimisation of a release.
macro(set_compiler_options)
  if(CMAKE_CXX_COMPILER_FRONTEND_VARIANT STREQUAL "MSVC")  # clang-cl: cl's options, and clang's own behind /clang:
    set(CMAKE_CXX_FLAGS_RELEASE "/O2 /clang:-O3")
    set(full_width /clang:-mprefer-vector-width=512)
    set(common_options /EHs-c- /GR- /clang:-fno-math-errno /clang:-ffp-contract=fast /D_CRT_SECURE_NO_WARNINGS
        -Wno-unknown-pragmas -Wno-pass-failed)
  else()
    set(CMAKE_CXX_FLAGS_RELEASE "-O3")
    set(full_width -mprefer-vector-width=512)
    set(common_options -fno-exceptions -fno-rtti -fno-math-errno -ffp-contract=fast -Wall -Wextra -Wno-psabi
        -Wno-unknown-pragmas -Wno-pass-failed)
  endif()
endmacro()
