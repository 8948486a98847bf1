"""`python -m relpos.cli`, as torchrun starts the command."""

from relpos.cli import main

main()
