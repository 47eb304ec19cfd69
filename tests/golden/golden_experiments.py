"""The golden experiments, each given by its changes to :data:`BASE`.

Together they name every registered component except :data:`UNUSED`. ``FILES`` are the files that some of them read.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

UNUSED: dict[str, set[str]] = {
    "algorithm": {"gossip-learning-on-receipt"},
    "gradient": {"mean"},  # it is the default, which stays out of saved files
    "task": {
        *("celeba", "cifar10", "cifar100", "fashion-mnist", "femnist", "hub", "leaf-synthetic"),
        *("mnist", "movielens", "reddit", "sent140", "shakespeare", "synthetic", "tiny-mem"),
    },
    "partition": {"flower"},
    "poison": {"text-trigger"},
    "model": {
        *(
            "causal-lm",
            "celeba-cnn",
            "cnn6",
            "convnet",
            "gpt2",
            "leaf-cnn",
            "lenet5",
            "lstm",
            "matrix-factorization",
        ),
        *("mobilenet", "next-word-lstm", "resnet18", "sent140-lstm", "vgg16-bn", "vit"),
    },
    "tracker": {"mlflow", "tensorboard", "wandb"},
}
"""Registered components that no golden experiment uses, by kind: data that has to be fetched, language models and
Flower's partitioners, whose packages may be absent, models with slow steps, and trackers, which change no results."""

LEAST_SQUARES: Settings = {"name": "least-squares", "features": 5, "samples": 120, "test_samples": 40}
MLP: Settings = {"name": "digits", "model": {"name": "mlp", "hidden": [12]}}
UNEVEN: Settings = {"name": "log-normal", "median_seconds": 0.01, "sigma": 0.6}
SLOW_LINKS: Settings = {"name": "uniform", "latency_s": 0.003, "bandwidth_mbps": 2}
GRID: Settings = {"every_rounds": None, "every_s": 0.02, "samples": 100}
SKIP: Settings = {"lost_peer": "skip", "timeout_s": 0.05}
QUICK: Settings = {"detection_s": 0.02}

BASE: Settings = {
    "seed": 3,
    "nodes": 6,
    "task": {"name": "digits", "model": "logistic"},
    "algorithm": {"name": "d-psgd", "local_steps": 2},
    "batch_size": 8,
    "network": {"name": "uniform", "latency_s": 0.002},
    "evaluation": {"every_rounds": 2, "samples": 100},
    "stop": {"rounds": 5},
    "engine": {"name": "simulate", "trainer": "sequential"},
}

