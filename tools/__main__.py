"""`python -m kvtier.tools`: the command, where its script is not on the path."""

from .entry import main

main()
