"""Options of version 0.1.0. They are refused, with the name that replaced them or the reason why they are gone."""

from __future__ import annotations

RENAMED: dict[str, dict[str, str]] = {
    "sar": {"keep": "cache_for_backward", "wire": "wire_dtype", "flow": "restrict_rows"},
    "pipe": {
        "ways": "graph_parallel",
        "warm": "warmup_history",
        "guard": "exactness_check_every",
        "wire": "wire_dtype",
    },
    "macrobatch": {"together": "batches_per_fetch", "resident": "features_in_memory", "window": "cache_lookahead"},
    "tma": {
        "remote": "remote_negatives",
        "lost": "on_trainer_loss",
        "here": "local_trainers",
    },
    "temporal": {
        "share": "batch_parallel",
        "lanes": "epoch_parallel",
        "copies": "memory_parallel",
    },
}
"""{strategy: {name in 0.1.0: name today}}."""

RENAMED_VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("tma", "on_trainer_loss"): {"redeal": "reassign", "leave": "drop"}
}
"""{(strategy, option): {value in 0.1.0: value today}}."""

REMOVED: dict[tuple[str, str], str] = {
    ("temporal", "lost"): "no run gained from it: set strategy.batch, or batch=auto",
    ("tma", "redeal"): "new assignments of nodes made runs slower and no better",
    ("tma", "combine"): "trainers are averaged by strategy.weighting",
    ("tma", "temperature"): "it belonged to strategy.combine=soft_medoid",
    ("tma", "momentum"): "no run gained from momentum of the average; train.momentum is that of sgd",
}
"""{(strategy, option of 0.1.0): the reason why it is gone}."""

REMOVED_VALUES: dict[tuple[str, str, str], str] = {
    ("tma", "optimizer", "average"): "it tripled the traffic, and no run gained from it",
    ("pipe", "gradient", "control_variate"): "it was less accurate than double in every comparison",
    ("macrobatch", "policy", "static"): "it had no more hits than score, and fewer than belady, in every trace",
}
"""{(strategy, option, value of 0.1.0): the reason why it is gone}."""
