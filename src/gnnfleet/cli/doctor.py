"""``gnnfleet doctor``: check whether this machine is ready for training."""

from __future__ import annotations

import typer

from gnnfleet.cli.options import JsonFlag
from gnnfleet.cli.output import print_result, table


def doctor(as_json: JsonFlag = False) -> None:
    """Check torch, kernels, OpenMP, shared memory, ports, network interface and limits of this machine.

    The exit code is 1 if a problem prevents training.
    """
    from gnnfleet.analysis.doctor import as_record, run_checks

    findings = run_checks()
    record = as_record(findings)
    rows = [(f.check, f.level, f.found, f.advice) for f in findings]
    print_result(record, as_json=as_json, human=[table(None, ("check", "", "found", "advice"), rows)])
    if not record["fit"]:
        raise typer.Exit(1)
