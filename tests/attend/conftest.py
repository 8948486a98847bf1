from relpos.attend import triton

if triton.available()[0]:
    from quick_interpreter import quick_interpreter  # noqa: F401  (a fixture that every test here uses)