EXPERIMENTS: dict[str, Settings] = {
    # Synchronous algorithms, each with another optimizer, schedule, partition or topology.
    "d-psgd": {
        "nodes": 8,
        "task": MLP,
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "topology": {"name": "random-regular", "degree": 3},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.001},
    },
    "d-psgd-overlap": {
        "partition": {"name": "shards", "per_node": 2},
        "topology": {"name": "torus", "rows": 2, "weights": "metropolis-hastings"},
        "algorithm": {"name": "d-psgd", "overlap": True},
        "optimizer": {
            "name": "adamw",
            "lr": 0.01,
            "clip_norm": 0.5,
            "schedule": {"name": "cosine", "rounds": 6, "warmup_rounds": 2},
        },
    },
    "d-psgd-changing-graph": {
        "topology": {
            "name": "erdos-renyi",
            "p": 0.5,
            "every_rounds": 1,
            "allow_disconnected": True,
            "weights": "uniform",
        },
        "initial": "independent",
        "optimizer": {
            "name": "rmsprop",
            "lr": 0.005,
            "schedule": {"name": "linear", "start": 1, "end": 0.2, "rounds": 4},
        },
        "compute": UNEVEN,
    },
    "d-psgd-random-links": {
        "topology": {
            "name": "random-links",
            "base": {"name": "barabasi-albert", "m": 2},
            "probability": 0.7,
            "symmetric": False,
            "weights": {"name": "centrality", "schedule": {"name": "cosine", "rounds": 3}},
        },
    },
    "d-psgd-random-weights": {
        "topology": {
            "name": "networkx",
            "generator": "powerlaw_cluster_graph",
            "parameters": {"m": 2, "p": 0.5},
            "weights": "random",
        },
    },
    "d-psgd-betweenness": {
        "topology": {
            "name": "stochastic-block",
            "sizes": [4, 2],
            "p_in": 0.9,
            "p_out": 0.3,
            "weights": {
                "name": "centrality",
                "measure": "betweenness",
                "schedule": {"name": "oscillating", "rounds": 2},
            },
        },
    },
    "d-psgd-pagerank": {
        "topology": {
            "name": "graphml",
            "path": "graph.xml",
            "weights": {
                "name": "centrality",
                "measure": "pagerank",
                "hops": 2,
                "temperature": 0.05,
                "schedule": {"name": "exponential", "factor": 0.8},
            },
        },
    },
    "d-psgd-batch-norm": {
        "nodes": 4,
        "task": "golden_parts:batch_norm",
        "initial": "independent",
        "optimizer": {"name": "adam", "lr": 0.01, "amsgrad": True},
        "stop": {"rounds": 6},
    },
    "d-psgd-gn-lenet": {
        "nodes": 4,
        "task": {"name": "digits", "model": "gn-lenet", "samples": 200},
        "topology": "complete",
        "optimizer": {"name": "adagrad", "lr": 0.02},
        "stop": {"rounds": 3},
    },
    "d-psgd-batched": {
        "task": MLP,
        "topology": {"name": "hypercube"},
        "nodes": 8,
        "optimizer": {"name": "nadam", "lr": 0.01, "reset_every_round": True},
        "engine": {"name": "simulate", "trainer": "batched", "workers": 2},
    },
    "epidemic-oracle": {
        "nodes": 8,
        "algorithm": {"name": "epidemic-oracle", "degree": 3, "local_steps": 2},
        "optimizer": {"name": "radam", "lr": 0.01, "schedule": {"name": "exponential", "factor": 0.9}},
    },
    "epidemic-local": {
        "algorithm": {"name": "epidemic-local", "degree": 2},
        "optimizer": {"name": "adamax", "lr": 0.02, "schedule": {"name": "step", "every": 2}},
        "compute": {"name": "per-node", "factors": [1, 2, 3, 1.5, 1, 4]},
    },
    "d-psgd-coordinate-mean": {"aggregator": "coordinate-mean", "task": "golden_parts:batch_norm"},
    "d-psgd-overlap-median": {
        "algorithm": {"name": "d-psgd", "overlap": True},
        "aggregator": "median",
        "topology": {"name": "torus", "rows": 2},
    },
    "epidemic-local-trimmed-mean": {
        "algorithm": {"name": "epidemic-local", "degree": 4},
        "aggregator": {"name": "trimmed-mean", "share": 0.2},
    },
    "fedavg-krum": {"algorithm": "fedavg", "aggregator": {"name": "krum", "byzantine": 1, "selected": 2}},
    "d2": {
        "task": {**LEAST_SQUARES, "groups": 12, "heterogeneity": 1.0},
        "partition": "natural",
        "algorithm": "d2",
        "topology": "complete",
        "batch_size": "full",
    },
    "d2-exact-diffusion": {
        "task": LEAST_SQUARES,
        "algorithm": {"name": "d2", "exact_diffusion": True},
        "optimizer": {
            "name": "sgd",
            "lr": 0.1,
            "schedule": {"name": "multi-step", "milestones": [2, 4], "factor": 0.5},
        },
    },
    "gradient-tracking": {
        "task": LEAST_SQUARES,
        "algorithm": "gradient-tracking",
        "topology": {"name": "watts-strogatz", "degree": 2, "p": 0.3, "weights": {"name": "ccs"}},
    },
    "gradient-tracking-diging": {
        "algorithm": {"name": "gradient-tracking", "variant": "diging"},
        "topology": {
            "name": "edge-list",
            "path": "edges.txt",
            "weights": {"name": "given", "path": "weights.txt"},
        },
        "optimizer": {"name": "rprop", "lr": 0.001},
        "batch_size": "full",
    },
    "qg-momentum": {
        "algorithm": {"name": "qg-momentum", "nesterov": True},
        "topology": {"name": "adjacency", "path": "adjacency.txt"},
        "optimizer": {"name": "sgd", "lr": 0.1, "schedule": {"name": "constant", "warmup_rounds": 2}},
    },
    "relay-sum": {
        "algorithm": {"name": "relay-sum", "tree": "spanning"},
        "optimizer": {"name": "adadelta", "lr": 1.0},
    },
    "relay-sum-initial": {
        "algorithm": {"name": "relay-sum", "stand_in": "initial"},
        "topology": {"name": "star", "centre": 2},
        "optimizer": {"name": "asgd", "lr": 0.1, "clip_value": 0.05},
    },
    "sgp": {"algorithm": {"name": "sgp", "local_steps": 2}, "topology": "one-peer-exponential"},
    "sgp-overlap": {
        "algorithm": {"name": "sgp", "overlap": 2},
        "topology": "exponential",
        "compute": UNEVEN,
        "stop": {"rounds": 7},
    },
    "fedavg": {
        "partition": {"name": "sizes", "fractions": [0.3, 0.25, 0.2, 0.15, 0.1]},
        "algorithm": {"name": "fedavg", "client_fraction": 0.6, "local_steps": 3},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.5},
    },
    "fedavg-uniform": {
        "algorithm": {"name": "fedavg", "weighting": "uniform", "server": 4},
        "topology": {"name": "star", "centre": 4},
        "stop": {"rounds": 30, "target": {"metric": "test_accuracy", "value": 0.44}},
    },
    "all-reduce": {"task": "golden_parts:batch_norm", "nodes": 5, "algorithm": "all-reduce"},
    "local": {
        "algorithm": {"name": "local", "local_steps": 3},
        "evaluation": {"every_rounds": 1, "nodes": [0, 4]},
    },
    "centralized": {"algorithm": {"name": "centralized", "local_steps": 3}},
    # Asynchronous algorithms, on every network and compute profile.
    "ad-psgd": {
        "nodes": 8,
        "task": MLP,
        "algorithm": "ad-psgd",
        "topology": {"name": "random-regular", "degree": 3},
        "compute": UNEVEN,
        "network": SLOW_LINKS,
        "evaluation": GRID,
        "stop": {"time_s": 0.1},
    },
    "ad-psgd-wait-free": {
        "algorithm": {"name": "ad-psgd", "wait_free": True, "timeout_s": 0.05},
        "compute": {"name": "stragglers", "ranks": [1, 4], "factor": 4, "base": UNEVEN},
        "network": {**SLOW_LINKS, "loss": 0.1, "jitter_s": 0.001},
    },
    "ad-psgd-artifact": {
        "algorithm": {"name": "ad-psgd-artifact", "degree": 2, "backlog": 2},
        "compute": {"name": "trace", "path": "steps.csv", "assign": "drawn"},
        "network": {
            "name": "stragglers",
            "bandwidth_mbps": 4,
            "fraction": 0.4,
            "spread_mbps": 0.2,
            "sharing": "in-turn",
        },
    },
    "swift": {
        "algorithm": {"name": "swift", "average_every": 2},
        "compute": {
            "name": "slowdowns",
            "base": UNEVEN,
            "windows": [{"from_s": 0.02, "to_s": 0.04, "factor": 3, "ranks": [0, 3]}],
            "random": {"per_hour": 40000, "mean_s": 0.02, "factor": 2},
        },
        "network": {
            "name": "star",
            "uplink_mbps": [2, 2, 1, 1, 4, 4],
            "downlink_mbps": 3,
            "latency_s": 0.001,
            "jitter_s": 0.0005,
            "sharing": "fair",
        },
        "evaluation": {
            "every_rounds": 2,
            "samples": 100,
            "timeline": {"from_s": 0.01, "to_s": 0.04, "nodes": [0, 2, 3]},
        },
    },
    "swift-fresh": {
        "algorithm": {"name": "swift", "memory": "fresh", "boost": True, "weights": "topology"},
        "topology": {"name": "complete", "weights": "data-size"},
        "partition": {"name": "dirichlet", "alpha": 1.0},
        "compute": UNEVEN,
        "network": {"name": "kollaps", "path": "kollaps.xml", "sharing": "rtt-fair"},
    },
    "swift-artifact": {
        "task": "golden_parts:batch_norm",
        "algorithm": {"name": "swift-artifact", "recipients": 2},
        "compute": UNEVEN,
        "network": {
            "name": "matrix",
            "latency_ms": "latencies.csv",
            "bandwidth_mbps": "aws-ten-regions",
            "within_bandwidth_mbps": 50,
            "shared": True,
            "sharing": "fair",
        },
        "nodes": 12,
    },
    "divshare": {
        "nodes": 8,
        "task": MLP,
        "algorithm": {"name": "divshare", "fraction": 0.2, "recipients": 3},
        "compute": UNEVEN,
        "network": {"name": "trace", "path": "rates.csv", "repeat_s": 0.05, "latency_s": 0.001},
        "evaluation": {**GRID, "nodes": "average"},
        "stop": {"time_s": 0.09},
    },
    "divshare-keep": {
        "task": "golden_parts:batch_norm",
        "algorithm": {
            "name": "divshare",
            "fraction": 0.5,
            "queue": "keep",
            "backlog": 2,
            "recipients_from": "neighbors",
        },
        "topology": "complete",
        "compute": UNEVEN,
        "network": {
            "name": "varying",
            "base": {"name": "uniform", "bandwidth_mbps": 1, "sharing": "fair"},
            "rate_changes": [{"at_s": 0.02, "ranks": [0, 1], "factor": 0.2}, {"at_s": 0.04, "factor": 1}],
        },
    },
    "gossip-learning": {
        "algorithm": {"name": "gossip-learning", "local_steps": 2},
        "compute": UNEVEN,
        "network": SLOW_LINKS,
    },
    "gossip-learning-sampled": {
        "nodes": 10,
        "algorithm": {"name": "gossip-learning", "merge": "all", "period_s": 0.012},
        "topology": {"name": "cyclon", "view": 4, "shuffle": 2, "every_s": 0.02, "bootstrap": "ring"},
        "compute": {"name": "per-node", "sigma": 0.4, "base": UNEVEN},
    },
    "divshare-sampled": {
        "nodes": 8,
        "algorithm": {"name": "divshare", "fraction": 1, "recipients": 2, "recipients_from": "neighbors"},
        "topology": {
            "name": "cyclon",
            "view": 3,
            "shuffle": 2,
            "degree": 2,
            "bootstrap": {"name": "random-regular", "degree": 3},
        },
        "compute": UNEVEN,
    },
    "ad-psgd-batched": {
        "task": "golden_parts:batch_norm",
        "algorithm": {"name": "ad-psgd", "local_steps": 2},
        "topology": "complete",
        "compute": {"name": "per-node", "seconds_per_step": [0.01, 0.012, 0.015, 0.02, 0.03, 0.011]},
        "network": {
            "name": "matrix",
            "latency_s": 0.002,
            "bandwidth_mbps": "aws-ten-regions",
            "placement": "blocks",
        },
        "evaluation": {"every_rounds": 2, "every_s": 0.05, "nodes": 3},
        "engine": {"name": "simulate", "trainer": "batched"},
    },
    # Losses and faults.
    "loss": {
        "network": {**SLOW_LINKS, "loss": 0.2, "jitter_s": 0.001},
        "gather": {"timeout_s": 0.03, "missing": "renormalize"},
    },
    "loss-on-links": {
        "algorithm": {"name": "epidemic-local", "degree": 3},
        "faults": [
            {"name": "loss", "probability": 0.6, "links": [[0, 1], [2, 3], [4, 5], [3, 0]], "from_s": 0.01}
        ],
        "gather": SKIP,
    },
    "crash": {
        "faults": [
            {"name": "crash", "nodes": [3], "at_s": 0.03, "restart_after_s": 0.05},
            {"name": "crash", "nodes": 1, "at_round": 4, "restart_after_s": 0.04, "restart_from": "initial"},
            {"name": "slow", "nodes": 0.3, "factor": 2.5, "from_s": 0.02, "to_s": 0.07},
        ],
        "checkpoint": {"every_rounds": 2},
        "gather": {"lost_peer": "wait", "timeout_s": 0.05},
        "failures": QUICK,
        "stop": {"rounds": 8},
    },
    "leave-and-join": {
        "algorithm": "gradient-tracking",
        "faults": [
            {"name": "leave", "nodes": [1], "at_s": 0.03},
            {"name": "join", "nodes": [5], "at_s": 0.04, "start_from": "neighbor"},
            {"name": "freeze", "nodes": [2], "at_s": 0.05, "for_s": 0.06},
        ],
        "gather": SKIP,
        "failures": QUICK,
        "topology": "complete",
        "stop": {"rounds": 8},
    },
    "churn": {
        "algorithm": "swift",
        "faults": [{"name": "churn", "nodes": 0.7, "mean_up_s": 0.05, "mean_down_s": 0.02, "to_s": 0.15}],
        "checkpoint": {"every_s": 0.02},
        "failures": QUICK,
        "compute": UNEVEN,
        "evaluation": GRID,
        "stop": {"time_s": 0.2},
    },
    "churn-from-a-file": {
        "algorithm": "all-reduce",
        "faults": [{"name": "churn", "path": "churn.csv", "restart_from": "neighbor"}],
        "gather": SKIP,
        "failures": QUICK,
        "stop": {"rounds": 8},
    },
    "partition": {
        "algorithm": "ad-psgd",
        "faults": [{"name": "partition", "groups": [[0, 1, 5]], "from_s": 0.02, "to_s": 0.05}],
        "compute": UNEVEN,
        "evaluation": GRID,
        "stop": {"rounds": 8, "time_s": 0.2},
    },
    # Codecs.
    "identity": {"codec": "identity"},
    "top-k-float16": {
        "task": "golden_parts:batch_norm",
        "codec": [{"name": "top-k", "fraction": 0.3}, "float16"],
        "algorithm": {"name": "d-psgd", "overlap": True},
    },
    "random-k": {
        "algorithm": "gossip-learning",
        "codec": {"name": "random-k", "fraction": 0.25},
        "aggregator": "coordinate-mean",
        "compute": UNEVEN,
        "network": SLOW_LINKS,
    },
    "random-k-common-quantize": {
        "algorithm": {"name": "epidemic-local", "degree": 3},
        "codec": [
            {"name": "random-k", "fraction": 0.5, "support": "common"},
            {"name": "quantize", "bits": 6},
        ],
        "network": {**SLOW_LINKS, "loss": 0.2},
        "gather": {"timeout_s": 0.03, "missing": "renormalize"},
    },
    "wavelet-bfloat16": {
        "codec": [{"name": "wavelet", "fraction": 0.2}, "bfloat16"],
        "gather": {"missing": "renormalize"},
    },
    "jwins-qsgd": {
        "algorithm": "swift",
        "codec": ["jwins", {"name": "qsgd", "block": 64}],
        "compute": UNEVEN,
    },
    "threshold": {"algorithm": "gradient-tracking", "codec": {"name": "threshold", "threshold": 0.02}},
    "round-robin-entropy": {
        "algorithm": "qg-momentum",
        "codec": [{"name": "round-robin", "blocks": 4}, "entropy"],
    },
    "choco-sgd-stc": {
        "algorithm": "choco-sgd",
        "codec": {"name": "stc", "fraction": 0.1},
        "topology": {"name": "random-regular", "degree": 3, "every_rounds": 2},
    },
    "deepsqueeze-sign": {
        "algorithm": "deepsqueeze",
        "codec": {"name": "sign", "block": "tensor"},
        "network": {**SLOW_LINKS, "loss": 0.2},
        "gather": {"timeout_s": 0.1},
    },
    "beer-low-rank": {"task": MLP, "algorithm": "beer", "codec": {"name": "low-rank", "rank": 2}},
    "powergossip": {
        "task": MLP,
        "algorithm": {"name": "powergossip", "local_steps": 2},
        "topology": {"name": "random-regular", "degree": 3, "every_rounds": 2},
    },
    "secure": {
        "topology": {"name": "random-regular", "degree": 3, "every_rounds": 2},
        "codec": {"name": "random-k", "fraction": 0.5, "support": "common"},
        "network": {**SLOW_LINKS, "loss": 0.05},
        "gather": {"timeout_s": 0.05},
        "secure_aggregation": {"drop_outs": "recover"},
    },
    "topology-aware": {
        "algorithm": {
            "name": "topology-aware",
            "participation": 0.7,
            "proximal": 0.1,
            "distance": "norm",
            "order": "sequential",
            "evaluate_trained": ["test"],
        },
        "initial": "independent",
        "optimizer": {"name": "adam", "lr": 0.01, "reset_every_round": True},
    },
    "gossiped-centrality": {
        "algorithm": "gossiped-centrality",
        "aggregator": "deviation-mean",
        "network": {**SLOW_LINKS, "loss": 0.05},
        "gather": {"timeout_s": 0.05},
    },
    "influence-corrected": {
        "algorithm": "influence-corrected",
        "topology": {"name": "barabasi-albert", "m": 2, "weights": {"name": "centrality"}},
    },
    "secure-once": {"algorithm": "qg-momentum", "secure_aggregation": {}},
    "ad-psgd-quantize": {
        "algorithm": "ad-psgd",
        "codec": "quantize",
        "compute": UNEVEN,
        "network": SLOW_LINKS,
    },
    # Poisoned samples.
    "poisoned": {
        "task": {"name": "digits", "model": "gn-lenet", "samples": 200},
        "poison": [
            {"name": "label-flip", "share": 0.3, "at": {"rank": 1}},
            {"name": "patch", "at": {"ranks": [2, 4]}, "size": 2, "target": 7, "set_name": "backdoor"},
            {"name": "rotate", "at": {"rank": 3}, "set_name": "turned"},
            {"name": "permute-labels", "at": {"rank": 5}, "set_name": "renamed"},
        ],
        "stop": {"rounds": 3},
    },
    "poisoned-by-other-samples": {
        "task": {"name": "digits", "model": "logistic", "samples": 200},
        "poison": [
            {"name": "held-out-class", "label": 3, "at": {"rank": 1}},
            {"name": "second-task", "task": "digits", "at": {"rank": 2}, "set_name": "other"},
            {"name": "tint", "factors": [0.5], "at": {"degree_rank": 0}, "set_name": "dim"},
        ],
        "stop": {"rounds": 3},
    },
    # Components of users, and interrupted runs.
    "wrapped": {"wrappers": [{"name": "golden_parts:Untouched"}]},
    "unwrapped": {},
    "attacked": {
        "wrappers": [
            {"name": "golden_parts:Untouched"},
            {"name": "golden_parts:Inverted", "attackers": [1, 4]},
        ],
        "gather": {"timeout_s": 0.03},
    },
    "everything": {
        "task": LEAST_SQUARES,
        "algorithm": "golden_parts:Everything",
        "topology": {
            "name": "layers",
            "layers": {"near": "ring", "far": {"name": "random-regular", "degree": 3, "every_rounds": 2}},
        },
        "compute": UNEVEN,
        "optimizer": {"name": "adam", "lr": 0.02},
    },
    "failed": {"algorithm": "golden_parts:Stumbling", "evaluation": {"every_rounds": 1}, "compute": UNEVEN},
    "saved": {
        "task": MLP,
        "optimizer": {"name": "adam", "lr": 0.01},
        "compute": UNEVEN,
        "checkpoint": {"every_rounds": 2, "keep": 9},
        "stop": {"rounds": 8},
    },
    "saved-asynchronous": {
        "algorithm": "swift",
        "compute": UNEVEN,
        "network": SLOW_LINKS,
        "checkpoint": {"every_s": 0.03},
        "stop": {"rounds": 8},
    },
}

