"""python -m headrace."""

from headrace.cli import main

main()
