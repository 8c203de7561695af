"""``python -m gnnfleet`` and ``torchrun -m gnnfleet``."""

from gnnfleet.run.cli import main

main()