FAILING: set[str] = {"failed"}
"""Experiments that are meant to fail."""

RESUMED: dict[str, tuple[str, int]] = {
    "saved-resumed": ("saved", 4),
    "saved-asynchronous-resumed": ("saved-asynchronous", 4),
}
"""By name: the experiment, and the round after which it is interrupted and resumed."""

SYNCHRONOUS: list[str] = [
    "d-psgd",
    "d-psgd-overlap",
    "d-psgd-changing-graph",
    "d-psgd-random-links",
    "d-psgd-random-weights",
    "d-psgd-batch-norm",
    "d-psgd-gn-lenet",
    "epidemic-oracle",
    "epidemic-local",
    "d2",
    "gradient-tracking-diging",
    "qg-momentum",
    "relay-sum",
    "sgp",
    "fedavg",
    "all-reduce",
    "local",
    "centralized",
    "top-k-float16",
    "beer-low-rank",
    "choco-sgd-stc",
    "powergossip",
    "threshold",
    "wrapped",
    "secure-once",
    "topology-aware",
    "influence-corrected",
]
"""Experiments with the same bits in simulation and in processes."""

FILES: dict[str, str] = {
    "edges.txt": "0 1\n1 2\n2 3\n3 4\n4 5\n5 0  # a ring\n0 3  # and a chord\n",
    "weights.txt": """\
0.25 0.25 0 0.25 0 0.25
0.25 0.5 0.25 0 0 0
0 0.25 0.5 0.25 0 0
0.25 0 0.25 0.25 0.25 0
0 0 0 0.25 0.5 0.25
0.25 0 0 0 0.25 0.5
""",
    "adjacency.txt": "0 1 1 0 0 1\n1 0 1 0 0 0\n1 1 0 1 0 0\n0 0 1 0 1 1\n0 0 0 1 0 1\n1 0 0 1 1 0\n",
    "graph.xml": """\
<graphml xmlns="http://graphml.graphdrawing.org/xmlns">
    <graph edgedefault="undirected">
        <node id="a"/> <node id="b"/> <node id="c"/> <node id="d"/> <node id="e"/> <node id="f"/>
        <edge source="a" target="b"/> <edge source="a" target="c"/> <edge source="a" target="d"/>
        <edge source="d" target="e"/> <edge source="e" target="f"/> <edge source="b" target="c"/>
    </graph>
</graphml>
""",
    "steps.csv": "node,seconds_per_step\na,0.010\na,0.020\nb,0.004\nb,0.007\nb,0.012\nc,0.015\n",
    "rates.csv": "time_s,rank,uplink_mbps,downlink_mbps,latency_ms\n0,*,2,4,\n0.01,1,0.5,,3\n0.02,2,1,1,\n0.03,1,2,,0\n",
    "churn.csv": "time_s,node,event\n0.025,2,crash\n0.03,4,leave\n0.06,5,join\n0.07,2,join\n0.075,4,join\n",
    "latencies.csv": "\n".join(
        ",".join("" if i == j else str(1 + (i + j) % 4 + (0.5 if i < j else 0)) for j in range(10))
        for i in range(10)
    ),
    "kollaps.xml": """\
<experiment boot="kollaps:2.0">
    <services> <service name="slow" replicas="2"/> <service name="quick" replicas="4"/> </services>
    <bridges> <bridge name="s"/> <bridge name="t"/> </bridges>
    <links>
        <link origin="slow" dest="s" latency="2" upload="1Mbps" download="2Mbps" drop="0.05"/>
        <link origin="s" dest="t" latency="1" jitter="0.2" upload="3Mbps" download="3Mbps"/>
        <link origin="quick" dest="t" latency="1" upload="5Mbps" download="6Mbps"/>
    </links>
    <dynamic>
        <schedule origin="s" dest="t" time="0.02" upload="1Mbps"/>
        <schedule origin="s" dest="t" time="0.04" upload="4Mbps"/>
    </dynamic>
</experiment>
""",
}
