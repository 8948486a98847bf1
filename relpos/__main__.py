"""`python -m relpos`: the command, where its script is not on the path."""

from relpos.cli import main

main()
