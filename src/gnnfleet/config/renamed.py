"""Option names of version 0.1.0. They are refused with the name that replaced them, never accepted."""

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
        "redeal": "repartition_every",
        "lost": "on_trainer_loss",
        "here": "local_trainers",
    },
    "temporal": {
        "lost": "max_lost_updates",
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
