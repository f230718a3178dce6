"""Draft the next migration: `python -m headrace.controller.migrations "what changes"`. Driver."""

import sys

from sqlalchemy import create_engine

from headrace.controller.migrations import draft

if len(sys.argv) != 2:
    sys.exit('usage: python -m headrace.controller.migrations "what changes"')
with create_engine("sqlite://").begin() as memory:
    draft(memory, sys.argv[1])
