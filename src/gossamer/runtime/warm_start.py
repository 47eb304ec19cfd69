"""``initial: {from: ...}``: the model of another run, or of a file of named tensors, with which all nodes start."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gossamer import files
from gossamer.config import Experiment, WarmStart
from gossamer.errors import BadInput
from gossamer.learning.parameters import Layout, ModuleMaker, initial_model
from gossamer.messages.tags import Model
from gossamer.randomness import SHARED, torch_seed
from gossamer.results.formatting import some
from gossamer.results.run import load_run
from gossamer.results.run_data import model_of


def resolved(experiment: Experiment) -> Experiment:
    """The experiment with ``initial.from`` resolved to a file and its checksum. Raises BadInput for a path without
    a model, and for a file whose checksum differs from the given one."""
    start = experiment.initial
    if not isinstance(start, WarmStart):
        return experiment
    path = start.path
    try:
        if path.is_dir():
            path = (run := load_run(path)).path / "models.safetensors"
            if run.parameters is None:
                raise BadInput(f"{run.path}: {run.status}; accepted: a run that has ended")
        crc = files.crc32(path, path.parent, "the folder of a run, or a safetensors file")
    except BadInput as error:
        raise BadInput(f"initial.from: {error}") from None
    if start.crc32 not in (None, crc):
        raise BadInput(f"initial.from: {path} has the checksum {crc}; accepted: {start.crc32}, as recorded")
    return experiment.model_copy(update={"initial": start.model_copy(update={"path": path, "crc32": crc})})


def warm_start(experiment: Experiment, maker: ModuleMaker, remarks: list[str]) -> Model | None:
    """The model from another run or a file with which all nodes start, if any. ``remarks`` gets what was changed in it."""
    start = resolved(experiment).initial
    if not isinstance(start, WarmStart):
        return None
    try:
        tensors = files.read_tensors(start.path)
    except BadInput as error:
        raise BadInput(f"initial.from: {error}") from None
    source = f"initial.from: {start.path}"
    if not tensors:
        raise BadInput(f"{source} has no tensors; accepted: the parameters of a model")
    if _is_of_run(tensors):
        return _of_run(tensors, start.rank, maker.layout, source)
    if start.rank is not None:
        raise BadInput(f"initial.rank: {start.rank}, with one model in {start.path}; accepted: null")
    fresh = initial_model(maker, torch_seed(experiment.seed, "initial", SHARED))
    return _of_names(tensors, fresh, maker, source, remarks)


def _is_of_run(tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors are the "parameters" [nodes, P] and "buffers" [nodes, B] of a run."""
    if "parameters" not in tensors or not tensors.keys() <= {"parameters", "buffers"}:
        return False
    nodes = tensors["parameters"].shape[:1]
    return all(tensor.dim() == 2 and tensor.shape[:1] == nodes for tensor in tensors.values())


def _of_run(tensors: Mapping[str, Tensor], rank: int | None, layout: Layout, source: str) -> Model:
    model = Model(*(part.float() for part in model_of(tensors, rank, "initial.rank")))
    if not all(part.isfinite().all() for part in model):
        raise BadInput(f"{source} has values that are not finite; accepted: another run, or another rank")
    if [len(part) for part in model] != [layout.size, layout.buffer_size]:
        sizes = f"{len(model.parameters):,} parameters and {len(model.buffers):,} values in buffers"
        wanted = f"{layout.size:,} and {layout.buffer_size:,}, as task.model has"
        raise BadInput(f"{source} has {sizes}; accepted: {wanted}")
    return model


def _of_names(
    tensors: Mapping[str, Tensor], fresh: Model, maker: ModuleMaker, source: str, remarks: list[str]
) -> Model:
    """A fresh model with the tensors of a file. A parameter may be there under any of its names in the model, and constants
    if they are those of the model."""
    tensors = _without_prefix(tensors, maker.names, source, remarks)
    model = Model(fresh.parameters.clone(), fresh.buffers.clone())
    fields = {field.name: field.of(model.parameters) for field in maker.layout.parameters}
    lacking = fields.keys() - {maker.names.get(name) for name in tensors}
    fields |= {field.name: field.of(model.buffers) for field in maker.layout.buffers}
    problems = [f"lacks {some(sorted(lacking))}"] if lacking else []
    if strange := tensors.keys() - maker.names.keys():
        problems.append(f"has {some(sorted(strange))}, which the model lacks")
    if problems:
        example = maker.layout.parameters[0].name
        raise BadInput(
            f"{source} {', and '.join(problems)}; accepted: the trained parameters of task.model by their names, such as"
            f" {example}, and its buffers"
        )
    read: dict[str, str] = {}  # the first name in the file of a tensor of the model
    for name, tensor in tensors.items():
        first = read.setdefault(maker.names[name], name)
        into = fields.get(maker.names[name], maker.constants.get(name))
        assert into is not None
        if tensor.shape != into.shape:
            wanted = f"accepted: {list(into.shape)}, as in task.model"
            raise BadInput(f"{source}: {name!r} has the shape {list(tensor.shape)}; {wanted}")
        if name in maker.constants:
            if (into.to(tensor.dtype) != tensor).any():
                raise BadInput(
                    f"{source}: {name!r} is not trained, and has other values in task.model; accepted: a file without it, or"
                    " a model that has the file's values"
                )
        elif first != name:
            if (tensors[first] != tensor).any():
                raise BadInput(
                    f"{source}: {first!r} and {name!r} differ, but are one parameter of task.model; accepted: equal values,"
                    " or one of them"
                )
        else:
            into.copy_(tensor)
            if not into.isfinite().all():
                raise BadInput(f"{source}: {name!r} has values that are not finite; accepted: finite ones")
            if (into.to(tensor.dtype) != tensor).any():
                kind = str(tensor.dtype).removeprefix("torch.")
                remarks.append(f"{source}: {name!r} is {kind}, and was rounded to float32")
    return model


def _without_prefix(
    tensors: Mapping[str, Tensor], known: Mapping[str, str], source: str, remarks: list[str]
) -> Mapping[str, Tensor]:
    """The tensors without the prefix that wrappers of modules give to all names (such as "module.", "_orig_mod.")."""
    words = next(iter(tensors)).split(".")
    if tensors.keys() <= known.keys():
        return tensors
    for count in range(1, len(words)):
        prefix = ".".join(words[:count]) + "."
        bare = {
            name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
        }
        if len(bare) == len(tensors) and bare.keys() <= known.keys():
            remarks.append(f"{source}: names are read without their prefix {prefix!r}")
            return bare
    return tensors
