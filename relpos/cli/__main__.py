"""python -m relpos.cli, as torchrun starts it."""

from relpos.cli import main

main()
