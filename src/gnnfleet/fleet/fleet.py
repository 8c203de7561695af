"""``gf.Fleet``: your own training loop over ranks, in the manner of Hugging Face Accelerate.

>>> fleet = gf.Fleet()
>>> data = fleet.open("shop/", split="0.6/0.2/0.2")
>>> model, optimizer = fleet.prepare(model, optimizer)
>>> loss = fleet.mean(cross_entropy(model(data.x, data.edge_index), data.y, reduction="none"))
>>> fleet.backward(loss)
>>> optimizer.step()
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch
from torch import Tensor

from gnnfleet.comm import collectives
from gnnfleet.comm.world import World
from gnnfleet.config.resolve import resolve
from gnnfleet.errors import ConfigError
from gnnfleet.fleet.data import FleetLoader, PartData, open_part
from gnnfleet.fleet.ranks import script_world
from gnnfleet.graph.views.local import LocalView
from gnnfleet.inference.predict import check_output, class_names, write_table
from gnnfleet.nn.base import Model
from gnnfleet.nn.pyg.module import PygModule
from gnnfleet.nn.pyg.rules import pass_over, reads_all_nodes
from gnnfleet.nn.pyg.source_index import SourceIndex
from gnnfleet.ops.draws import DrawKey
from gnnfleet.report.memory import peak_rss
from gnnfleet.sharded.module_check import check_parts
from gnnfleet.tasks.train_options import TrainConfig
from gnnfleet.training.checkpoint import TrainState, load_checkpoint, save_checkpoint, unshared
from gnnfleet.training.output_schema import OutputSchema


class Fleet:
    """The ranks of a script that torchrun or ``gf.launch`` started, or one process. All methods are collective.

    What is minimized is the mean over ranks of the loss that each computes, so one that ``mean`` or ``sum`` returned
    counts once. ``parameter.grad`` is a rank's share until ``backward``, or at the latest a step, sums it over ranks.
    """

    def __init__(self, *, seed: int = 0, silence_limit: float = 10.0, world: World | None = None) -> None:
        self.world = world or script_world(silence_limit)
        self.rank, self.size, self.seed = self.world.rank, self.world.size, seed
        self._steps, self._forwards = 0, 0  # of the optimizer; in training mode since the last step
        self._data: PartData | None = None  # opened last
        self._loaders: list[FleetLoader] = []
        self._passes: list[tuple[torch.nn.Module, ExitStack]] = []
        self._parameters: dict[torch.nn.Parameter, None] = {}  # with hooks, in the order of all ranks
        self._summed: dict[torch.nn.Parameter, Tensor] = {}  # gradients that are sums over ranks
        self._scale = 1 / self.size  # of a share

    def open(
        self, source: Any, *, partition: str = "mincut", split: str | int = 0, dtype: torch.dtype = torch.float32
    ) -> PartData:
        """Collective. This rank's part of a store, a gf.Graph or a torch_geometric Data.

        Rank 0 partitions a store that has no such partition yet. ``split`` is a rule ("0.6/0.2/0.2") or a number.
        """
        settings = {"strategy": "sar", "workers": self.size, "partition": partition, "split": split, "seed": self.seed}
        self._data = open_part(source, resolve(settings), self.world, dtype)
        return self._data

    def prepare(self, *objects: Any, check: bool = True) -> Any:
        """Collective. Make modules and optimizers work over ranks, in place; other objects are returned as they are.

        Modules get the weights of rank 0. With ``check``, a module that takes x and edge_index must first give the same
        on a small random graph and on its parts.
        """
        for prepared in objects:
            if isinstance(prepared, torch.nn.Module):
                self._prepare_module(prepared, check=check and self.size > 1)
            elif isinstance(prepared, torch.optim.Optimizer):
                self._watch(parameter for group in prepared.param_groups for parameter in group["params"])
                prepared.register_step_pre_hook(self._begin_step)
                prepared.register_step_post_hook(self._end_step)
        return objects[0] if len(objects) == 1 else objects

    def backward(self, loss: Tensor, *, sync: bool = True, retain_graph: bool = False) -> None:
        """Collective. Add the gradients of a loss; without ``sync`` a later call or the next step sums them."""
        if self.size > 1 and not self._steps:
            losses = [row[0] for row in collectives.all_gather_numbers(self.world.uncounted(), [float(loss.detach())])]
            if self.world.is_first and max(losses) - min(losses) > 1e-5 * max(map(abs, losses)):
                text = "the loss differs between workers, so the mean of their losses is minimized. The mean over all"
                warnings.warn(f'{text} nodes is fleet.mean(loss_function(…, reduction="none"))', stacklevel=2)
        try:
            self._scale = 1.0  # the loss is scaled instead
            (loss / self.size).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        finally:
            self._scale = 1 / self.size
        if sync:
            self._sum_gradients()

    def sum(self, values: Tensor | float, dim: int | None = None) -> Tensor:
        """Collective. The sum of all values of all ranks, or along ``dim``; differentiable."""
        values = torch.as_tensor(values)
        return collectives.sum_over_ranks(self.world, values.sum() if dim is None else values.sum(dim))

    def mean(self, values: Tensor, dim: int | None = None) -> Tensor:
        """Collective. The mean of all values of all ranks, or along ``dim``; differentiable."""
        count = self.sum(values.numel() if dim is None else values.shape[dim])
        return self.sum(values if values.is_floating_point() else values.double(), dim) / count

    def gather(self, rows: Tensor, ids: Tensor | None = None) -> Tensor:
        """Collective. The rows of all ranks, by rank or in the order of ``ids``, as ``data.n_id``."""
        gathered = torch.cat(collectives.all_gather_rows(self.world, rows))
        return gathered if ids is None else gathered[self.gather(ids).argsort()]

    def loader(self, data: PartData, num_neighbors: Sequence[int], *, batch_size: int, **options: Any) -> FleetLoader:
        """Collective. Batches as of torch_geometric's NeighborLoader; ``batch_size`` counts the seeds of all ranks.

        Options: ``input_nodes`` (a mask of the rows of ``data``), ``shuffle``, ``replace``. A rank may have no seeds.
        """
        self._loaders.append(FleetLoader(self.world, self.seed, data, num_neighbors, batch_size, **options))
        return self._loaders[-1]

    def save(self, path: str | Path, *objects: Any, **values: Any) -> None:
        """Collective. Replace the checkpoint at ``path``: state_dict of the objects, and ``values``."""
        tensors: dict[str, Tensor] = {}

        def move(value: Any) -> dict[str, str]:
            if not isinstance(value, Tensor):
                raise ConfigError(f"fleet.save cannot write {type(value).__name__}: expected tensors, numbers, strings")
            tensors[str(len(tensors))] = value
            return {"tensor": str(len(tensors) - 1)}

        states = [[loader.epoch for loader in self._loaders], values, *(saved.state_dict() for saved in objects)]
        content = json.dumps(states, default=move).encode()
        tensors["json"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        save_checkpoint(Path(path), {"fleet": tensors}, TrainState(step=self._steps), seed=self.seed, world=self.world)
        collectives.barrier(self.world)

    def load(self, path: str | Path, *objects: Any) -> dict[str, Any]:
        """Collective. Load the state of the same objects in the same order; returns the values that were saved."""
        state, position, _ = load_checkpoint(Path(path))
        tensors = state["fleet"]

        def restore(fields: dict[str, Any]) -> Any:
            is_tensor = fields.keys() == {"tensor"}
            return tensors[fields["tensor"]] if is_tensor else {int(k) if k.isdigit() else k: fields[k] for k in fields}

        epochs, values, *states = json.loads(tensors["json"].numpy().tobytes(), object_hook=restore)
        if len(states) != len(objects):
            raise ConfigError(
                f"{path} has the state of {len(states)} objects, found {len(objects)}: load the same ones"
            )
        for target, state_dict in zip(objects, states, strict=True):
            target.load_state_dict(state_dict)
        for loader, epoch in zip(self._loaders, epochs, strict=False):
            loader.epoch = epoch
        self._steps = position.step
        return dict(values)

    def predict(self, model: torch.nn.Module, data: PartData, path: str | Path | None = None) -> Tensor:
        """Collective. [nodes, C] exact outputs in store order; rank 0 writes classes with original ids to ``path``."""
        if path is not None:
            check_output(Path(path))
        takes = {} if isinstance(model, Model) else inspect.signature(model.forward).parameters
        inputs = {name: getattr(data, name) for name in ("edge_weight", "edge_attr") if name in takes}
        was_training = model.training
        with torch.no_grad():
            rows = self.gather(model.eval()(data.x, data.edge_index, **inputs), data.n_id)
        model.train(was_training)
        if path is not None and self.world.is_first:
            nodes, head = data.graph.single_nodes, OutputSchema.of(data.graph).head(TrainConfig())
            columns = {"id": nodes.ids.select(np.arange(nodes.count)), "prediction": class_names(head, nodes, rows)}
            write_table(Path(path), iter([pa.table(columns)]))
        return rows

    def summary(self) -> dict[str, list[int]]:
        """Collective. By rank: bytes sent, rounds of communication, peak of resident memory."""
        own = {"bytes_sent": self.world.traffic.bytes_sent, "rounds": self.world.traffic.rounds, "peak_rss": peak_rss()}
        rows = collectives.all_gather_numbers(self.world.uncounted(), list(own.values()))
        return {name: [int(row[column]) for row in rows] for column, name in enumerate(own)}

    # -- passes of modules --

    def _prepare_module(self, module: torch.nn.Module, *, check: bool) -> None:
        takes = inspect.signature(module.forward).parameters.keys()
        if check and self._data is not None and {"x", "edge_index"} <= takes:
            check_parts(PygModule(module), self._data.graph)
        content = safetensors.torch.save(unshared(module.state_dict())) if self.world.is_first else None
        module.load_state_dict(safetensors.torch.load(collectives.broadcast_bytes(self.world, content)))
        self._watch(module.parameters())
        module.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        module.register_forward_hook(self._end_pass, always_call=True)

    def _begin_pass(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply the rules of the view whose edges are passed, or of the data opened last."""
        is_nested, rules = bool(self._passes), ExitStack()
        self._passes.append((module, rules))
        index = next((value for value in (*args, *kwargs.values()) if isinstance(value, SourceIndex)), None)
        fetcher = index.fetcher if index is not None else self._data.edge_index.fetcher if self._data else None
        if is_nested or fetcher is None or fetcher.view is None:
            return None
        if self.size > 1 and module.training and isinstance(fetcher.view, LocalView):
            for name, child in module.named_modules():
                if reads_all_nodes(child) or isinstance(child, torch.nn.modules.batchnorm._BatchNorm):
                    raise ConfigError(
                        f"{name} ({type(child).__name__}) reads all rows of a batch, and a worker has a part of them: "
                        "use a norm of single nodes, as torch.nn.LayerNorm, or full batch"
                    )
        fetcher.forget()
        view = fetcher.view.with_step(key=DrawKey(self.seed, self._steps, self._forwards), training=module.training)
        self._forwards += module.training
        self._watch(module.parameters())
        if isinstance(module, Model):
            return ([view] * module.num_layers, kwargs.get("x", args[0] if args else None)), {}
        rules.enter_context(pass_over(view, module))
        return None

    def _end_pass(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if self._passes and self._passes[-1][0] is module:
            self._passes.pop()[1].close()

    # -- gradients --

    def _watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients of these parameters, the same ones in the same order on all ranks."""
        for parameter in parameters:
            if self.size > 1 and parameter.requires_grad and parameter not in self._parameters:
                parameter.register_hook(partial(self._begin_share, parameter))  # type: ignore[no-untyped-call]
                self._parameters[parameter] = None

    def _begin_share(self, parameter: torch.nn.Parameter, share: Tensor) -> Tensor:
        """Scale what autograd is about to add to a gradient."""
        self._leave_to_first(parameter, self._summed.pop(parameter, None))
        return share * self._scale

    def _leave_to_first(self, parameter: torch.nn.Parameter, total: Tensor | None) -> None:
        """If a gradient is a sum, rank 0 alone keeps it: sums and shares are summed together."""
        if total is not None and parameter.grad is total and not self.world.is_first:
            parameter.grad = None

    def _sum_gradients(self) -> None:
        for parameter, total in self._summed.items():
            self._leave_to_first(parameter, total)
        collectives.sum_gradients(self.world, self._parameters)
        self._summed = {p: p.grad for p in self._parameters if p.grad is not None}

    def _sum_new_gradients(self) -> None:
        """Sum gradients unless all of them are sums on all ranks."""
        shares = sum(p.grad is not None and p.grad is not self._summed.get(p) for p in self._parameters)
        if self.size > 1 and int(self.sum(shares)):
            self._sum_gradients()

    def _begin_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Sum gradients before a step, and after every call of its closure."""
        self._sum_new_gradients()

        def summing(closure: Any) -> Any:
            def call() -> Any:
                loss = closure()
                self._sum_new_gradients()
                return loss

            return call if callable(closure) else closure

        return (args[0], *map(summing, args[1:])), {name: summing(value) for name, value in kwargs.items()}

    def _end_step(self, *_: Any) -> None:
        self._steps, self._forwards = self._steps + 1, 0
