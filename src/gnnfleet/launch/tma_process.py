"""``python -m gnnfleet.launch.tma_process SPEC.json ADDRESS ROLE``: the coordinator of a tma run or a trainer.

Each is a World of its own, connected to the others by the message store only. It writes its failure to an error file.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gnnfleet.comm.failure import Failure
from gnnfleet.comm.process_lifetime import end_soon_after_signals, exit_process, interrupt_code, set_up_worker
from gnnfleet.launch.spec import RunSpec

if TYPE_CHECKING:
    from gnnfleet.comm.message_store import MessageStore
    from gnnfleet.graph.graph import Graph
    from gnnfleet.graph.partition.node_assignment import NodeAssignment

COORDINATOR = "coordinator"
TRAINERS_DIR = ".trainers"
"""Folder of the trainers' checkpoints, below the run."""


def process_name(role: str) -> str:
    return role if role == COORDINATOR else f"trainer {role}"


def process_failure(error: BaseException, role: str) -> Failure:
    """The failure of a process that is no rank, numbered as in records: the coordinator 0, trainer i as i + 1."""
    return Failure.from_error(error, 0 if role == COORDINATOR else int(role) + 1, process_name(role))


def main() -> NoReturn:
    path, address, role = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    spec = RunSpec.read(path)
    set_up_worker(spec.parent, spec.threads)
    from gnnfleet.comm.message_store import Address, MessageStore
    from gnnfleet.launch.live_module import receive_module

    code = 0
    end_soon_after_signals(lambda: None)
    try:
        try:
            receive_module(spec)
            store = MessageStore.connect(Address.parse(address))
            if role == COORDINATOR:
                run_coordinator(spec, store)
            else:
                run_trainer(spec, store, int(role))
        except Exception as error:
            failure = process_failure(error, role)
            failure.write(path.with_name(f"{role}.error"))
            code = failure.exit_code
    except KeyboardInterrupt as stop:
        code = interrupt_code(stop)
    exit_process(code)


def run_coordinator(spec: RunSpec, store: MessageStore) -> None:
    """Run the training loop, whose steps are rounds."""
    from gnnfleet.comm.world import World
    from gnnfleet.config.resolve import resolve
    from gnnfleet.errors import ExchangeError
    from gnnfleet.nn.custom_model import annotate_model_errors
    from gnnfleet.report.progress import make_progress
    from gnnfleet.strategies.tma.protocol import RunMessages
    from gnnfleet.training.build import RankContext, build
    from gnnfleet.training.run_dir import RunDirectory
    from gnnfleet.training.run_session import find_resume_point, run_session

    config, messages = resolve(spec.config), RunMessages(store.reconnect(retry_seconds=2.0))

    def report_checkpoint(round: int) -> None:
        with suppress(ExchangeError):
            messages.write_checkpointed(round)

    directory = RunDirectory(Path(spec.run_dir), seed=config.seed, on_checkpoint=report_checkpoint)
    with annotate_model_errors(config.model.file):
        with make_progress(spec.quiet) as progress:
            graph, assignment = open_assignment(spec, config.seed)
            context = RankContext(
                progress=progress,
                log_user=partial(directory.log, quiet=spec.quiet),
                message_store=store,
                assignment=assignment,
            )
            built = build(graph, config, context=context)
        record = run_session(built, config, directory, start=find_resume_point(directory, World()), quiet=spec.quiet)
        built.strategy.close()
    assert spec.answer is not None
    Path(spec.answer).write_text(json.dumps(record.as_json()))


def run_trainer(spec: RunSpec, store: MessageStore, index: int) -> None:
    from gnnfleet.config.resolve import resolve
    from gnnfleet.errors import ExchangeError
    from gnnfleet.launch.tma_subgraph import make_local_training
    from gnnfleet.nn.custom_model import annotate_model_errors
    from gnnfleet.report.phase_timer import PhaseTimer
    from gnnfleet.report.remarks import print_note
    from gnnfleet.strategies.job import PRECISIONS
    from gnnfleet.strategies.tma.config import TmaConfig
    from gnnfleet.strategies.tma.trainer import Trainer
    from gnnfleet.training.trace_files import write_spans

    config = resolve(spec.config)
    assert isinstance(config.strategy, TmaConfig)
    clock = PhaseTimer()
    clock.spans = [] if config.report.trace else None

    def end_process(text: str) -> None:
        print_note(f"error: {text}")
        exit_process(ExchangeError.exit_code)

    with annotate_model_errors(config.model.file):
        graph, assignment = open_assignment(spec, config.seed)
        trainer = Trainer(
            config.strategy,
            index,
            store,
            assignment,
            lambda nodes: make_local_training(graph, config, index, nodes),
            dtype=PRECISIONS[config.precision],
            folder=Path(spec.run_dir) / TRAINERS_DIR / str(index),
            log_user=partial(print_note, quiet=spec.quiet),
            clock=clock,
        )
        trainer.run(end_process)
        if config.report.trace:
            write_spans(clock, Path(spec.run_dir), f"trainer {index}")


def open_assignment(spec: RunSpec, seed: int) -> tuple[Graph, NodeAssignment]:
    """Open the store of a spec, and the assignment of its nodes."""
    from gnnfleet.errors import StoreError
    from gnnfleet.graph.partition.node_assignment import ClusterMap, NodeAssignment
    from gnnfleet.graph.store import open_store

    graph = open_store(spec.store)
    assert graph.store is not None
    if graph.store.digest != spec.digest:
        raise StoreError(f"{graph.store.path} differs from the coordinator's store: all machines need the same one")
    clusters = ClusterMap.open(graph.store.path / spec.partition) if spec.partition else None
    counts = {kind: table.count for kind, table in graph.nodes.items()}
    return graph, NodeAssignment(counts, clusters, seed, spec.partition)


if __name__ == "__main__":
    main()
