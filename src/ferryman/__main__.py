"""`python -m ferryman` is the command `ferryman`."""

from ferryman.cli.main import main

main()
